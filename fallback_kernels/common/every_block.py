"""The blocks of queries that select every block: no score decides."""

from __future__ import annotations

import torch
from torch import Tensor


def every_block(
    positions: Tensor,
    document_start: Tensor | None,
    shape: tuple[int, int, int, int],
    block_size: int,
) -> Tensor:
    """The blocks from a document's first to the query's own, ascending, -1 behind them.

    Args:
        positions: int (B or 1, Sq), key index of each query.
        document_start: int (B, Sq), first key of its document, or None for key 0.
        shape: (B, Hkv, Sq, n) of the result, int32; no query has more than n blocks.
    """
    own = (positions // block_size)[:, :, None]  # [B or 1, Sq, 1]
    block = torch.arange(shape[3], device=positions.device)  # [n]
    if document_start is not None:
        block = block + (document_start // block_size)[:, :, None]  # [B, Sq, n]
    blocks = torch.where(block <= own, block, -1).to(torch.int32)
    return blocks[:, None].expand(shape).contiguous()
