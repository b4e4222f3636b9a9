"""Partial attention of every top-k block, KV block by KV block, and the forward pass.

A CTA loads the keys and values of one block once and streams the queries that selected it, 64 rows
(query, head) at a time: the tensor cores are full whatever the group size. It writes one
normalised output and base-2 log-sum-exp per (query, top-k slot, head); the combine kernel adds
them up. Top-k blocks lie wholly before the query's own block: no causal mask, no cut block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, strides
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_rows,
    precision_of,
    store_rows,
    width_of,
)
from nsa_flex.fallback_kernels.launch.streams import round_robin
from nsa_flex.fallback_kernels.selected.config import QueryChunk, SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_combine import selected_fwd_combine_kernel
from nsa_flex.fallback_kernels.selected.fwd_union import attend_unions
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.selected.tiles import (
    first_partial,
    load_block,
    load_work_tile,
    row_shift,
)
from nsa_flex.reasons import explained


@recordable
@triton.jit(
    do_not_specialize=[
        "first_work_tile",
        "first_head",
        "first_csr_row",
        "chunk_shift",
        "num_queries",
        "num_keys",
        "num_blocks",
    ]
)
def selected_fwd_partial_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    partial_ptr,
    partial_lse_ptr,
    entries_ptr,
    work_tiles_ptr,
    offsets_ptr,
    key_strides,
    value_strides,
    first_work_tile,
    first_head,
    first_csr_row,
    chunk_shift,
    chunk_tokens,
    num_queries,
    num_keys,
    num_blocks,
    kv_heads,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """CTA (work tile): partial outputs of one block, for the queries that selected it."""
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    start, stop, batch, head, head_in_chunk, block = load_work_tile(
        work_tiles_ptr,
        first_work_tile + tl.program_id(0),
        first_head,
        first_csr_row,
        kv_heads,
        num_blocks,
        True,
    )
    if start >= stop:
        return
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    # Partial row of an entry: (first + entry) * GROUP + query head within the group.
    chunk_shift = row_shift(offsets_ptr, batch * kv_heads + head, chunk_shift, BLOCK_SIZE)
    first = first_partial(head_in_chunk, chunk_tokens, chunk_shift, NUM_SLOTS)

    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    head_in_group = row % GROUP
    # Rows past the end repeat the last entry: no load needs a mask, no store sees them. The next
    # tile is read while this one is computed; Triton's own pipeliner does not overlap a gather.
    last = stop - 1
    entry = tl.load(entries_ptr + tl.minimum(start + token, last))  # [BLOCK_M]
    next_entry = tl.load(entries_ptr + tl.minimum(start + BLOCK_TOKENS + token, last))  # [BLOCK_M]
    k = load_block(
        key_ptr, key_strides[2], block, num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D
    )  # [BLOCK_SIZE, BLOCK_D]
    v = load_block(
        value_ptr, value_strides[2], block, num_keys, BLOCK_SIZE, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_SIZE, BLOCK_DV]
    query_row = (entry // NUM_SLOTS) * query_heads + head_in_group
    q = load_rows(
        query_ptr, query_row, INT64_OFFSETS, HEAD_DIM, BLOCK_D, True
    )  # [BLOCK_M, BLOCK_D]
    for tile in tl.range(start, stop, BLOCK_TOKENS, num_stages=1):
        after_next = tl.load(entries_ptr + tl.minimum(tile + 2 * BLOCK_TOKENS + token, last))
        query_row = (next_entry // NUM_SLOTS) * query_heads + head_in_group
        next_q = load_rows(
            query_ptr, query_row, INT64_OFFSETS, HEAD_DIM, BLOCK_D, True
        )  # [BLOCK_M, BLOCK_D]
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
        row_max = tl.max(logits, 1) * scale_log2  # [BLOCK_M]
        p = tl.exp2(logits * scale_log2 - row_max[:, None])
        row_sum = tl.sum(p, 1)  # [BLOCK_M]
        out = tl.dot(p.to(v.dtype), v, input_precision=PRECISION) * (1.0 / row_sum)[:, None]
        offset = (first + entry) * GROUP + head_in_group
        row_mask = (token < BLOCK_TOKENS) & (tile + token < stop)
        store_rows(partial_ptr, offset, out, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV, True)
        tl.store(partial_lse_ptr + offset, row_max + tl.log2(row_sum), mask=row_mask)
        entry = next_entry
        next_entry = after_next
        q = next_q


def for_each_chunk(
    selection: Selection, finish: Callable[[QueryChunk, Tensor, Tensor], None]
) -> None:
    """Query chunk by query chunk, the partial outputs of top-k blocks and their base-2 LSEs.

    `finish` gets them after the launch that writes them, and launches what reads them. Chunks
    alternate between `plan.num_streams` streams with a workspace each: the last CTAs of one's
    launches run beside the other's first.
    """
    plan, query = selection.plan, selection.query
    workspaces = [
        (
            query.new_empty(plan.partial_rows, plan.value_dim),
            query.new_empty(plan.partial_rows, dtype=torch.float32),
        )
        for _ in range(plan.num_streams)
    ]

    launch_partial = _launcher(plan, query)

    def launch(chunk: QueryChunk, workspace: tuple[Tensor, Tensor]) -> None:
        if chunk.max_work_tiles:
            launch_partial(plan, chunk.max_work_tiles, _arguments(selection, chunk, *workspace))
        finish(chunk, *workspace)

    round_robin(query.device, plan.chunks(plan.work_tile_tokens), workspaces, launch)


def _launcher(
    plan: SelectedPlan, query: Tensor
) -> Callable[[SelectedPlan, int, tuple[Any, ...]], None]:
    """What launches the kernel of a call's chunks: that for Hopper where it takes the call."""
    if sm90_unsupported_reason(plan, query) is not None:
        return _launch
    from nsa_flex.fallback_kernels.selected import fwd_partial_sm90

    return fwd_partial_sm90.launch


