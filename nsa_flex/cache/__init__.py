"""What decoding keeps of the past: raw and compressed keys and values, a `LayerCache` a layer.

`NSACache` holds one for each attention layer of a model. Its module is imported on first use:
it looks for transformers, whose `Cache` it is where that is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nsa_flex.cache.layer import LayerCache
from nsa_flex.cache.memory import Memory

if TYPE_CHECKING:
    from nsa_flex.cache.nsa_cache import NSACache

__all__ = ["LayerCache", "Memory", "NSACache"]


def __getattr__(name: str) -> Any:
    if name == "NSACache":
        from nsa_flex.cache.nsa_cache import NSACache

        return NSACache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
