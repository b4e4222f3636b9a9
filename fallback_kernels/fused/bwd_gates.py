"""The backward of the gated sum in one pass, and gates as terms of log-sum-exps.

`delta_c = sum(dO * o_c)` is at once the gradient of gate c and what the backward of branch c
subtracts from `dO v^T`. That backward computes `p = exp(s - lse)`, `dV = p^T dO` and
`dS = p (dO v^T - delta)`: with `lse - ln|g|` for lse these are the gradients of `|g| dO`, and
nothing as large as the queries is multiplied by a gate. What remains is the sign.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, span_has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import lse_in_base2
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of, fold_position, of_range

BLOCK_ROWS = tl.constexpr(16)  # (token, head) rows of a tile
LEAVING_TILES = 4  # of a CTA, where it may leave
SIGN_ROWS = tl.constexpr(256)  # of `switch_gate_sign`, which mostly reads gates alone
LSE_TOKENS = tl.constexpr(256)


class SumGradients(NamedTuple):
    """What the backward of the branches takes in place of gates and outputs."""

    signed: Tensor  # (B, S, H, D): `grad` times the sign of the compressed branch's gate
    stats: Tensor  # float32 (4 or 6, B, S, H): what follows

    @property
    def selected(self) -> Tensor:
        """(B, S, H, 2), laid out as `softmax_stats` does it.

        Log-sum-exp less ln|gate|, in base 2, and `delta_selected` times the sign of its gate.
        """
        return self.stats[:2].view(*self.stats.shape[1:], 2)

    @property
    def delta_selected(self) -> Tensor:
        """Before the gate, as the next."""
        return self.stats[2]

    @property
    def delta_sliding(self) -> Tensor:
        return self.stats[3]

    @property
    def compressed_lse(self) -> Tensor:
        """Less ln|gate|, if it was asked for, as the next."""
        return self.stats[4]

    @property
    def compressed_delta(self) -> Tensor:
        """Times the sign of the gate."""
        return self.stats[5]


def num_stats(compressed_lse: Tensor | None) -> int:
    """How many `SumGradients.stats` there are."""
    return 4 if compressed_lse is None else 6


def stats_in(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first of `memory`, flat, in a shape."""
    return memory[: math.prod(shape)].view(shape)


def gated_sum_gradients(
    grad: Tensor,
    compressed: Tensor,
    selected: Tensor,
    sliding: Tensor,
    selected_lse: Tensor,
    gates: Tensor,
    compressed_lse: Tensor | None = None,
    *,
    rows: Tensor | None = None,
    kinds: Tensor | None = None,
    block_size: int = 1,
    around: int = 0,
    memory: Tensor | None = None,
) -> tuple[Tensor, SumGradients]:
    """Gradients of the gates (B, S, H, 3), and what the branches' backward takes for its own.

    Args:
        grad: (B, S, H, D), any strides.
        compressed, selected, sliding: (B, S, H, D), contiguous, as `rows`.
        selected_lse: float32 (B, S, H), contiguous, finite.
        gates: (B, H, S, 3), any strides, any real numbers.
        compressed_lse: float32 (B, H, S), any strides, -inf for a query that sees nothing; None
            where that branch's backward has rows in another order, the fold's.
        rows: takes a copy of `grad`; without `kinds`.
        kinds: of `block_kinds` for blocks of `block_size` tokens. Rows of short documents are left
            to other kernels, but for those up to `around` tokens from longer ones, which are read
            there and multiplied by 0.
        memory: of the statistics, float32, at least as many; None for new memory.
    """
    assert rows is None or kinds is None
    batch, tokens, heads, dim = selected.shape
    grad_gates = gates.new_empty((batch, tokens, heads, 3))
    shape = (num_stats(compressed_lse), batch, tokens, heads)
    if memory is None:
        stats = torch.empty(shape, dtype=torch.float32, device=grad.device)
    else:
        stats = stats_in(memory, shape)
    of_compressed = (None, None) if compressed_lse is None else (stats[4], stats[5])
    signed = grad.new_empty(grad.shape)
    num_rows = batch * tokens * heads
    contiguous = grad.is_contiguous()
    # More rows a CTA where many leave: a CTA costs more than its look at the documents.
    tiles = 1 if kinds is None else LEAVING_TILES
    span = BLOCK_ROWS.value * tiles + 2 * around  # tokens, at most
    fused_bwd_gates_kernel[(cdiv(num_rows, BLOCK_ROWS.value * tiles),)](
        grad,
        compressed,
        selected,
        sliding,
        selected_lse,
        gates,
        signed,
        grad_gates,
        stats[:2],
        stats[2],
        stats[3],
        rows,
        compressed_lse,
        *of_compressed,
        kinds,
        (0, 0, 0, 0) if contiguous else grad.stride(),
        gates.stride(),
        (0, 0, 0) if compressed_lse is None else compressed_lse.stride(),
        num_rows,
        tokens,
        heads,
        CONTIGUOUS=contiguous,
        SELECT=block_size,
        AROUND=around,
        BLOCKS=1 if kinds is None else next_power_of_2(cdiv(span, block_size) + 1),
        TILES=tiles,
        DIM=dim,
    )
    return grad_gates, SumGradients(signed, stats)


