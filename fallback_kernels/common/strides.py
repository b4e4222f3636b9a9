"""Strides and memory order of tensors, as the kernels take and give them."""

from __future__ import annotations

import torch
from torch import Tensor


def strides(tensor: Tensor) -> tuple[int, int, int]:
    """Strides of batch, head and token: one argument of a kernel.

    Kernels take the last dimension as contiguous. Triton specialises each element of a tuple, as
    it does an integer; `do_not_specialize` has no effect on tuples (Triton 3.6 to 3.9).
    """
    batch, head, token, last = tensor.stride()
    assert last == 1 or tensor.shape[3] == 1
    return batch, head, token


def rows_contiguous(tensor: Tensor) -> Tensor:
    """`tensor`, copied only if its last dimension is strided."""
    if tensor.stride(3) == 1 or tensor.shape[3] == 1:
        return tensor
    return tensor.contiguous()


def to_bshd(tensor: Tensor) -> Tensor:
    """`tensor` (B, H, S, D) with dense memory (B, S, H, D), copied only if it has another."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def is_bsh(tensor: Tensor) -> bool:
    """Whether (B, H, S) has dense memory (B, S, H), as the backward's kernels read it."""
    return tensor.transpose(1, 2).is_contiguous()


def empty_bshd(like: Tensor, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """New (B, heads, tokens, dim) tensor whose memory is (B, tokens, heads, dim)."""
    shape = (like.shape[0], tokens, heads, dim)
    return torch.empty(shape, dtype=dtype, device=like.device).transpose(1, 2)


def empty_results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """New output (B, Hq, Sq, Dv) and float32 log-sum-exp (B, Hq, Sq), memory (B, S, H, ...)."""
    _, heads, tokens, _ = query.shape
    out = empty_bshd(query, heads, tokens, value.shape[3], query.dtype)
    return out, empty_bshd(query, heads, tokens, 1, torch.float32)[..., 0]


def empty_gradients(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New tensors of their shapes and dtypes, memory (B, S, H, D)."""
    dq, dk, dv = (
        empty_bshd(x, x.shape[1], x.shape[2], x.shape[3], x.dtype) for x in (query, key, value)
    )
    return dq, dk, dv


def has_tma_strides(tensor: Tensor) -> bool:
    """Whether TMA can copy tiles of a 4D tensor: 16-byte strides, the last dimension dense."""
    aligned = all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:3])
    return aligned and tensor.data_ptr() % 16 == 0 and tensor.stride(3) == 1
