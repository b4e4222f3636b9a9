"""All branches at once, where each has a kernel that the core operator knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from nsa_flex.config import NSAConfig

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.core import CoreResults

# The backends of the branches whose kernels the operator runs.
FUSED = {"compressed": "sdpa", "selected": "triton", "sliding": "triton"}


def attend(tensors: tuple[Tensor, ...], config: NSAConfig, scale: float) -> CoreResults:
    """The core from its eight tensors, in the order of `nsa_flex.attention.Inputs`."""
    from nsa_flex.fallback_kernels.core import core_attention

    *others, gates, sliding_key, sliding_value = tensors
    query, key, value, compressed_key, compressed_value = others
    return core_attention(
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        sliding_key,
        sliding_value,
        gates,
        config=config,
        scale=scale,
    )