def switch_gate_sign(signed: Tensor, gates: Tensor) -> None:
    """From the sign of the first of `gates` to that of the second, or back, in place.

    signed: (B, S, H, D), contiguous. gates: (B, H, S, 2 or more), any strides. Where no gate is
    negative, only gates are read.
    """
    batch, tokens, heads, dim = signed.shape
    num_rows = batch * tokens * heads
    switch_gate_sign_kernel[(cdiv(num_rows, SIGN_ROWS.value),)](
        signed,
        gates,
        gates.stride(),
        num_rows,
        tokens,
        heads,
        DIM=dim,
    )


def after_zero(gates: Tensor) -> Tensor:
    """0, and the gates of the compressed and the selected branch, (B, H, S, 3) in BSH memory.

    What `switch_gate_sign` takes to go from a gate's sign to none, and back.
    """
    return F.pad(gates[..., :2].transpose(1, 2), (1, 0)).transpose(1, 2)


def fold_gated_lse(lse: Tensor, gates: Tensor, fold: Fold) -> list[Tensor]:
    """`lse - ln|gate|` of the compressed branch, float32 (B, H, S), by the parts of its fold.

    Each (B, width * H, rows), contiguous.
    """
    batch, heads, tokens = lse.shape
    outs = [
        torch.empty((batch, part.width * heads, part.rows), dtype=lse.dtype, device=lse.device)
        for part in fold.ranges
    ]
    fold_gated_lse_kernel[(cdiv(tokens, LSE_TOKENS.value), batch * heads)](
        lse,
        gates,
        *outs,
        gates.stride()[:3],
        heads,
        tokens,
        *bounds_of(fold.ranges),
        fold.reach,
        STRIDE=fold.stride,
    )
    return outs


@triton.jit
def log_abs(gate):
    """ln|gate|, -inf for 0."""
    size = tl.abs(gate)
    return tl.where(size == 0.0, float("-inf"), tl.log(tl.where(size == 0.0, 1.0, size)))


@triton.jit
def split_row(row, num_rows, num_tokens, heads):
    """Batch row, token and head of a row of (B, S, H) memory, and the mask of rows that exist."""
    token = row // heads
    return token // num_tokens, token % num_tokens, row % heads, row < num_rows


