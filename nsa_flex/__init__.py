"""Native Sparse Attention for torch.compile and FlexAttention."""

from nsa_flex.attention import Explanation, NSAAux, explain, nsa_attention
from nsa_flex.config import NSAConfig
from nsa_flex.documents import DocumentLayout, align_packed, align_padded, align_positions

__all__ = [
    "DocumentLayout",
    "Explanation",
    "NSAAux",
    "NSAConfig",
    "align_packed",
    "align_padded",
    "align_positions",
    "explain",
    "nsa_attention",
]
__version__ = "0.1.0"
