"""Native Sparse Attention for torch.compile and FlexAttention."""

from nsa_flex.config import NSAConfig

__all__ = ["NSAConfig"]
__version__ = "0.1.0"
