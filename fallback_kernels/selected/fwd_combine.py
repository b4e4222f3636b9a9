"""The merges: dense candidates computed on the spot, partial results of free choices added.

A tile holds the query heads of a few neighbouring queries, all in one block, so that they share
their dense candidates: own block, the ones before it, the first ones. A candidate that no query
of the tile chose is left out; one that some chose is masked by row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.softmax import LN2, finite, online_softmax_update
from nsa_flex.fallback_kernels.common.tiles import group_rows, load_masked_rows, store_rows
from nsa_flex.fallback_kernels.selected.tiles import load_block


@triton.jit
def merge_rows_of(
    first_head, window_start, window_tokens, query_offset, num_queries, kv_heads,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows (query, head) of this program's tile: where they are, and their first partial row."""
    within = tl.program_id(1)
    batch = (first_head + within) // kv_heads
    head = (first_head + within) % kv_heads
    row = tl.arange(0, ROWS)
    token = tl.program_id(0) * TOKENS + row // GROUP
    member = row % GROUP
    position = window_start + token
    query = position - query_offset
    row_ok = (row < TOKENS * GROUP) & (query >= 0) & (query < num_queries)
    place = (within * window_tokens + token) * NUM_SLOTS * GROUP + member
    return batch, head, member, position, query, row_ok, place


@triton.jit
def load_candidate(
    candidate, chosen, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s, num_keys,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """Keys and values of a dense candidate, and which of the keys a row sees if it is `chosen`.

    Candidates come in the order of the summary's bits: own block and back, then the first.
    """
    block = tl.where(candidate < LOCAL, own - candidate, candidate - LOCAL)
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    key_position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return k, v, chosen[:, None] & (key_position[None, :] <= position[:, None])


@triton.jit
def attend_candidates(
    q, summary, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s, num_keys,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Dense candidates of a tile: top and sum of a row's base-2 scores, and unscaled output."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    for candidate in range(LOCAL + INITIAL):
        chosen = ((summary >> candidate) & 1) != 0
        if tl.max(chosen.to(tl.int32), 0) > 0:
            k, v, seen = load_candidate(
                candidate, chosen, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s,
                num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS, LOCAL,
            )  # fmt: skip
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            logits = tl.where(seen, logits, float("-inf"))
            out, top, total = online_softmax_update(
                out, top, total, logits, v, 1.0, None, True, PRECISION
            )
    return top, total, out


@triton.jit
def join_partials(
    top, total, partial_lse_ptr, place, free, GROUP: tl.constexpr, SLOT_COLUMNS: tl.constexpr
):
    """Base-2 log-sum-exp of rows over dense candidates and `free` partial results.

    And what the candidates' unscaled output, with its `top` and `total`, is to be multiplied by.
    """
    slot = tl.arange(0, SLOT_COLUMNS)
    partial_lse = tl.load(
        partial_lse_ptr + place[:, None] + slot[None, :] * GROUP,
        mask=slot[None, :] < free[:, None],
        other=float("-inf"),
    )
    new_top = tl.maximum(top, tl.max(partial_lse, 1))
    shift = finite(new_top)
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(tl.exp2(partial_lse - shift[:, None]), 1)
    empty = total == 0.0
    lse_log2 = tl.where(empty, float("-inf"), shift + tl.log2(total))
    return lse_log2, tl.where(empty, 0.0, decay / total)


@triton.jit
def add_partials(
    out, gate, lse_log2, partial_ptr, partial_lse_ptr, place, free,
    GROUP: tl.constexpr, WIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`out` plus the partial results of free choices by their probability, times `gate` if any."""
    for s in tl.range(0, tl.max(free, 0), num_stages=STAGES):
        slot_ok = s < free
        lse_s = tl.load(partial_lse_ptr + place + s * GROUP, mask=slot_ok, other=float("-inf"))
        weight = tl.where(slot_ok, tl.exp2(lse_s - lse_log2), 0.0)
        if gate is not None:
            weight *= gate
        part = load_masked_rows(
            partial_ptr, place + s * GROUP, slot_ok, WIDE, VALUE_DIM, VALUE_COLUMNS, True
        )
        out += part.to(tl.float32) * weight[:, None]
    return out


@triton.jit(do_not_specialize=["first_head", "first_tile", "window_start"])
def merge_kernel(
    query_ptr, key_ptr, value_ptr, partial_ptr, partial_lse_ptr, summary_ptr, union_sizes_ptr,
    out_ptr, lse_ptr,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    first_head, first_tile, tiles_per_row, window_start, window_tokens, query_offset, num_queries,
    num_keys, kv_heads, scale_log2,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, SLOT_COLUMNS: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the tiles that have no union."""
    batch_head = first_head + tl.program_id(1)
    tile = batch_head * tiles_per_row + first_tile + tl.program_id(0)
    if tl.load(union_sizes_ptr + tile) >= 0:
        return
    batch, head, member, position, query, row_ok, place = merge_rows_of(
        first_head, window_start, window_tokens, query_offset, num_queries, kv_heads, GROUP,
        NUM_SLOTS, TOKENS, ROWS,
    )  # fmt: skip
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    out_ptr = group_rows(out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    lse_ptr = group_rows(lse_ptr, b, h, num_queries, kv_heads, GROUP, 1)
    line = query * query_heads + member
    summary_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    q = load_masked_rows(query_ptr, line, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS)
    summary = tl.load(summary_ptr + query, mask=row_ok, other=0)
    own = (window_start + tl.program_id(0) * TOKENS) // BLOCK_SIZE

    top, total, out = attend_candidates(
        q, summary, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s, num_keys,
        scale_log2, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS, PRECISION,
        INITIAL, LOCAL, ROWS,
    )  # fmt: skip

    free = summary >> 24
    lse_log2, share = join_partials(top, total, partial_lse_ptr, place, free, GROUP, SLOT_COLUMNS)
    out = add_partials(
        out * share[:, None], None, lse_log2, partial_ptr, partial_lse_ptr, place, free, GROUP,
        WIDE, VALUE_DIM, VALUE_COLUMNS, STAGES,
    )  # fmt: skip

    store_rows(out_ptr, line, out, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS)
    tl.store(lse_ptr + line, lse_log2 * LN2, mask=row_ok)
