"""The backward of the gated sum, in one pass, and gates as terms of log-sum-exps.

`delta_c = sum(dO * o_c)` is at once the gradient of gate c and what the backward of branch c
subtracts from `dO v^T`. That backward computes `p = exp(s - lse)`, `dV = p^T dO` and
`dS = p (dO v^T - delta)`: with `lse - ln|g|` for lse these are the gradients of `|g| dO`, and
nothing as large as the queries is multiplied by a gate. What remains is the sign.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of, of_part, part_place

ROWS = 16  # heads of tokens a program handles
SIGN_ROWS = 256  # of `turn_signs`, which for the most part reads gates alone
LSE_TOKENS = 256


class SumGradients(NamedTuple):
    """What `gated_sum_gradients` returns."""

    gates: Tensor  # (B, S, H, 3)
    signed: Tensor  # (B, S, H, D): `grad` times the sign of the compressed branch's gate
    selected_lse: Tensor  # float32 (B, S, H), less ln|gate|
    signed_delta: Tensor  # float32 (B, S, H): delta_selected times the sign of its gate
    delta_selected: Tensor  # float32 (B, S, H), before the gate, as the next
    delta_sliding: Tensor


def gated_sum_gradients(
    grad: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sliding: Tensor,
    selected_lse: Tensor,
    gates: Tensor,
) -> SumGradients:
    """Gradients of the gates, and what the branches' backward takes for its gate and delta.

    Args:
        grad, compressed, selected, sliding: (B, S, H, D), contiguous.
        selected_lse: float32 (B, S, H), contiguous, finite.
        gates: (B, H, S, 3), any strides and numbers.
    """
    batch, tokens, heads, dim = selected.shape
    grad_gates = gates.new_empty((batch, tokens, heads, 3))
    numbers = torch.empty((4, batch, tokens, heads), dtype=torch.float32, device=grad.device)
    signed = torch.empty_like(grad)
    num_rows = batch * tokens * heads
    _gradient_kernel[(triton.cdiv(num_rows, ROWS),)](
        grad,
        compressed,
        selected,
        sliding,
        selected_lse,
        gates,
        signed,
        grad_gates,
        *numbers.unbind(),
        *gates.stride(),
        num_rows,
        tokens,
        heads,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ROWS,
    )
    return SumGradients(grad_gates, signed, *numbers.unbind())


def turn_signs(signed: Tensor, gates: Tensor) -> None:
    """From the sign of the compressed branch's gate to that of the selected branch's, in place.

    signed: (B, S, H, D), contiguous. Where no gate is negative, only gates are read.
    """
    batch, tokens, heads, dim = signed.shape
    num_rows = batch * tokens * heads
    _turn_kernel[(triton.cdiv(num_rows, SIGN_ROWS),)](
        signed,
        gates,
        *gates.stride(),
        num_rows,
        tokens,
        heads,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ROWS,
        SIGN_ROWS=SIGN_ROWS,
    )


def gated_part_lse(lse: Tensor, gates: Tensor, fold: Fold) -> list[Tensor]:
    """`lse - ln|gate|` of the compressed branch, float32 (B, H, S), by the parts of its fold.

    Each (B, width * H, rows), contiguous.
    """
    batch, heads, tokens = lse.shape
    outs = [
        torch.empty((batch, part.width * heads, part.rows), dtype=lse.dtype, device=lse.device)
        for part in fold.parts
    ]
    _part_kernel[(triton.cdiv(tokens, LSE_TOKENS), batch * heads)](
        lse,
        gates,
        *outs,
        *gates.stride()[:3],
        heads,
        tokens,
        *bounds_of(fold.parts),
        fold.reach,
        STRIDE=fold.stride,
        TOKENS=LSE_TOKENS,
    )
    return outs


@triton.jit
def log_of_size(gate):
    """ln|gate|, -inf for 0."""
    size = tl.abs(gate)
    return tl.where(size == 0.0, float("-inf"), tl.log(tl.where(size == 0.0, 1.0, size)))


@triton.jit
def _place(line, num_rows, num_tokens, heads):
    """Batch row, token and head of a row of (B, S, H) memory, and whether it is there."""
    token = line // heads
    return token // num_tokens, token % num_tokens, line % heads, line < num_rows


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _gradient_kernel(
    grad, compressed, selected, sliding, selected_lse, gates,
    signed, grad_gates, gated_lse, signed_delta, delta_selected, delta_sliding,
    stride_b, stride_h, stride_s, stride_c,
    num_rows, num_tokens, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, s, h, there = _place(line, num_rows, num_tokens, heads)
    column = tl.arange(0, COLUMNS)
    inside = there[:, None] & (column < DIM)[None, :]
    flat = (line * DIM)[:, None] + column[None, :]
    gates += b * stride_b + h * stride_h + s * stride_s
    g0 = tl.load(gates, mask=there, other=0.0).to(tl.float32)
    g1 = tl.load(gates + stride_c, mask=there, other=0.0).to(tl.float32)
    lse = tl.load(selected_lse + line, mask=there, other=0.0)

    # All loads before the first store, which they might have to wait for.
    loaded = tl.load(grad + flat, mask=inside, other=0.0)
    of_compressed = tl.load(compressed + flat, mask=inside, other=0.0).to(tl.float32)
    of_selected = tl.load(selected + flat, mask=inside, other=0.0).to(tl.float32)
    of_sliding = tl.load(sliding + flat, mask=inside, other=0.0).to(tl.float32)
    do = loaded.to(tl.float32)
    delta0 = tl.sum(do * of_compressed, 1)
    delta1 = tl.sum(do * of_selected, 1)
    delta2 = tl.sum(do * of_sliding, 1)
    tl.store(signed + flat, tl.where((g0 < 0)[:, None], -loaded, loaded), mask=inside)
    gate_type = grad_gates.dtype.element_ty
    tl.store(grad_gates + line * 3, delta0.to(gate_type), mask=there)
    tl.store(grad_gates + line * 3 + 1, delta1.to(gate_type), mask=there)
    tl.store(grad_gates + line * 3 + 2, delta2.to(gate_type), mask=there)
    tl.store(gated_lse + line, lse - log_of_size(g1), mask=there)
    tl.store(signed_delta + line, tl.where(g1 < 0, -delta1, delta1), mask=there)
    tl.store(delta_selected + line, delta1, mask=there)
    tl.store(delta_sliding + line, delta2, mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def _turn_kernel(
    signed, gates, stride_b, stride_h, stride_s, stride_c, num_rows, num_tokens, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, SIGN_ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * SIGN_ROWS
    line = first + tl.arange(0, SIGN_ROWS)
    differ = _signs_differ(
        gates, line, stride_b, stride_h, stride_s, stride_c, num_rows, num_tokens, heads
    )
    if tl.max(differ.to(tl.int32), 0) > 0:
        column = tl.arange(0, COLUMNS)
        for start in range(0, SIGN_ROWS, ROWS):
            row = first + start + tl.arange(0, ROWS)
            turned = _signs_differ(
                gates, row, stride_b, stride_h, stride_s, stride_c, num_rows, num_tokens, heads
            )
            flat = (row * DIM)[:, None] + column[None, :]
            mask = turned[:, None] & (column < DIM)[None, :]
            x = tl.load(signed + flat, mask=mask, other=0.0)
            tl.store(signed + flat, -x, mask=mask)


@triton.jit
def _signs_differ(
    gates, line, stride_b, stride_h, stride_s, stride_c, num_rows, num_tokens, heads
):
    b, s, h, there = _place(line, num_rows, num_tokens, heads)
    gates += b * stride_b + h * stride_h + s * stride_s
    g0 = tl.load(gates, mask=there, other=0.0)
    g1 = tl.load(gates + stride_c, mask=there, other=0.0)
    return (g0 < 0) != (g1 < 0)


@triton.jit(do_not_specialize=["num_tokens", "rows", "first1", "first2", "first3", "reach"])
def _part_kernel(
    lse, gates, out0, out1, out2, out3, stride_b, stride_h, stride_s,
    heads, num_tokens, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    s = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    seen = (s < num_tokens) & (s >= reach)
    part, residue, width, part_rows, row = part_place(
        s, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((b * width + residue) * heads + h) * part_rows + row
    gates += b * stride_b + h.to(tl.int64) * stride_h + s.to(tl.int64) * stride_s
    gate = tl.load(gates, mask=seen, other=0.0).to(tl.float32)
    x = tl.load(lse + tl.program_id(1).to(tl.int64) * num_tokens + s, mask=seen, other=0.0)
    x -= log_of_size(gate)
    tl.store(of_part(part, out0, out1, out2, out3) + line, x, mask=seen)
