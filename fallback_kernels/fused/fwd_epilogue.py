"""The end of the core's forward where both branches have the same keys: one kernel, not two.

The blocks up to a query's own are always chosen, and they lie in its window, so that their part
of both softmaxes is the same. A program attends them once, keeps the result, walks on through the
window, and goes back to the kept result for the other choices. Without gradients neither the
selected nor the sliding branch is ever in memory.

With what a backward wants kept apart as well, `end_kernel` has too few registers; the one for
Hopper has not (docs/log/decisions/0021-end-of-the-forward.md).
"""

from __future__ import annotations

from functools import partial as bind
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason, supports_tma
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import load_compressed
from nsa_flex.fallback_kernels.selected.config import SelectedPlan, Window
from nsa_flex.fallback_kernels.selected.fwd_combine import add_partials, join_partials
from nsa_flex.fallback_kernels.selected.fwd_partial import each_window
from nsa_flex.fallback_kernels.selected.fwd_union import attend_unions
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.sliding.config import SPARE_BYTES, descriptor
from nsa_flex.fallback_kernels.sliding.fwd import add_values, attend
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_keys,
    load_rows,
    row_places,
    rows_of_queries,
    store_rows,
)

BLOCK_SIZES = (64,)  # blocks are the tiles of keys: smaller ones leave the matrix unit half empty
STAGES = 3  # blocks in shared memory at once


class Results(NamedTuple):
    """What `end_of_forward` returns."""

    out: Tensor  # (B, S, H, Dv), the gated sum
    selected_lse: Tensor  # float32 (B, S, H)
    sliding_lse: Tensor
    compressed: Tensor  # (B, S, H, Dv), as the next two; empty unless they are to be saved
    selected: Tensor
    sliding: Tensor


def serves(
    plan: SelectedPlan,
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    sliding: tuple[Tensor, Tensor],
    window: int,
    *,
    save: bool,
) -> bool:
    """Whether `end_of_forward` takes a call; by shapes, memory and device alone.

    Args:
        keys: keys and values of the selected branch.
        sliding: those of the sliding branch.
        window: of the sliding branch, in keys.
        save: whether the branches' own outputs are wanted.
    """
    columns = tile_width(plan.head_dim) + tile_width(plan.value_dim)
    elements = plan.merge_rows * tile_width(plan.head_dim) + STAGES * plan.block_size * columns
    return (
        all(_same(x, y) for x, y in zip(keys, sliding, strict=True))
        and plan.block_size in BLOCK_SIZES
        and plan.num_local * plan.block_size <= window
        and plan.merge_tokens * plan.group == plan.tile_rows
        and elements * plan.element_size + SPARE_BYTES <= plan.shared_memory
        and supports_tma(keys[0].device)
        and (not save or _on_hopper(plan, query, *keys))
    )


def _on_hopper(plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor) -> bool:
    if gluon_unsupported_reason(query.device) is not None:
        return False
    # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
    from nsa_flex.fallback_kernels.fused.fwd_epilogue_sm90 import takes

    return takes(plan, query, key, value)


def _same(x: Tensor, y: Tensor) -> bool:
    return (x.data_ptr(), x.shape, x.stride()) == (y.data_ptr(), y.shape, y.stride())


