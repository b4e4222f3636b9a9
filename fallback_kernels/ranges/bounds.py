"""Ranges of keys that the branches' queries see, as tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def compressed_bounds(
    positions: Tensor, document_start: Tensor, num_blocks: int, block: int, stride: int
) -> tuple[Tensor, Tensor]:
    """First compressed key that each query sees, and one past the last: two int32 tensors.

    From the first block of its document to the last complete one: start/d ... (t - l + 1)//d,
    a range that never goes back.

    Args:
        positions: int32 (B or 1, Sq), key index of each query.
        document_start: int32, broadcast against it, multiples of the stride; first key of each
            query's document.
        num_blocks: N, compressed keys there are.
        block, stride: l and d.
    """
    first = (document_start // stride).clamp(max=num_blocks)
    complete = (positions - (block - 1 - stride)) // stride
    end = torch.maximum(complete.clamp(max=num_blocks), first)
    return torch.broadcast_tensors(first, end)
