"""The combine kernel: initial and local blocks attended, partial outputs of top-k blocks added.

A query tile holds the query heads of a few neighbouring queries, all in one block, so that they
share their local blocks and their initial ones. A block that no query of the tile selected is
skipped; one that some selected is masked by row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LN2, finite, online_softmax_update
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_masked_rows,
    precision_of,
    store_rows,
    width_of,
)
from nsa_flex.fallback_kernels.selected.tiles import last_key, load_block, row_offset


@triton.jit
def combine_tile_rows(
    first_head, chunk_start, chunk_tokens, query_offset, num_queries, kv_heads,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows (query, head) of this CTA's tile, all [BLOCK_M]: where they are, first partial row."""
    head_in_chunk = tl.program_id(1)
    batch = (first_head + head_in_chunk) // kv_heads
    head = (first_head + head_in_chunk) % kv_heads
    row = tl.arange(0, BLOCK_M)
    token = tl.program_id(0) * BLOCK_TOKENS + row // GROUP
    head_in_group = row % GROUP
    position = chunk_start + token
    query = position - query_offset
    row_mask = (row < BLOCK_TOKENS * GROUP) & (query >= 0) & (query < num_queries)
    offset = (head_in_chunk * chunk_tokens + token) * NUM_SLOTS * GROUP + head_in_group
    return batch, head, head_in_group, position, query, row_mask, offset


@triton.jit
def load_initial_or_local(
    bit, selected, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s, num_keys,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """Keys and values of the block of a bit of the bitmask, and which of the keys a row sees.

    Bits are in order of `split_blocks`. A row sees none if it has not `selected` the block.
    """
    block = tl.where(bit < LOCAL, own - bit, bit - LOCAL)
    k = load_block(
        key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D
    )  # [BLOCK_SIZE, BLOCK_D]
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_SIZE, BLOCK_DV]
    key_position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    return k, v, selected[:, None] & (key_position[None, :] <= position[:, None])


