"""Partial attention of every free choice, KV block by KV block, and the forward pass.

A program loads the keys and values of one block once and streams the queries that chose it, 64
rows (query, head) at a time: the matrix unit is full whatever the group size. It writes one
normalised output and base-2 log-sum-exp per (query, choice, head); the merge adds them up.
Free choices lie wholly before the query's own block: no causal mask, no partial block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.streams import round_robin
from nsa_flex.fallback_kernels.common.strides import empty_bshd, strides
from nsa_flex.fallback_kernels.common.tiles import group_rows, load_rows, store_rows, tile_width
from nsa_flex.fallback_kernels.selected.config import SelectedPlan, Window
from nsa_flex.fallback_kernels.selected.fwd_combine import merge_kernel
from nsa_flex.fallback_kernels.selected.fwd_union import attend_unions
from nsa_flex.fallback_kernels.selected.prepare import Selection, prepare
from nsa_flex.fallback_kernels.selected.tiles import first_entry, item_of, load_block


@triton.jit(do_not_specialize=["first_item", "first_head", "first_list", "window_shift"])
def partial_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,
    partial_lse_ptr,
    entries_ptr,
    items_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    first_item,
    first_head,
    first_list,
    window_shift,
    window_tokens,
    num_queries,
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
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
):
    start, stop, batch, head, within, block = item_of(
        items_ptr,
        first_item + tl.program_id(0),
        first_head,
        first_list,
        kv_heads,
        num_blocks,
        True,
    )
    if start >= stop:
        return
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    # Partial row of an entry: (first + entry) * GROUP + query head within the group.
    first = first_entry(within, window_tokens, window_shift, NUM_SLOTS)

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    # Rows past the end repeat the last entry: no load needs a mask, no store sees them. The next
    # tile is read while this one is computed; Triton's own pipeliner does not overlap a gather.
    last = stop - 1
    entry = tl.load(entries_ptr + tl.minimum(start + token, last))
    ahead = tl.load(entries_ptr + tl.minimum(start + TOKENS + token, last))
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    line = (entry // NUM_SLOTS) * query_heads + member
    q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS, True)
    for tile in tl.range(start, stop, TOKENS, num_stages=1):
        further = tl.load(entries_ptr + tl.minimum(tile + 2 * TOKENS + token, last))
        line = (ahead // NUM_SLOTS) * query_heads + member
        next_q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS, True)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        top = tl.max(scores, 1) * scale_log2
        p = tl.exp2(scores * scale_log2 - top[:, None])
        total = tl.sum(p, 1)
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / total)[:, None]
        place = (first + entry) * GROUP + member
        row_ok = (token < TOKENS) & (tile + token < stop)
        store_rows(partial_ptr, place, out, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS, True)
        tl.store(partial_lse_ptr + place, top + tl.log2(total), mask=row_ok)
        entry = ahead
        ahead = further
        q = next_q


def each_window(selection: Selection, finish: Callable[[Window, Tensor, Tensor], None]) -> None:
    """Window by window, the outputs of its free choices and their base-2 log-sum-exps.

    `finish` gets them after the launch that writes them, and launches what reads them. Windows
    alternate between `plan.window_lanes` streams and as many tensors: the last programs of one's
    launches run beside the other's first.
    """
    plan, query = selection.plan, selection.query
    rooms = [
        (
            query.new_empty(plan.partial_rows, plan.value_dim),
            query.new_empty(plan.partial_rows, dtype=torch.float32),
        )
        for _ in range(plan.window_lanes)
    ]

    launch_partial = _launcher(plan, query)

    def launch(window: Window, room: tuple[Tensor, Tensor]) -> None:
        if window.max_items:
            launch_partial(plan, window.max_items, _arguments(selection, window, *room))
        finish(window, *room)

    round_robin(query.device, plan.windows(plan.chunk_tokens), rooms, launch)


def _launcher(
    plan: SelectedPlan, query: Tensor
) -> Callable[[SelectedPlan, int, tuple[Any, ...]], None]:
    """What launches the kernel of a call's windows: that for Hopper where it takes the call."""
    if sm90_unsupported_reason(plan, query) is not None:
        return _launch
    from nsa_flex.fallback_kernels.selected import fwd_partial_sm90

    return fwd_partial_sm90.launch


