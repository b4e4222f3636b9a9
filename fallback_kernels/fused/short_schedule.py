"""The core's forward and backward where every query selects every block: two kernels' launches.

What `schedule` computes, by the kernels of `fallback_kernels.short`, with the same results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.every_block import every_block
from nsa_flex.fallback_kernels.fused.schedule import CoreGradients, CoreTensors
from nsa_flex.fallback_kernels.selected.config import index_words
from nsa_flex.fallback_kernels.short.core import short_backward
from nsa_flex.fallback_kernels.short.fwd import ShortResults, short_forward


def run_short_forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    differentiable: bool,
    return_blocks: bool,
) -> CoreTensors:
    """The results of `core_forward`: nothing is scored, selected or indexed.

    What nobody wants has the shape that the operator promises, and is not written.
    """
    query, _, value, *_ = tensors
    batch, _, tokens, _ = query.shape
    shape = (batch, value.shape[1], tokens, config.num_selected_blocks)
    if return_blocks:
        positions = torch.arange(tokens, device=query.device)[None]
        blocks = every_block(positions, document_start, shape, config.select_block_size)
    else:
        blocks = torch.empty(shape, dtype=torch.int32, device=query.device)
    words = index_words(query, value, blocks, config.select_block_size, 0)
    index = torch.empty(words if differentiable else 0, dtype=torch.int32, device=query.device)
    found = short_forward(
        tensors,
        own,
        document_start,
        config,
        scale,
        config.num_selected_tokens,
        save=differentiable,
    )
    return (
        found.out,
        blocks,
        found.compressed,
        found.compressed_lse,
        found.selected,
        found.selected_lse,
        found.sliding,
        found.sliding_lse,
        index,
    )


def run_short_backward(
    grad: Tensor,
    inputs: list[Tensor],
    results: list[Tensor],
    document_start: Tensor | None,
    scale: float,
    config: NSAConfig,
    *,
    masked: int = 0,
) -> CoreGradients:
    """The results of `core_backward` for what `run_short_forward` computed.

    masked: for what `run_forward` computed of documents that are attended whole, and masked: the
    tokens that they have at most.
    """
    own = (inputs[6], inputs[7]) if len(inputs) > 6 else None
    saved = ShortResults(grad, *results[1:-1])  # the output itself is not needed
    grads = short_backward(
        grad.transpose(1, 2),
        tuple(inputs[:6]),
        own,
        saved,
        document_start,
        config,
        scale,
        masked or config.num_selected_tokens,
        results[0] if masked else None,
    )
    dq, dk, dv, dck, dcv, gates, *of_window = grads
    window_key, window_value = of_window or (grad.new_empty(0), grad.new_empty(0))
    return dq, dk, dv, dck, dcv, gates, window_key, window_value
