"""What decoding keeps of the past: raw and compressed keys and values, a `LayerCache` a layer.

`NSACache`, one `LayerCache` for each attention layer of a model, knows patched models and so lives
in `nsa_flex.patching`. It can still be imported from here.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nsa_flex.cache.layer import LayerCache
from nsa_flex.cache.memory import Memory

if TYPE_CHECKING:
    from nsa_flex.patching.nsa_cache import NSACache

__all__ = ["LayerCache", "Memory", "NSACache"]


def __getattr__(name: str) -> Any:
    if name == "NSACache":  # its former place; the package above knows where it lives
        return sys.modules["nsa_flex"].NSACache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
