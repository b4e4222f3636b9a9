"""Native Sparse Attention for torch.compile and FlexAttention."""

from nsa_flex.attention import Explanation, NSAAux, explain, nsa_attention
from nsa_flex.compression import Compression
from nsa_flex.config import NSAConfig
from nsa_flex.documents import DocumentLayout, align_packed, align_padded, align_positions
from nsa_flex.gates import Gates
from nsa_flex.module import NSAAttention
from nsa_flex.patching import Adapter, AttentionShape, load, patch, register_adapter, unpatch

__all__ = [
    "Adapter",
    "AttentionShape",
    "Compression",
    "DocumentLayout",
    "Explanation",
    "Gates",
    "NSAAttention",
    "NSAAux",
    "NSAConfig",
    "align_packed",
    "align_padded",
    "align_positions",
    "explain",
    "load",
    "nsa_attention",
    "patch",
    "register_adapter",
    "unpatch",
]
__version__ = "0.1.0"