def end_of_forward(
    selection: Selection,
    window: int,
    parts: tuple[Tensor, ...],
    fold: Fold,
    gates: Tensor,
    *,
    save: bool,
) -> Results:
    """`sum_c gates[..., c] * branch_c` in float32, selected and sliding branch computed here.

    Args:
        selection: of a call that `serves` takes, its choice with all forced blocks; query
            memory (B, S, H, D).
        window: of the sliding branch, in keys.
        parts: outputs of the parts of the compressed branch.
        gates: (B, Hq, S, 3), any strides.
        save: whether the branches' own outputs are wanted, for the backward.
    """
    plan, query = selection.plan, selection.query
    shape = (plan.batch, plan.num_queries, plan.query_heads)

    branch = (*shape, plan.value_dim)
    out = query.new_empty(branch)
    selected_lse, sliding_lse = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    branches = tuple(query.new_empty(branch if save else 0) for _ in range(3))
    # Without a place of its own, the selected branch of tiles that have a union waits where their
    # sum will be.
    selected = branches[1] if save else out
    attend_unions(selection, selected.transpose(1, 2), selected_lse.transpose(1, 2))
    launch = _launch
    if _on_hopper(plan, query, selection.key, selection.value):
        from nsa_flex.fallback_kernels.fused import fwd_epilogue_sm90 as hopper

        tiles = hopper.tiles_of_call(selection, out, branches if save else ())
        launch = bind(hopper.launch, tiles, selected)

    def end(chosen: Window, partial: Tensor, partial_lse: Tensor) -> None:
        tensors = (
            partial_lse, selection.lists.summary, selection.unions.sizes, *parts, gates,
            out, selected_lse, sliding_lse,
        )  # fmt: skip
        numbers = (
            *gates.stride(),
            chosen.first_head,
            chosen.start,
            plan.window_tokens,
            plan.span // plan.merge_tokens,
            plan.num_queries,
            min(window, plan.num_queries),
            plan.kv_heads,
            base2_scale(selection.scale),
            *bounds_of(fold.parts),
            fold.reach,
        )
        grid = (plan.window_tokens // plan.merge_tokens, chosen.num_heads)
        launch(grid, selection, partial, tensors, numbers, fold.stride)

    each_window(selection, end)
    return Results(out, selected_lse, sliding_lse, *branches)


def _launch(
    grid: tuple[int, int],
    selection: Selection,
    partial: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    stride: int,
) -> None:
    """`end_kernel`; `tensors` and `numbers` are what the kernel for Hopper takes as well."""
    plan, _, _, query, key, value, _ = selection
    end_kernel[grid](
        query,
        key,
        value,
        descriptor(key, plan.block_size),
        descriptor(value, plan.block_size),
        partial,
        *tensors,
        *strides(key),
        *strides(value),
        *numbers,
        STRIDE=stride,
        **plan.constants(),
        SLOT_COLUMNS=tile_width(plan.num_slots),
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        TOKENS=plan.merge_tokens,
        ROWS=plan.merge_rows,
        STAGES=STAGES,
        PARTIAL_STAGES=plan.merge_stages(plan.value_dim),
        num_warps=plan.num_warps,
    )


@triton.jit
def attend_first_blocks(
    q, keys, values, summary, scale_log2, zero, acc, top, total,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Adds the initial blocks, each to the rows whose summary has its bit."""
    for block in range(INITIAL):
        chosen = ((summary >> (LOCAL + block)) & 1) != 0
        if tl.max(chosen.to(tl.int32), 0) > 0:
            start = zero + block * BLOCK_SIZE
            k, v = load_keys(
                keys, values, start, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
            )
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            scores = tl.where(chosen[:, None], scores, float("-inf"))
            acc, top, total = add_values(scores, v, scale_log2, acc, top, total, PRECISION)
    return acc, top, total


@triton.jit(
    do_not_specialize=[
        "first_head", "window_start", "num_tokens", "window",
        "rows", "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def end_kernel(
    query_ptr, key_ptr, value_ptr, key_tiles, value_tiles,
    partial_ptr, partial_lse_ptr, summary_ptr, union_sizes_ptr, x0, x1, x2, x3, gate_ptr,
    out_ptr, selected_lse_ptr, sliding_lse_ptr,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    first_head, window_start, window_tokens, tiles_per_row,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of queries; all of it lies in one block."""
    within = tl.program_id(1)
    b = (first_head + within) // kv_heads
    h = (first_head + within) % kv_heads
    tile = (first_head + within) * tiles_per_row + window_start // TOKENS + tl.program_id(0)
    has_union = tl.load(union_sizes_ptr + tile) >= 0
    first = window_start + tl.program_id(0) * TOKENS
    token, member, there = rows_of_queries(first, 0, num_tokens, GROUP, GROUP, TOKENS, ROWS)
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_heads = kv_heads * GROUP
    line = row_places(token, member, 1, query_heads) + batch * num_tokens * query_heads + head
    q = load_rows(query_ptr, line * HEAD_DIM, there, HEAD_DIM, HEAD_COLUMNS)
    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )

    # From the own block to the left, as far as all rows chose the blocks, and on to the end of
    # the window. Only the own block and those at that end have keys that some row does not see.
    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    top = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    own = first // BLOCK_SIZE
    last = own - tl.maximum(first - window + 1, 0) // BLOCK_SIZE
    chosen = tl.minimum(LOCAL, own + 1)
    for i in tl.range(0, chosen, num_stages=STAGES):
        start = (own - i) * BLOCK_SIZE
        k, v = load_keys(
            keys, values, start, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc, top, total = attend(
            q, k, v, token, start, window, scale_log2, acc, top, total, i == 0, PRECISION
        )
    kept = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    kept_lse = top + tl.log2(total)
    for i in tl.range(chosen, last + 1, num_stages=STAGES):
        start = (own - i) * BLOCK_SIZE
        k, v = load_keys(
            keys, values, start, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc, top, total = attend(
            q, k, v, token, start, window, scale_log2, acc, top, total,
            start + window < first + TOKENS, PRECISION,
        )  # fmt: skip

    LN2: tl.constexpr = 0.6931471805599453
    tl.store(sliding_lse_ptr + line, (top + tl.log2(total)) * LN2, mask=there)
    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    gate_ptr += row_places(token, member, gate_stride_h, gate_stride_s)
    gate = tl.load(gate_ptr + 2 * gate_stride_c, mask=there, other=0.0).to(tl.float32)
    acc *= (gate / total)[:, None]
    branch = load_compressed(
        x0, x1, x2, x3, batch, token, head + member, there, query_heads,
        rows, first1, first2, first3, reach, STRIDE, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    gate = tl.load(gate_ptr, mask=there, other=0.0).to(tl.float32)
    acc += branch.to(tl.float32) * gate[:, None]
    gate = tl.load(gate_ptr + gate_stride_c, mask=there, other=0.0).to(tl.float32)

    if has_union:
        branch = load_rows(out_ptr, line * VALUE_DIM, there, VALUE_DIM, VALUE_COLUMNS)
        acc += branch.to(tl.float32) * gate[:, None]
    else:
        summary_ptr += (batch * kv_heads + h) * num_tokens
        summary = tl.load(summary_ptr + token, mask=there, other=0)
        out, top, total = attend_first_blocks(
            q, keys, values, summary, scale_log2, own * 0,
            kept.to(tl.float32), kept_lse, tl.full([ROWS], 1.0, tl.float32),
            BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            PRECISION, INITIAL, LOCAL,
        )  # fmt: skip
        free = summary >> 24
        place = (within * window_tokens + token - window_start) * NUM_SLOTS * GROUP + member
        lse_log2, share = join_partials(
            top, total, partial_lse_ptr, place, free, GROUP, SLOT_COLUMNS
        )
        tl.store(selected_lse_ptr + line, lse_log2 * LN2, mask=there)
        acc = add_partials(
            acc + out * (gate * share)[:, None], gate, lse_log2, partial_ptr, partial_lse_ptr,
            place, free, GROUP, WIDE, VALUE_DIM, VALUE_COLUMNS, PARTIAL_STAGES,
        )  # fmt: skip
    store_rows(out_ptr, line * VALUE_DIM, there, acc, VALUE_DIM, VALUE_COLUMNS)
