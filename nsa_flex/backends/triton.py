"""All three branches on hand-tuned Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1: a query sees the blocks from its document's first to the last that is complete."""
    from nsa_flex.fallback_kernels.ranges.bounds import compressed_bounds

    config, positions = branch.config, _positions(branch)
    sizes = branch.key.shape[2], config.compress_block_size, config.compress_stride
    bounds = compressed_bounds(positions, _document_start(branch, positions), *sizes)
    return _ranged(branch, *bounds)


def selected(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 2, key blocks outermost, whatever blocks are chosen."""
    from nsa_flex.fallback_kernels.selected.interface import selected_attention

    assert branch.blocks is not None
    config = branch.config
    return selected_attention(
        branch.query,
        branch.key,
        branch.value,
        branch.blocks,
        block_size=config.select_block_size,
        num_initial_blocks=config.num_initial_blocks,
        num_local_blocks=config.num_local_blocks,
        scale=branch.scale,
        query_offset=_query_offset(branch),
    )


def sliding(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 3: tiles of tokens times the heads of a group; with an offset, ranges."""
    if branch.offset is not None:
        positions = _positions(branch)
        window = (positions - branch.config.window_size + 1).clamp(min=0)
        first = torch.maximum(window, _document_start(branch, positions))
        return _ranged(branch, first, positions + 1)
    from nsa_flex.fallback_kernels.sliding.interface import sliding_attention

    return sliding_attention(
        branch.query,
        branch.key,
        branch.value,
        window_size=branch.config.window_size,
        scale=branch.scale,
        document_start=_int32(branch.document_start),
    )


def _query_offset(branch: Branch) -> int | Tensor:
    """Key index of query 0, of each batch row where the host does not know it."""
    if branch.known_offset is not None:
        return branch.known_offset
    assert branch.offset is not None
    return branch.offset


def _positions(branch: Branch) -> Tensor:
    """int32 (B or 1, Sq): key index of each query."""
    tokens = torch.arange(branch.query.shape[2], device=branch.query.device, dtype=torch.int32)
    if branch.offset is None:
        return tokens[None]
    return tokens + branch.offset.to(torch.int32)[:, None]


def _document_start(branch: Branch, positions: Tensor) -> Tensor:
    """int32, as `positions`: the first key of each query's document."""
    if branch.document_start is None:
        return torch.zeros_like(positions)
    return branch.document_start.to(torch.int32)


def _int32(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.int32)


def _ranged(branch: Branch, first: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    from nsa_flex.fallback_kernels.ranges.interface import ranged_attention

    query, key, value = branch.query, branch.key, branch.value
    first, end = torch.broadcast_tensors(first, end)
    return ranged_attention(query, key, value, first, end, scale=branch.scale)
