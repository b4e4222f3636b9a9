"""All three branches on hand-tuned Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1: a query sees the blocks from its document's first to the last that is complete."""
    config = branch.config
    sizes = [branch.key.shape[2], config.compress_block_size, config.compress_stride]
    return _ranged(branch, sizes)


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
    """Branch 3: a query sees the last tokens of its document."""
    return _ranged(branch, [branch.config.window_size])


def _query_offset(branch: Branch) -> int | Tensor:
    """Key index of query 0, of each batch row where the host does not know it."""
    if branch.known_offset is not None:
        return branch.known_offset
    assert branch.offset is not None
    return branch.offset


def _ranged(branch: Branch, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Attention to the ranges that `bounds` finds by `sizes`."""
    from nsa_flex.fallback_kernels.ranges.bounds import bounds
    from nsa_flex.fallback_kernels.ranges.interface import ranged_attention

    query, key, value, scale = branch.query, branch.key, branch.value, branch.scale
    offset = 0 if branch.offset is None else _query_offset(branch)
    known, offsets = (0, offset) if isinstance(offset, Tensor) else (offset, None)
    start = branch.document_start
    start = None if start is None else start.to(torch.int32).contiguous()
    first, end = bounds(query, query.shape[2], known, offsets, start, sizes)
    return ranged_attention(query, key, value, first, end, scale=scale)