@recordable
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def fused_bwd_gates_kernel(
    grad_ptr, compressed_ptr, selected_ptr, sliding_ptr, selected_lse_ptr, gate_ptr,
    signed_ptr, grad_gate_ptr, selected_stats_ptr, delta_selected_ptr, delta_sliding_ptr,
    copy_ptr, compressed_lse_ptr, gated_compressed_lse_ptr, compressed_delta_ptr,
    kinds_ptr,
    grad_strides, gate_strides, lse_strides,
    num_rows, num_tokens, heads,
    CONTIGUOUS: tl.constexpr, SELECT: tl.constexpr, AROUND: tl.constexpr, BLOCKS: tl.constexpr,
    TILES: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """CTA of (token, head) rows, TILES tiles of BLOCK_ROWS: what `SumGradients` holds.

    CONTIGUOUS: whether the gradient is, and its strides are not read. With `kinds_ptr`, of blocks
    of SELECT tokens, CTAs leave whose tokens are all short documents', AROUND tokens before and
    behind them too.
    """
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    first_row = tl.program_id(0).to(tl.int64) * (BLOCK_ROWS * TILES)
    if kinds_ptr is not None:
        first = first_row // heads
        last = (tl.minimum(first_row + BLOCK_ROWS * TILES, num_rows) - 1) // heads
        of_first = first // num_tokens
        first, last = first - of_first * num_tokens, last - of_first * num_tokens
        if (last < num_tokens) & span_has_kind(
            kinds_ptr, of_first, first - AROUND, last + AROUND, num_tokens,
            SHORT_DOCUMENT, SELECT, BLOCKS,
        ):  # fmt: skip
            return
    for tile in range(TILES):
        row = first_row + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        b, token, head, row_mask = split_row(row, num_rows, num_tokens, heads)  # [BLOCK_ROWS] each
        column = tl.arange(0, BLOCK_D)
        mask = row_mask[:, None] & (column < DIM)[None, :]  # [BLOCK_ROWS, BLOCK_D]
        offset = (row * DIM)[:, None] + column[None, :]  # [BLOCK_ROWS, BLOCK_D]
        gate = gate_ptr + b * gate_strides[0] + head * gate_strides[1] + token * gate_strides[2]
        compressed_gate = tl.load(gate, mask=row_mask, other=0.0).to(tl.float32)  # [BLOCK_ROWS]
        selected_gate = tl.load(gate + gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
        lse = tl.load(selected_lse_ptr + row, mask=row_mask, other=0.0)  # [BLOCK_ROWS]

        # All loads before the first store, which they might have to wait for;
        # [BLOCK_ROWS, BLOCK_D] each.
        if CONTIGUOUS:
            grad = tl.load(grad_ptr + offset, mask=mask, other=0.0)
        else:
            # [BLOCK_ROWS]
            start = b * grad_strides[0] + token * grad_strides[1] + head * grad_strides[2]
            where = start[:, None] + column.to(tl.int64)[None, :] * grad_strides[3]
            grad = tl.load(grad_ptr + where, mask=mask, other=0.0)
        compressed = tl.load(compressed_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        selected = tl.load(selected_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        sliding = tl.load(sliding_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        do = grad.to(tl.float32)
        delta_compressed = tl.sum(do * compressed, 1)  # [BLOCK_ROWS], as the next two
        delta_selected = tl.sum(do * selected, 1)
        delta_sliding = tl.sum(do * sliding, 1)
        if copy_ptr is not None:
            tl.store(copy_ptr + offset, grad, mask=mask)
        signed = tl.where((compressed_gate < 0)[:, None], -grad, grad)
        tl.store(signed_ptr + offset, signed, mask=mask)
        gate_type = grad_gate_ptr.dtype.element_ty
        tl.store(grad_gate_ptr + row * 3, delta_compressed.to(gate_type), mask=row_mask)
        tl.store(grad_gate_ptr + row * 3 + 1, delta_selected.to(gate_type), mask=row_mask)
        tl.store(grad_gate_ptr + row * 3 + 2, delta_sliding.to(gate_type), mask=row_mask)
        lse_log2 = lse_in_base2(lse - log_abs(selected_gate))
        tl.store(selected_stats_ptr + row * 2, lse_log2, mask=row_mask)
        signed_delta = tl.where(selected_gate < 0, -delta_selected, delta_selected)
        tl.store(selected_stats_ptr + row * 2 + 1, signed_delta, mask=row_mask)
        tl.store(delta_selected_ptr + row, delta_selected, mask=row_mask)
        tl.store(delta_sliding_ptr + row, delta_sliding, mask=row_mask)
        if compressed_lse_ptr is not None:
            lse_row = b * lse_strides[0] + head * lse_strides[1] + token * lse_strides[2]
            lse = tl.load(compressed_lse_ptr + lse_row, mask=row_mask, other=0.0)
            # -inf less the logarithm of a gate of 0 would be NaN.
            gated_lse = tl.where(lse == float("-inf"), lse, lse - log_abs(compressed_gate))
            tl.store(gated_compressed_lse_ptr + row, gated_lse, mask=row_mask)
            delta = tl.where(compressed_gate < 0, -delta_compressed, delta_compressed)
            tl.store(compressed_delta_ptr + row, delta, mask=row_mask)


@recordable
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def switch_gate_sign_kernel(
    signed_ptr, gate_ptr, gate_strides, num_rows, num_tokens, heads,
    DIM: tl.constexpr,
):  # fmt: skip
    """CTA of SIGN_ROWS rows: negates those whose two gates differ in sign, in place."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    first = tl.program_id(0).to(tl.int64) * SIGN_ROWS
    row = first + tl.arange(0, SIGN_ROWS)
    differ = signs_differ(gate_ptr, row, *gate_strides, num_rows, num_tokens, heads)  # [SIGN_ROWS]
    if tl.max(differ.to(tl.int32), 0) > 0:
        column = tl.arange(0, BLOCK_D)
        for start in range(0, SIGN_ROWS, BLOCK_ROWS):
            tile_row = first + start + tl.arange(0, BLOCK_ROWS)
            row_mask = signs_differ(
                gate_ptr, tile_row, *gate_strides,
                num_rows, num_tokens, heads,
            )  # fmt: skip  # [BLOCK_ROWS]
            offset = (tile_row * DIM)[:, None] + column[None, :]
            mask = row_mask[:, None] & (column < DIM)[None, :]  # [BLOCK_ROWS, BLOCK_D]
            x = tl.load(signed_ptr + offset, mask=mask, other=0.0)  # [BLOCK_ROWS, BLOCK_D]
            tl.store(signed_ptr + offset, -x, mask=mask)


@triton.jit
def signs_differ(
    gate_ptr, row, stride_b, stride_h, stride_s, stride_c, num_rows, num_tokens, heads
):
    """Whether a row's gates of the compressed and the selected branch differ in sign."""
    b, token, head, row_mask = split_row(row, num_rows, num_tokens, heads)
    gate_ptr += b * stride_b + head * stride_h + token * stride_s
    compressed_gate = tl.load(gate_ptr, mask=row_mask, other=0.0)
    selected_gate = tl.load(gate_ptr + stride_c, mask=row_mask, other=0.0)
    return (compressed_gate < 0) != (selected_gate < 0)


@recordable
@triton.jit(do_not_specialize=["num_tokens", "rows", "first1", "first2", "first3", "reach"])
def fold_gated_lse_kernel(
    lse_ptr, gate_ptr, out0, out1, out2, out3, gate_strides,
    heads, num_tokens, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """CTA (tile of tokens, head of a batch row)."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    head = tl.program_id(1) % heads
    token = tl.program_id(0) * LSE_TOKENS + tl.arange(0, LSE_TOKENS)
    mask = (token < num_tokens) & (token >= reach)  # [LSE_TOKENS], as all below
    part, residue, width, part_rows, row = fold_position(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    offset = ((b * width + residue) * heads + head) * part_rows + row
    gate_row = b * gate_strides[0] + head.to(tl.int64) * gate_strides[1]
    gate_ptr += gate_row + token.to(tl.int64) * gate_strides[2]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    lse_ptr += tl.program_id(1).to(tl.int64) * num_tokens
    lse = tl.load(lse_ptr + token, mask=mask, other=0.0)
    lse -= log_abs(gate)
    tl.store(of_range(part, out0, out1, out2, out3) + offset, lse, mask=mask)
