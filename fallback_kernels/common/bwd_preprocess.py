"""Softmax stats that backwards read: delta of every row, and beside it the log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import load_lse_log2
from nsa_flex.fallback_kernels.common.tiles import cdiv, load_masked_rows, width_of

DELTA_ROWS = tl.constexpr(32)
STATS_ROWS = tl.constexpr(1024)


def row_deltas(
    out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, *, int64_offsets: bool
) -> Tensor:
    """rowsum(out * grad_out) - grad_lse in float32, (B, H, S) with memory (B, S, H).

    Args:
        out, grad_out: (B, H, S, Dv), memory (B, S, H, Dv).
        grad_lse: (B, H, S), any strides.
        int64_offsets: whether an offset within a batch row may need 64 bits.
    """
    batch, heads, tokens, value_dim = out.shape
    delta = torch.empty((batch, tokens, heads), dtype=torch.float32, device=out.device)
    lse_gradient = delta.transpose(1, 2) if grad_lse is None else grad_lse
    bwd_delta_kernel[(cdiv(tokens * heads, DELTA_ROWS.value), batch)](
        out,
        grad_out,
        lse_gradient,
        delta,
        lse_gradient.stride(),
        tokens,
        heads,
        VALUE_DIM=value_dim,
        INT64_OFFSETS=int64_offsets,
        HAS_GRAD_LSE=grad_lse is not None,
    )
    return delta.transpose(1, 2)


def softmax_stats(lse: Tensor, delta: Tensor) -> Tensor:
    """float32 (B, S, H, 2) of (B, H, S) with memory (B, S, H): see `softmax_stats_kernel`."""
    batch, heads, tokens = lse.shape
    stats = torch.empty((batch, tokens, heads, 2), dtype=torch.float32, device=lse.device)
    grid = (cdiv(lse.numel(), STATS_ROWS.value),)
    softmax_stats_kernel[grid](lse, delta, stats, lse.numel())
    return stats


@recordable
@triton.jit
def bwd_delta_kernel(
    out_ptr,
    grad_out_ptr,
    grad_lse_ptr,
    delta_ptr,
    grad_lse_strides,
    num_queries,
    query_heads,
    VALUE_DIM: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
):
    """delta = sum(out * grad_out) - grad_lse, (B, Sq, Hq)."""
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    b = tl.program_id(1).to(tl.int64)
    num_rows = num_queries * query_heads
    row = tl.program_id(0) * DELTA_ROWS + tl.arange(0, DELTA_ROWS)
    row_mask = row < num_rows
    first = b * num_rows
    out = load_masked_rows(
        out_ptr + first * VALUE_DIM, row, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV
    )  # [DELTA_ROWS, BLOCK_DV]
    grad_out = load_masked_rows(
        grad_out_ptr + first * VALUE_DIM, row, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV
    )  # [DELTA_ROWS, BLOCK_DV]
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)  # [DELTA_ROWS]
    if HAS_GRAD_LSE:
        query = (row // query_heads).to(tl.int64)
        offset = b * grad_lse_strides[0] + query * grad_lse_strides[2]
        offset += (row % query_heads) * grad_lse_strides[1]
        delta -= tl.load(grad_lse_ptr + offset, mask=row_mask, other=0.0)
    tl.store(delta_ptr + first + row, delta, mask=row_mask)


@recordable
@triton.jit(do_not_specialize=["num_rows"])
def softmax_stats_kernel(lse_ptr, delta_ptr, stats_ptr, num_rows):
    """What is gathered with a row, side by side: base-2 log-sum-exp, and delta."""
    row = tl.program_id(0) * STATS_ROWS + tl.arange(0, STATS_ROWS)
    row_mask = row < num_rows
    lse_log2 = load_lse_log2(lse_ptr, row, row_mask)  # [STATS_ROWS]
    delta = tl.load(delta_ptr + row, mask=row_mask, other=0.0)  # [STATS_ROWS]
    tl.store(stats_ptr + row * 2, lse_log2, mask=row_mask)
    tl.store(stats_ptr + row * 2 + 1, delta, mask=row_mask)
