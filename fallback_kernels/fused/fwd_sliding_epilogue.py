"""The gated sum of the branches, the compressed one in the parts of its fold.

It is the end of the sliding branch's kernel, whose arithmetic hides the memory that the sum needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of, of_part, part_place
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, descriptor
from nsa_flex.fallback_kernels.sliding.fwd import attend_window
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_rows,
    place_of_queries,
    row_places,
    rows_of_queries,
    store_rows,
)

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


class Finished(NamedTuple):
    """What `slide_and_sum` returns."""

    out: Tensor  # (B, S, H, D), the gated sum
    sliding_lse: Tensor  # float32 (B, S, H)
    sliding: Tensor  # (B, S, H, D), the sliding branch; empty unless it is to be saved
    compressed: Tensor  # the compressed branch, likewise


def slide_and_sum(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window_size: int,
    scale: float,
    parts: tuple[Tensor, ...],
    fold: Fold,
    selected: Tensor,
    gates: Tensor,
    *,
    save: bool,
) -> Finished:
    """The sliding branch, and with it in registers `sum_c gates[..., c] * branch_c` in float32.

    Args:
        query: (B, Hq, S, D); key, value: as `sliding_attention` takes them.
        parts: outputs of the parts of the compressed branch.
        selected: (B, S, Hq, Dv), contiguous.
        gates: (B, Hq, S, 3), any strides.
        save: whether the branches' own outputs are wanted, for the backward.
    """
    key, value = (rows_contiguous(x) for x in (key, value))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.forward_tiles()
    out = torch.empty_like(selected)
    sliding, compressed = (
        torch.empty_like(selected) if save else selected.new_empty(0) for _ in range(2)
    )
    lse = torch.empty(selected.shape[:3], dtype=torch.float32, device=query.device)
    _finish_kernel[(plan.query_programs(tiles),)](
        query,
        key,
        value,
        descriptor(key, tiles.keys),
        descriptor(value, tiles.keys),
        *parts,
        selected,
        gates,
        out,
        lse,
        sliding,
        compressed,
        *strides(query),
        *strides(key),
        *strides(value),
        *gates.stride(),
        plan.tokens,
        plan.reach(window_size),
        plan.kv_heads,
        base2_scale(scale),
        *bounds_of(fold.parts),
        fold.reach,
        STRIDE=fold.stride,
        SAVE=save,
        **plan.query_constants(tiles),
    )
    return Finished(out, lse, sliding, compressed)


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
def load_compressed(
    x0, x1, x2, x3, batch, token, head, there, query_heads,
    rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rows (token, head) of the compressed branch, from the parts of its fold; 0 where it is."""
    part, residue, width, part_rows, row = part_place(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((batch * part_rows + row) * width + residue) * query_heads + head
    column = tl.arange(0, VALUE_COLUMNS)
    pointer = (of_part(part, x0, x1, x2, x3) + line * VALUE_DIM)[:, None] + column[None, :]
    # The choice of a pointer hides that rows start at multiples of 16 bytes.
    pointer = tl.multiple_of(pointer, (1, 16))
    seen = (there & (token >= reach))[:, None] & (column < VALUE_DIM)[None, :]
    return tl.load(pointer, mask=seen, other=0.0)


@triton.jit(
    do_not_specialize=["num_tokens", "window", "rows", "first1", "first2", "first3", "reach"]
)
def _finish_kernel(
    query_ptr, key_ptr, value_ptr, key_tiles, value_tiles, x0, x1, x2, x3, selected_ptr,
    gate_ptr, out_ptr, lse_ptr, sliding_ptr, compressed_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, SAVE: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries, as in `sliding_forward.forward_kernel`, and the sum of its branches."""
    b, h, first, first_member = place_of_queries(num_tokens, kv_heads, GROUP, HEADS, TOKENS)
    token, member, there = rows_of_queries(
        first, first_member, num_tokens, GROUP, HEADS, TOKENS, ROWS
    )
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_ptr += batch * query_stride_b + head * query_stride_h
    q = load_rows(
        query_ptr, row_places(token, member, query_stride_h, query_stride_s),
        there, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )
    acc, top, total = attend_window(
        q, keys, values, first, token, window, scale_log2,
        TOKENS, ROWS, KEYS, EDGE_KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
        PRECISION, STAGES,
    )  # fmt: skip
    query_heads = kv_heads * GROUP
    line = row_places(token, member, 1, query_heads) + batch * num_tokens * query_heads + head
    total = tl.where(there, total, 1.0)
    acc = acc / total[:, None]
    LN2: tl.constexpr = 0.6931471805599453
    tl.store(lse_ptr + line, (top + tl.log2(total)) * LN2, mask=there)
    if SAVE:
        store_rows(sliding_ptr, line * VALUE_DIM, there, acc, VALUE_DIM, VALUE_COLUMNS)

    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    gate_ptr += row_places(token, member, gate_stride_h, gate_stride_s)
    acc *= tl.load(gate_ptr + 2 * gate_stride_c, mask=there, other=0.0).to(tl.float32)[:, None]
    gate = tl.load(gate_ptr + gate_stride_c, mask=there, other=0.0).to(tl.float32)
    branch = load_rows(selected_ptr, line * VALUE_DIM, there, VALUE_DIM, VALUE_COLUMNS)
    acc += branch.to(tl.float32) * gate[:, None]

    branch = load_compressed(
        x0, x1, x2, x3, batch, token, head + member, there, query_heads,
        rows, first1, first2, first3, reach, STRIDE, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    if SAVE:
        store_rows(compressed_ptr, line * VALUE_DIM, there, branch, VALUE_DIM, VALUE_COLUMNS)
    gate = tl.load(gate_ptr, mask=there, other=0.0).to(tl.float32)
    acc += branch.to(tl.float32) * gate[:, None]
    store_rows(out_ptr, line * VALUE_DIM, there, acc, VALUE_DIM, VALUE_COLUMNS)