@triton.jit
def attend_initial_local(
    q, bitmask, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s, num_keys,
    scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Initial and local blocks of a tile: row_max, row_sum [BLOCK_M], acc [BLOCK_M, BLOCK_DV]."""
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)  # [BLOCK_M]
    row_sum = tl.zeros([BLOCK_M], tl.float32)  # [BLOCK_M]
    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)  # [BLOCK_M, BLOCK_DV]
    for bit in range(LOCAL + INITIAL):
        selected = ((bitmask >> bit) & 1) != 0
        if tl.max(selected.to(tl.int32), 0) > 0:
            k, v, seen = load_initial_or_local(
                bit, selected, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s,
                num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, LOCAL,
            )  # fmt: skip
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
            logits = tl.where(seen, logits, float("-inf"))
            out, row_max, row_sum = online_softmax_update(
                out, row_max, row_sum, logits, v, 1.0, None, True, PRECISION
            )
    return row_max, row_sum, out


@triton.jit
def combine_lse(
    row_max,
    row_sum,
    partial_lse_ptr,
    offset,
    num_topk,
    GROUP: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
):
    """Base-2 log-sum-exp [BLOCK_M] over what `row_max`, `row_sum` stand for and partial outputs.

    And the factor [BLOCK_M] of the unscaled output that has this `row_max` and `row_sum`.
    """
    slot = tl.arange(0, PADDED_SLOTS)
    partial_lse = tl.load(  # [BLOCK_M, PADDED_SLOTS]
        partial_lse_ptr + offset[:, None] + slot[None, :] * GROUP,
        mask=slot[None, :] < num_topk[:, None],
        other=float("-inf"),
    )
    new_max = tl.maximum(row_max, tl.max(partial_lse, 1))  # [BLOCK_M]
    shift = finite(new_max)
    alpha = tl.exp2(row_max - shift)
    row_sum = row_sum * alpha + tl.sum(tl.exp2(partial_lse - shift[:, None]), 1)
    empty = row_sum == 0.0
    lse_log2 = tl.where(empty, float("-inf"), shift + tl.log2(row_sum))
    return lse_log2, tl.where(empty, 0.0, alpha / row_sum)


@triton.jit
def add_partials(
    out, gate, lse_log2, partial_ptr, partial_lse_ptr, offset, num_topk,
    GROUP: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """`out` plus the partial outputs of top-k blocks by their weight, times `gate` if any."""
    for s in tl.range(0, tl.max(num_topk, 0), num_stages=STAGES):
        slot_ok = s < num_topk
        lse_s = tl.load(partial_lse_ptr + offset + s * GROUP, mask=slot_ok, other=float("-inf"))
        weight = tl.where(slot_ok, tl.exp2(lse_s - lse_log2), 0.0)
        if gate is not None:
            weight *= gate
        partial = load_masked_rows(  # [BLOCK_M, BLOCK_DV]
            partial_ptr, offset + s * GROUP, slot_ok, INT64_OFFSETS, VALUE_DIM, BLOCK_DV, True
        )
        out += partial.to(tl.float32) * weight[:, None]
    return out


@recordable
@triton.jit(
    do_not_specialize=[
        "first_head",
        "first_tile",
        "tiles_per_row",
        "chunk_start",
        "query_offset",
        "num_queries",
        "num_keys",
    ]
)
def selected_fwd_combine_kernel(
    query_ptr, key_ptr, value_ptr, partial_ptr, partial_lse_ptr, bitmask_ptr, union_sizes_ptr,
    offsets_ptr, out_ptr, lse_ptr,
    key_strides, value_strides,
    first_head, first_tile, tiles_per_row, chunk_start, chunk_tokens, query_offset, num_queries,
    num_keys, kv_heads, scale_log2,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, INT64_OFFSETS: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the tiles that have no union."""
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PADDED_SLOTS: tl.constexpr = width_of(NUM_SLOTS)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    batch_head = first_head + tl.program_id(1)
    tile = batch_head * tiles_per_row + first_tile + tl.program_id(0)
    if tl.load(union_sizes_ptr + tile) != -1:
        return
    query_offset, chunk_start = row_offset(
        offsets_ptr, batch_head, query_offset, chunk_start, BLOCK_SIZE
    )
    num_keys = last_key(offsets_ptr, query_offset, num_queries, num_keys)
    batch, head, head_in_group, position, query, row_mask, offset = combine_tile_rows(
        first_head, chunk_start, chunk_tokens, query_offset, num_queries, kv_heads, GROUP,
        NUM_SLOTS, BLOCK_TOKENS, BLOCK_M,
    )  # fmt: skip
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    out_ptr = group_rows(out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    lse_ptr = group_rows(lse_ptr, b, h, num_queries, kv_heads, GROUP, 1)
    query_row = query * query_heads + head_in_group
    bitmask_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    q = load_masked_rows(
        query_ptr, query_row, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    bitmask = tl.load(bitmask_ptr + query, mask=row_mask, other=0)  # [BLOCK_M]
    own = (chunk_start + tl.program_id(0) * BLOCK_TOKENS) // BLOCK_SIZE

    row_max, row_sum, out = attend_initial_local(
        q, bitmask, position, own, key_ptr, value_ptr, key_strides[2], value_strides[2], num_keys,
        scale_log2, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, PRECISION,
        INITIAL, LOCAL, BLOCK_M,
    )  # fmt: skip

    num_topk = bitmask >> 24
    lse_log2, share = combine_lse(
        row_max, row_sum, partial_lse_ptr, offset, num_topk, GROUP, PADDED_SLOTS
    )
    out = add_partials(
        out * share[:, None], None, lse_log2, partial_ptr, partial_lse_ptr, offset, num_topk,
        GROUP, INT64_OFFSETS, VALUE_DIM, BLOCK_DV, STAGES,
    )  # fmt: skip

    store_rows(out_ptr, query_row, out, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV)
    tl.store(lse_ptr + query_row, lse_log2 * LN2, mask=row_mask)
