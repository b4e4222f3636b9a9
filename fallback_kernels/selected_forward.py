"""Partial attention of every free choice, KV block by KV block, and the forward pass.

A program loads the keys and values of one block once and streams the queries that chose it, 64
rows (query, head) at a time: the matrix unit is full whatever the group size. It writes one
normalised output and base-2 log-sum-exp per (query, choice, head); the merge adds them up.
Free choices lie wholly before the query's own block: no causal mask, no partial block.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.selected_index import SelectedIndex, build_index
from nsa_flex.fallback_kernels.selected_merge import merge_kernel
from nsa_flex.fallback_kernels.selected_plan import (
    SelectedPlan,
    Window,
    empty_natural,
    padded,
    strides,
)
from nsa_flex.fallback_kernels.selected_tiles import (
    gather_rows,
    item_of,
    load_block,
    store_rows,
    widen,
)

LOG2E = math.log2(math.e)


@triton.jit(do_not_specialize=["first_batch", "first_list", "window_shift"])
def partial_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,
    partial_lse_ptr,
    entries_ptr,
    list_starts_ptr,
    item_starts_ptr,
    item_lists_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    first_batch,
    first_list,
    lists_per_window,
    window_shift,
    window_tokens,
    num_keys,
    num_blocks,
    kv_heads,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    item = tl.program_id(0) + tl.load(item_starts_ptr + first_list)
    if item >= tl.load(item_starts_ptr + first_list + lists_per_window):
        return
    start, stop, batch, head, block = item_of(
        item,
        list_starts_ptr,
        item_starts_ptr,
        item_lists_ptr,
        first_batch,
        first_list,
        kv_heads,
        num_blocks,
        CHUNK,
    )
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_ptr += b * query_stride_b + h * GROUP * query_stride_h
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    # Partial row of entry e: (first + e) * GROUP + query head within the group.
    first = ((batch - first_batch) * kv_heads + head) * window_tokens + window_shift
    first = widen(first, WIDE) * NUM_SLOTS

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    for tile in tl.range(start, stop, TOKENS, num_stages=STAGES):
        row_ok = (token < TOKENS) & (tile + token < stop)
        # Rows past the end repeat the last entry: no load needs a mask, no store sees them.
        entry = tl.load(entries_ptr + tl.minimum(tile + token, stop - 1))
        i = widen(entry // NUM_SLOTS, WIDE)
        q = gather_rows(
            query_ptr, i * query_stride_s + member * query_stride_h, HEAD_DIM, HEAD_COLUMNS
        )
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        top = tl.max(scores, 1) * scale_log2
        p = tl.exp2(scores * scale_log2 - top[:, None])
        total = tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
        place = (first + entry) * GROUP + member
        store_rows(partial_ptr, place * VALUE_DIM, out, row_ok, VALUE_DIM, VALUE_COLUMNS)
        tl.store(partial_lse_ptr + place, top + tl.log2(total), mask=row_ok)


def _launch_partial(
    plan: SelectedPlan,
    window: Window,
    index: SelectedIndex,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    scale: float,
) -> None:
    partial_kernel[(window.max_items,)](
        query,
        key,
        value,
        partial,
        partial_lse,
        index.entries,
        index.list_starts,
        index.item_starts,
        index.item_lists,
        *strides(query),
        *strides(key),
        *strides(value),
        window.first_batch,
        window.first_list,
        plan.lists_per_window,
        plan.query_offset - window.start,
        plan.window_tokens,
        plan.num_keys,
        plan.num_blocks,
        plan.kv_heads,
        scale * LOG2E,
        **plan.constants(),
        CHUNK=plan.chunk_tokens,
        WIDE=plan.wide(query),
        ROWS=plan.tile_rows,
        STAGES=plan.stages,
        num_warps=plan.num_warps,
    )


def _launch_merge(
    plan: SelectedPlan,
    window: Window,
    index: SelectedIndex,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> None:
    grid = (plan.window_tokens // plan.merge_tokens, window.num_batch * plan.kv_heads)
    merge_kernel[grid](
        query,
        key,
        value,
        partial,
        partial_lse,
        index.summary,
        out,
        lse,
        *strides(query),
        *strides(key),
        *strides(value),
        *strides(out),
        window.first_batch,
        window.start,
        plan.window_tokens,
        plan.query_offset,
        plan.num_queries,
        plan.num_keys,
        plan.kv_heads,
        scale * LOG2E,
        **plan.constants(),
        SLOT_COLUMNS=padded(plan.num_slots),
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        TOKENS=plan.merge_tokens,
        ROWS=plan.merge_rows,
        STAGES=plan.merge_stages,
        num_warps=plan.num_warps,
    )


def forward(
    plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor, blocks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, Sq, Dv) and natural log-sum-exp (B, Hq, Sq), window by window.

    The order of the lists is not fixed, but no sum depends on it: equal inputs give equal bits.
    """
    index = build_index(plan, blocks, plan.chunk_tokens)
    out = empty_natural(query, plan.query_heads, plan.num_queries, plan.value_dim, query.dtype)
    lse = empty_natural(query, plan.query_heads, plan.num_queries, 1, torch.float32)[..., 0]
    partial = torch.empty(
        (plan.partial_rows, plan.value_dim), dtype=query.dtype, device=query.device
    )
    partial_lse = torch.empty(plan.partial_rows, dtype=torch.float32, device=query.device)
    for window in plan.windows(plan.chunk_tokens):
        inputs = (plan, window, index, query, key, value, partial, partial_lse)
        if window.max_items:
            _launch_partial(*inputs, scale)
        _launch_merge(*inputs, out, lse, scale)
    return out, lse
