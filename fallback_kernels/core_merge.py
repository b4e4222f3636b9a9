"""The gated sum of the branches, the compressed one in the parts of its fold, and its backward.

One pass over memory each way. `delta_c = sum(dO * o_c)` is at once the gradient of gate c and what
the backward of branch c subtracts from `dO v^T`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.fold_parts import Fold, bounds_of, of_part, part_place

ROWS = 16  # heads of tokens a program handles
LSE_TOKENS = 256


def spread_lse(lse: tuple[Tensor, ...], fold: Fold, heads: int, num_tokens: int) -> Tensor:
    """Log-sum-exps of the parts as float32 (B, H, S), -inf for the first l - 1 queries."""
    batch = lse[0].shape[0]
    out = torch.empty((batch, heads, num_tokens), dtype=torch.float32, device=lse[0].device)
    _spread_kernel[(triton.cdiv(num_tokens, LSE_TOKENS), batch * heads)](
        *lse,
        out,
        heads,
        num_tokens,
        *bounds_of(fold.parts),
        fold.reach,
        STRIDE=fold.stride,
        TOKENS=LSE_TOKENS,
    )
    return out


def gated_sum(
    parts: tuple[Tensor, ...],
    fold: Fold,
    selected: Tensor,
    sliding: Tensor,
    gates: Tensor,
    compressed: Tensor | None,
) -> Tensor:
    """`sum_c gates[..., c] * branch_c` in float32, (B, S, H, D) in the branches' dtype.

    Args:
        parts: outputs of the parts of the compressed branch.
        selected, sliding: (B, S, H, D), contiguous.
        gates: (B, H, S, 3), any strides.
        compressed: receives the compressed branch, (B, S, H, D); None if nobody wants it.
    """
    out = torch.empty_like(selected)
    batch, tokens, heads, dim = selected.shape
    _sum_kernel[_grid(selected)](
        *parts,
        selected,
        sliding,
        gates,
        out,
        out if compressed is None else compressed,
        *gates.stride(),
        batch * tokens * heads,
        tokens,
        heads,
        *bounds_of(fold.parts),
        fold.reach,
        STRIDE=fold.stride,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ROWS,
        SAVE=compressed is not None,
    )
    return out


class SumGradients(NamedTuple):
    """What `gated_sum_gradients` returns."""

    gates: Tensor  # (B, S, H, 3)
    compressed: Tensor  # (B, S, H, D), gated
    delta_selected: Tensor  # float32 (B, S, H), not gated
    delta_sliding: Tensor


def gated_sum_gradients(
    grad: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor
) -> SumGradients:
    """Gradients of the gates and the compressed branch; the other branches apply their gate.

    All but the gates (B, S, H, D), contiguous.
    """
    batch, tokens, heads, dim = selected.shape
    grad_gates = gates.new_empty((batch, tokens, heads, 3))
    deltas = torch.empty((2, batch, tokens, heads), dtype=torch.float32, device=grad.device)
    grad_compressed = torch.empty_like(compressed)
    _gradient_kernel[_grid(selected)](
        grad,
        compressed,
        selected,
        sliding,
        gates,
        grad_compressed,
        grad_gates,
        deltas[0],
        deltas[1],
        *gates.stride(),
        batch * tokens * heads,
        tokens,
        heads,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ROWS,
    )
    return SumGradients(grad_gates, grad_compressed, deltas[0], deltas[1])


def _grid(selected: Tensor) -> tuple[int]:
    return (triton.cdiv(selected.shape[0] * selected.shape[1] * selected.shape[2], ROWS),)


@triton.jit(do_not_specialize=["num_tokens", "rows", "first1", "first2", "first3", "reach"])
def _spread_kernel(
    lse0, lse1, lse2, lse3, out,
    heads, num_tokens, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    s = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = s < num_tokens
    part, residue, width, part_rows, row = part_place(
        s, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((b * width + residue) * heads + h) * part_rows + row
    seen = there & (s >= reach)
    lse = tl.load(of_part(part, lse0, lse1, lse2, lse3) + line, mask=seen, other=float("-inf"))
    tl.store(out + tl.program_id(1).to(tl.int64) * num_tokens + s, lse, mask=there)


@triton.jit
def _place(num_rows, num_tokens, heads, ROWS: tl.constexpr):
    """Row of (B, S, H) memory, its batch row, token and head, and whether it is there."""
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = line < num_rows
    token = line // heads
    return line, token // num_tokens, token % num_tokens, line % heads, there


@triton.jit
def _part_pointers(
    x0, x1, x2, x3, b, s, h, heads, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Pointers (ROWS, COLUMNS) to the rows of the queries in their parts."""
    part, residue, width, part_rows, row = part_place(
        s, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((b * part_rows + row) * width + residue) * heads + h
    pointer = of_part(part, x0, x1, x2, x3) + line * DIM
    # The choice of a pointer hides that rows start at multiples of 16 bytes.
    return tl.multiple_of(pointer[:, None] + tl.arange(0, COLUMNS)[None, :], (1, 16))


@triton.jit
def _gate(gates, c: tl.constexpr, b, h, s, stride_b, stride_h, stride_s, stride_c, there):
    place = b * stride_b + h * stride_h + s * stride_s + c * stride_c
    return tl.load(gates + place, mask=there, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "rows", "first1", "first2", "first3"])
