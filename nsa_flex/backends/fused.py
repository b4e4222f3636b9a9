"""All branches at once, where each has a kernel that the core operator knows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nsa_flex.backends.branch import Inputs
from nsa_flex.backends.facts import Facts
from nsa_flex.config import NSAConfig
from nsa_flex.reasons import explained

if TYPE_CHECKING:
    from nsa_flex.fallback_kernels.fused.operators import CoreResults

# Backends by branch whose kernels the operator runs: of whole rows, and of documents and offsets.
FUSED = ("sdpa", "triton", "triton")
FUSED_RANGES = ("triton", "triton", "triton")


@explained
def unsupported_reason(facts: Facts) -> str | None:
    """Why branches with the backends of `FUSED_RANGES` run one by one; None if together."""
    if facts.whole and not facts.documents:
        return "one operator takes range attention with packed documents or an offset alone"
    if not facts.whole and facts.documents and not facts.needs_grad:
        return "one operator takes documents at an offset with gradients alone"
    if not facts.whole and not facts.known_offset:
        return "one operator takes an offset that the host knows, an int"
    if facts.head_dim % 8 or facts.value_head_dim % 8:
        got = f"{facts.head_dim} and {facts.value_head_dim}"
        return f"one operator takes head dims in multiples of 8, got {got}"
    return None


def attend(
    inputs: Inputs,
    config: NSAConfig,
    scale: float,
    document_start: Tensor | None,
    max_document_length: int | None,
    *,
    return_blocks: bool,
    query_offset: int | None = None,
) -> CoreResults:
    """The core of `nsa_attention` with such inputs, checked.

    query_offset: None where the queries are the last tokens of their rows.
    """
    from nsa_flex.fallback_kernels.fused.operators import core_attention

    if document_start is not None:
        document_start = document_start.to(torch.int32).contiguous()
    return core_attention(
        *inputs,
        config=config,
        scale=scale,
        document_start=document_start,
        max_document_length=max_document_length,
        return_blocks=return_blocks,
        query_offset=query_offset,
    )
