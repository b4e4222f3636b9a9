"""Compressed branch of a decode step, split over keys, and the choice of blocks.

A program attends some tiles of compressed keys for all query heads of a group, so that each key
and value is read once a KV head. On the way it pools the probabilities into blocks (Eq. 9): a
block's share of a head is written as log2(sum of exp2(logit)), which needs no other split. The
last program of a unit to finish sums them over heads with the true log-sum-exp and chooses.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode_append import append_token, emit_block
from nsa_flex.fallback_kernels.decode_choice import choose
from nsa_flex.fallback_kernels.decode_tiles import (
    load_members,
    load_tile,
    share_of_split,
    store_part,
    tile_weights,
    visible_blocks,
)


@triton.jit
def pool(p, carry, KEYS: tl.constexpr, PER: tl.constexpr, LEFT: tl.constexpr, ROWS: tl.constexpr):
    """Eq. 9 within a tile: [ROWS, KEYS] -> [ROWS, blocks], and what the next block is lent.

    Key r of a block overlaps min(l/d - 1, l'/d - 1 - r) + 1 of its d-token segments, and the next
    block's first max(r - (l'/d - l/d), 0). `carry` [ROWS] is what the tile before lent.
    """
    BLOCKS: tl.constexpr = KEYS // PER
    residue = tl.arange(0, KEYS) % PER
    weight = (tl.minimum(LEFT, PER - 1 - residue) + 1).to(tl.float32)
    own = tl.sum(tl.reshape(p * weight[None, :], (ROWS, BLOCKS, PER)), 2)
    if LEFT > 0:
        weight = tl.maximum(residue - (PER - 1 - LEFT), 0).to(tl.float32)
        lent = tl.sum(tl.reshape(p * weight[None, :], (ROWS, BLOCKS, PER)), 2)
        column = tl.arange(0, BLOCKS)[None, :]
        before = tl.broadcast_to(tl.maximum(column - 1, 0), (ROWS, BLOCKS))
        own += tl.where(column == 0, carry[:, None], tl.gather(lent, before, 1))
        carry = tl.sum(tl.where(column == BLOCKS - 1, lent, 0.0), 1)
    return own, carry


@triton.jit(do_not_specialize=["num_splits", "num_parts"])
def compressed_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    lengths_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    score_ptr,
    lent_ptr,
    norm_ptr,
    block_ptr,
    counter_ptr,
    rows_read_ptr,
    new_key_ptr,
    new_value_ptr,
    cache_key_ptr,
    cache_value_ptr,
    key_weight_ptr,
    value_weight_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    new_key_stride_b,
    new_key_stride_h,
    new_value_stride_b,
    new_value_stride_h,
    cache_key_stride_b,
    cache_key_stride_h,
    cache_key_stride_s,
    cache_value_stride_b,
    cache_value_stride_h,
    cache_value_stride_s,
    capacity,
    num_compressed,
    kv_heads,
    num_splits,
    num_parts,
    scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    COMPRESS_ROWS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    STEP: tl.constexpr,
    WEIGHTED: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Program (split, new token, KV head of a batch row). STEP also stores the one new token."""
    PER: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    BLOCKS: tl.constexpr = KEYS // PER
    split, token, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    unit = pair * tl.num_programs(1) + token
    length = tl.load(lengths_ptr + batch)
    position = length + token
    if position >= capacity:
        return
    seen = tl.minimum(visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    share, active = share_of_split(seen, num_splits, KEYS)
    programs = tl.maximum(active, 1)
    if split >= programs:
        return
    key_ptr += batch * key_stride_b + head * key_stride_h
    value_ptr += batch * value_stride_b + head * value_stride_h

    if STEP:  # noqa: SIM102  # known to the compiler, what follows is not
        if split == programs - 1:
            new_keys = new_key_ptr + batch * new_key_stride_b + head * new_key_stride_h
            new_values = new_value_ptr + batch * new_value_stride_b + head * new_value_stride_h
            keys = cache_key_ptr + batch * cache_key_stride_b + head * cache_key_stride_h
            values = cache_value_ptr + batch * cache_value_stride_b + head * cache_value_stride_h
            append_token(
                new_keys, new_values, keys, values, cache_key_stride_s, cache_value_stride_s,
                position, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            )  # fmt: skip
            emit_block(
                new_keys, new_values, 0, 0, keys, values, cache_key_stride_s, cache_value_stride_s,
                key_ptr, value_ptr, key_stride_s, value_stride_s,
                key_weight_ptr + head * COMPRESS, value_weight_ptr + head * COMPRESS,
                position, length, num_compressed,
                HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
                COMPRESS, STRIDE, COMPRESS_ROWS, WEIGHTED,
            )  # fmt: skip
            tl.debug_barrier()  # the loop below reads what other threads wrote here

    query_ptr += batch * query_stride_b + head * GROUP * query_stride_h + token * query_stride_s
    q = load_members(query_ptr, query_stride_h, GROUP, ROWS, HEAD_DIM, HEAD_COLUMNS)
    row = tl.arange(0, ROWS)
    score_ptr += unit.to(tl.int64) * (GROUP * BLOCK_COLUMNS)
    first, last = split * share, tl.minimum((split + 1) * share, tl.cdiv(seen, KEYS))
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    carry = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    rows_read = split * 0
    for tile in tl.range(first, last, num_stages=STAGES):
        there = tile * KEYS + tl.arange(0, KEYS) < seen
        k = load_tile(key_ptr, key_stride_s, tile * KEYS, there, KEYS, HEAD_DIM, HEAD_COLUMNS)
        p, top, shrink = tile_weights(q, k, there, top, scale_log2, PRECISION)
        pooled, carry = pool(p, carry * shrink, KEYS, PER, LEFT, ROWS)
        block = tile * BLOCKS + tl.arange(0, BLOCKS)
        tl.store(
            score_ptr + row[:, None] * BLOCK_COLUMNS + block[None, :],
            tl.log2(pooled) + top[:, None],
            mask=(row < GROUP)[:, None] & (block < BLOCK_COLUMNS)[None, :],
        )
        total = total * shrink + tl.sum(p, 1)
        v = load_tile(
            value_ptr, value_stride_s, tile * KEYS, there, KEYS, VALUE_DIM, VALUE_COLUMNS
        )
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        if COUNT:
            rows_read += tl.sum(there.to(tl.int32))
    if active > 0:
        store_part(
            partial_ptr, top_ptr, total_ptr, unit * num_parts + split, out, top, total,
            GROUP, ROWS, VALUE_DIM, VALUE_COLUMNS,
        )  # fmt: skip
        if LEFT > 0:
            lent = lent_ptr + (unit * GROUP + row) * num_splits + split
            tl.store(lent, tl.log2(carry) + top, mask=row < GROUP)
    if COUNT:
        tl.store(rows_read_ptr + unit * num_parts + split, rows_read)

    tl.debug_barrier()  # all threads have written before the count says so
    finished = tl.atomic_add(counter_ptr + unit, 1, sem="acq_rel", scope="gpu")
    if finished == programs - 1:
        tl.store(counter_ptr + unit, 0)
        place = unit.to(tl.int64) * (num_parts * GROUP)
        choose(
            score_ptr, top_ptr + place, total_ptr + place, lent_ptr + unit * GROUP * num_splits,
            norm_ptr + unit * (MEMBERS + SPLIT_COLUMNS), block_ptr + unit * NUM_SLOTS,
            position // SELECT, num_splits, active, share * BLOCKS,
            GROUP, MEMBERS, SPLIT_COLUMNS, BLOCK_COLUMNS, NUM_SLOTS, SLOT_COLUMNS,
            INITIAL, LOCAL, LEFT,
        )  # fmt: skip
