"""Which kernels end the forward of the core."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa_flex import nsa_attention

_ENDS = {
    "fused_sliding_epilogue_kernel",
    "fused_fwd_epilogue_kernel",
    "fused_fwd_epilogue_sm90_kernel",
    "gated_sum_fwd_kernel",
}


def ends_of(inputs: list[Tensor], **options: Any) -> tuple[Any, set[str]]:
    """What `nsa_attention` returns on CUDA, and which kernels ended its forward."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        results = nsa_attention(*inputs, **options)
    return results, _ENDS & {event.name for event in trace.events()}


def watched_epilogue(monkeypatch: pytest.MonkeyPatch, union_limit: int) -> Mock:
    """`fwd_epilogue`, which counts its calls; from now on it takes what the interpreter can.

    Args:
        union_limit: of the selection; tests use `forget_plans` for it.
    """
    from nsa_flex.fallback_kernels.fused import fwd_epilogue as epilogue
    from nsa_flex.fallback_kernels.selected import config as selected_plan

    monkeypatch.setattr(epilogue, "BLOCK_SIZES", (16,))
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", union_limit)
    monkeypatch.setattr(selected_plan, "PARTIAL_BYTES", 1)
    monkeypatch.setattr(selected_plan, "MIN_CHUNK_TOKENS", 32)
    watched = Mock(wraps=epilogue.fwd_epilogue)
    monkeypatch.setattr(epilogue, "fwd_epilogue", watched)
    return watched
