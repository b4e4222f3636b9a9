"""Numbers of a row that backwards read: delta, and beside it the log-sum-exp."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.selected.config import padded
from nsa_flex.fallback_kernels.selected.tiles import load_some_rows, row_lse_log2

DELTA_ROWS = 32
NUMBER_ROWS = 1024


def row_deltas(out: Tensor, grad_out: Tensor, grad_lse: Tensor | None, *, wide: bool) -> Tensor:
    """rowsum(out * grad_out) - grad_lse in float32, (B, H, S) with memory (B, S, H).

    Args:
        out, grad_out: (B, H, S, Dv), memory (B, S, H, Dv).
        grad_lse: (B, H, S), any strides.
        wide: whether an offset within a batch row may need 64 bits.
    """
    batch, heads, tokens, value_dim = out.shape
    delta = torch.empty((batch, tokens, heads), dtype=torch.float32, device=out.device)
    lse_gradient = delta.transpose(1, 2) if grad_lse is None else grad_lse
    delta_kernel[(triton.cdiv(tokens * heads, DELTA_ROWS), batch)](
        out,
        grad_out,
        lse_gradient,
        delta,
        *lse_gradient.stride(),
        tokens,
        heads,
        VALUE_DIM=value_dim,
        VALUE_COLUMNS=padded(value_dim),
        WIDE=wide,
        HAS_GRAD_LSE=grad_lse is not None,
        ROWS=DELTA_ROWS,
    )
    return delta.transpose(1, 2)


def row_numbers(lse: Tensor, delta: Tensor) -> Tensor:
    """Of (B, H, S) numbers with natural memory: float32 (B, S, H, 2), see `row_numbers_kernel`."""
    batch, heads, tokens = lse.shape
    numbers = torch.empty((batch, tokens, heads, 2), dtype=torch.float32, device=lse.device)
    grid = (triton.cdiv(lse.numel(), NUMBER_ROWS),)
    row_numbers_kernel[grid](lse, delta, numbers, lse.numel(), ROWS=NUMBER_ROWS)
    return numbers


@triton.jit
def delta_kernel(
    out_ptr,
    grad_out_ptr,
    grad_lse_ptr,
    delta_ptr,
    grad_lse_stride_b,
    grad_lse_stride_h,
    grad_lse_stride_s,
    num_queries,
    query_heads,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = sum(out * grad_out) - grad_lse, (B, Sq, Hq)."""
    b = tl.program_id(1).to(tl.int64)
    num_lines = num_queries * query_heads
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = line < num_lines
    first = b * num_lines
    out = load_some_rows(out_ptr + first * VALUE_DIM, line, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS)
    grad_out = load_some_rows(
        grad_out_ptr + first * VALUE_DIM, line, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS
    )
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        i = (line // query_heads).to(tl.int64)
        place = b * grad_lse_stride_b + i * grad_lse_stride_s
        place += (line % query_heads) * grad_lse_stride_h
        delta -= tl.load(grad_lse_ptr + place, mask=row_ok, other=0.0)
    tl.store(delta_ptr + first + line, delta, mask=row_ok)


@triton.jit(do_not_specialize=["num_lines"])
def row_numbers_kernel(lse_ptr, delta_ptr, numbers_ptr, num_lines, ROWS: tl.constexpr):
    """What is gathered with a row, side by side: base-2 log-sum-exp, and delta."""
    line = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_ok = line < num_lines
    lse_log2 = row_lse_log2(lse_ptr, line, row_ok)
    delta = tl.load(delta_ptr + line, mask=row_ok, other=0.0)
    tl.store(numbers_ptr + line * 2, lse_log2, mask=row_ok)
    tl.store(numbers_ptr + line * 2 + 1, delta, mask=row_ok)