def sm90_unsupported_reason(plan: SelectedPlan, query: Tensor) -> str | None:
    """Why `partial_kernel` takes a call and not the one for Hopper; None if that does."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
    from nsa_flex.fallback_kernels.selected import fwd_partial_sm90

    return fwd_partial_sm90.unsupported_reason(plan, query)


def _arguments(
    selection: Selection, window: Window, partial: Tensor, partial_lse: Tensor
) -> tuple[Any, ...]:
    """Arguments of a window's kernel that are no constants."""
    plan, index, _, query, key, value, scale = selection
    return (
        query,
        key,
        value,
        partial,
        partial_lse,
        index.entries,
        index.items,
        *strides(key),
        *strides(value),
        window.number * index.items.shape[1],
        window.first_head,
        window.first_list,
        plan.query_offset - window.start,
        plan.window_tokens,
        plan.num_queries,
        plan.num_keys,
        plan.num_blocks,
        plan.kv_heads,
        base2_scale(scale),
    )


def _launch(plan: SelectedPlan, programs: int, arguments: tuple[Any, ...]) -> None:
    """`partial_kernel` of so many programs, with the `_arguments` of a window."""
    partial_kernel[(programs,)](
        *arguments,
        **plan.constants(),
        ROWS=plan.tile_rows,
        num_warps=plan.num_warps,
        maxnreg=plan.stream_registers,
    )


def _launch_merge(
    selection: Selection,
    window: Window,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    plan, index, unions, query, key, value, scale = selection
    grid = (plan.window_tokens // plan.merge_tokens, window.num_heads)
    merge_kernel[grid](
        query,
        key,
        value,
        partial,
        partial_lse,
        index.summary,
        unions.sizes,
        out,
        lse,
        *strides(key),
        *strides(value),
        window.first_head,
        (window.start - plan.base) // plan.merge_tokens,
        plan.span // plan.merge_tokens,
        window.start,
        plan.window_tokens,
        plan.query_offset,
        plan.num_queries,
        plan.num_keys,
        plan.kv_heads,
        base2_scale(scale),
        **plan.constants(),
        SLOT_COLUMNS=tile_width(plan.num_slots),
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        TOKENS=plan.merge_tokens,
        ROWS=plan.merge_rows,
        STAGES=plan.merge_stages(plan.value_dim),
        num_warps=plan.num_warps,
        maxnreg=plan.stream_registers,
    )


def forward(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    scale: float,
    *,
    storage: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, Sq, Dv) and natural log-sum-exp (B, Hq, Sq), window by window.

    The order of the lists is not fixed, but no sum depends on it: equal inputs give equal bits.

    Args:
        plan: sizes of the call.
        query: (B, Hq, Sq, D), memory (B, Sq, Hq, D).
        key: (B, Hkv, Sk, D), last dimension contiguous; value likewise (B, Hkv, Sk, Dv).
        blocks: int32 (B, Hkv, Sq, n), contiguous.
        scale: factor of the logits.
        storage: int32 (`index_words`,) that receives the index for the backward; without one,
            entries are listed only where the forward reads them.
    """
    selection = prepare(plan, query, key, value, blocks, scale, storage=storage)
    out = empty_bshd(query, plan.query_heads, plan.num_queries, plan.value_dim, query.dtype)
    lse = empty_bshd(query, plan.query_heads, plan.num_queries, 1, torch.float32)[..., 0]

    def merge(window: Window, partial: Tensor, partial_lse: Tensor) -> None:
        _launch_merge(selection, window, partial, partial_lse, out, lse)

    each_window(selection, merge)
    attend_unions(selection, out, lse)
    return out, lse
