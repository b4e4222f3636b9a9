"""What decoding keeps of the past: raw and compressed keys and values, a `LayerCache` a layer.

`nsa_flex.NSACache`, one `LayerCache` for each attention layer of a model, knows patched models and
so lives in `nsa_flex.patching`.
"""

from nsa_flex.cache.buffers import Memory
from nsa_flex.cache.layer import LayerCache

__all__ = ["LayerCache", "Memory"]