@explained
def sm90_unsupported_reason(plan: SelectedPlan, query: Tensor) -> str | None:
    """Why the kernel in Triton takes a call, not the one for Hopper; None if that does."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
    from nsa_flex.fallback_kernels.selected import fwd_partial_sm90

    return fwd_partial_sm90.unsupported_reason(plan, query)


def _arguments(
    selection: Selection, chunk: QueryChunk, partial: Tensor, partial_lse: Tensor
) -> tuple[Any, ...]:
    """Arguments of a chunk's kernel that are no constants."""
    plan, csr, _, query, key, value, scale, offsets = selection
    return (
        query,
        key,
        value,
        partial,
        partial_lse,
        csr.entries,
        csr.work_tiles,
        offsets,
        strides(key),
        strides(value),
        chunk.number * csr.work_tiles.shape[1],
        chunk.first_head,
        chunk.first_csr_row,
        plan.query_offset - chunk.start,
        plan.chunk_tokens,
        plan.num_queries,
        plan.num_keys,
        plan.num_blocks,
        plan.kv_heads,
        base2_scale(scale),
    )


def _launch(plan: SelectedPlan, num_ctas: int, arguments: tuple[Any, ...]) -> None:
    """`selected_fwd_partial_kernel` on so many CTAs, with the `_arguments` of a chunk."""
    selected_fwd_partial_kernel[(num_ctas,)](
        *arguments,
        **plan.constants(),
        NUM_SLOTS=plan.num_slots,
        BLOCK_M=plan.tile_rows,
        num_warps=plan.num_warps,
        maxnreg=plan.stream_registers,
    )


def _launch_combine(
    selection: Selection,
    chunk: QueryChunk,
    partial: Tensor,
    partial_lse: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    plan, csr, unions, query, key, value, scale, offsets = selection
    grid = (plan.chunk_tokens // plan.combine_tokens, chunk.num_heads)
    selected_fwd_combine_kernel[grid](
        query,
        key,
        value,
        partial,
        partial_lse,
        csr.bitmask,
        unions.sizes,
        offsets,
        out,
        lse,
        strides(key),
        strides(value),
        chunk.first_head,
        (chunk.start - plan.base) // plan.combine_tokens,
        plan.span // plan.combine_tokens,
        chunk.start,
        plan.chunk_tokens,
        plan.query_offset,
        plan.num_queries,
        plan.num_keys,
        plan.kv_heads,
        base2_scale(scale),
        **plan.constants(),
        NUM_SLOTS=plan.num_slots,
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        BLOCK_TOKENS=plan.combine_tokens,
        BLOCK_M=plan.combine_rows,
        STAGES=plan.combine_stages(plan.value_dim),
        num_warps=plan.num_warps,
        maxnreg=plan.stream_registers,
    )


def forward(selection: Selection) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, Sq, Dv) and natural log-sum-exp (B, Hq, Sq), chunk by chunk.

    The order within CSR rows is not fixed, but no sum depends on it: equal inputs, equal bits.
    """
    plan, query = selection.plan, selection.query
    out = empty_bshd(query, plan.query_heads, plan.num_queries, plan.value_dim, query.dtype)
    lse = empty_bshd(query, plan.query_heads, plan.num_queries, 1, torch.float32)[..., 0]

    def combine(chunk: QueryChunk, partial: Tensor, partial_lse: Tensor) -> None:
        _launch_combine(selection, chunk, partial, partial_lse, out, lse)

    for_each_chunk(selection, combine)
    attend_unions(selection, out, lse)
    return out, lse
