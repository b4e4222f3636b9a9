"""All branches at once, where each has a kernel that the core operator knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_flex.config import NSAConfig

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.fused.interface import CoreResults
    from nsa_flex.inputs import Inputs

# The backends of the branches whose kernels the operator runs.
FUSED = {"compressed": "sdpa", "selected": "triton", "sliding": "triton"}


def attend(inputs: Inputs, config: NSAConfig, scale: float) -> CoreResults:
    """The core of `nsa_attention` with such inputs, checked."""
    from nsa_flex.fallback_kernels.fused.interface import core_attention

    return core_attention(*inputs, config=config, scale=scale)