def _sum_kernel(
    x0, x1, x2, x3, selected, sliding, gates, out, compressed,
    stride_b, stride_h, stride_s, stride_c,
    num_rows, num_tokens, heads, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    line, b, s, h, there = _place(num_rows, num_tokens, heads, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = there[:, None] & (column < DIM)[None, :]
    flat = (line * DIM)[:, None] + column[None, :]
    pointer = _part_pointers(
        x0, x1, x2, x3, b, s, h, heads, rows, first1, first2, first3, reach, STRIDE, DIM, COLUMNS
    )
    a0 = tl.load(pointer, mask=inside & (s >= reach)[:, None], other=0.0)
    if SAVE:
        tl.store(compressed + flat, a0, mask=inside)
    a1 = tl.load(selected + flat, mask=inside, other=0.0)
    a2 = tl.load(sliding + flat, mask=inside, other=0.0)
    g0 = _gate(gates, 0, b, h, s, stride_b, stride_h, stride_s, stride_c, there)
    g1 = _gate(gates, 1, b, h, s, stride_b, stride_h, stride_s, stride_c, there)
    g2 = _gate(gates, 2, b, h, s, stride_b, stride_h, stride_s, stride_c, there)
    total = a0.to(tl.float32) * g0[:, None]
    total += a1.to(tl.float32) * g1[:, None]
    total += a2.to(tl.float32) * g2[:, None]
    tl.store(out + flat, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gradient_kernel(
    grad, compressed, selected, sliding, gates,
    grad_compressed, grad_gates, delta_selected, delta_sliding,
    stride_b, stride_h, stride_s, stride_c,
    num_rows, num_tokens, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    line, b, s, h, there = _place(num_rows, num_tokens, heads, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = there[:, None] & (column < DIM)[None, :]
    flat = (line * DIM)[:, None] + column[None, :]
    do = tl.load(grad + flat, mask=inside, other=0.0).to(tl.float32)
    delta0 = tl.sum(do * tl.load(compressed + flat, mask=inside, other=0.0).to(tl.float32), 1)
    delta1 = tl.sum(do * tl.load(selected + flat, mask=inside, other=0.0).to(tl.float32), 1)
    delta2 = tl.sum(do * tl.load(sliding + flat, mask=inside, other=0.0).to(tl.float32), 1)
    g0 = _gate(gates, 0, b, h, s, stride_b, stride_h, stride_s, stride_c, there)
    gated = (do * g0[:, None]).to(grad_compressed.dtype.element_ty)
    tl.store(grad_compressed + flat, gated, mask=inside)
    gate_type = grad_gates.dtype.element_ty
    tl.store(grad_gates + line * 3, delta0.to(gate_type), mask=there)
    tl.store(grad_gates + line * 3 + 1, delta1.to(gate_type), mask=there)
    tl.store(grad_gates + line * 3 + 2, delta2.to(gate_type), mask=there)
    tl.store(delta_selected + line, delta1, mask=there)
    tl.store(delta_sliding + line, delta2, mask=there)
