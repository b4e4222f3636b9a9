"""Strides and memory order of tensors, as the kernels take and give them."""

from __future__ import annotations

import torch
from torch import Tensor


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token; the kernels take the last dimension as contiguous."""
    assert tensor.stride(3) == 1 or tensor.shape[3] == 1
    return tensor.stride(0), tensor.stride(1), tensor.stride(2)


def rows_contiguous(tensor: Tensor) -> Tensor:
    """`tensor`, copied only if its last dimension is strided."""
    if tensor.stride(3) == 1 or tensor.shape[3] == 1:
        return tensor
    return tensor.contiguous()


def natural(tensor: Tensor) -> Tensor:
    """`tensor` (B, H, S, D) with dense memory (B, S, H, D), copied only if it has another."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def natural_rows(tensor: Tensor) -> bool:
    """Whether (B, H, S) has dense memory (B, S, H), as the backward's kernels read it."""
    return tensor.transpose(1, 2).is_contiguous()


def empty_natural(like: Tensor, heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """New (B, heads, tokens, width) tensor whose memory is (B, tokens, heads, width)."""
    shape = (like.shape[0], tokens, heads, width)
    return torch.empty(shape, dtype=dtype, device=like.device).transpose(1, 2)
