"""Compressed branch of a decode step, split over keys.

A program attends some tiles of compressed keys for all query heads of a group, so that each key
and value is read once a KV head. On the way it pools the probabilities into blocks (Eq. 9): what a
head adds to a block's score is written as log2(sum of exp2(logit)), which needs no other split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode.append_kv import append_token, emit_block
from nsa_flex.fallback_kernels.decode.tiles import (
    let_the_next_kernel_start,
    load_members,
    load_tile,
    share_of_split,
    store_part,
    tile_pointers,
    tile_weights,
    visible_blocks,
    wait_for_the_kernel_before,
)


@triton.jit
def pooling_matrix(
    KEYS: tl.constexpr, COLUMNS: tl.constexpr, PER: tl.constexpr, LEFT: tl.constexpr
):
    """Eq. 9 within a tile as float32 [KEYS, COLUMNS]: how often a block counts each key.

    Key r places into a block (l'/d of them) is hit by as many pairs (m, n) as satisfy m - n = r.
    Column KEYS / PER is the first block of the next tile, which the last keys reach into.
    """
    r = tl.arange(0, KEYS)[:, None] - PER * tl.arange(0, COLUMNS)[None, :]
    inside = tl.where(r < PER, tl.minimum(LEFT, PER - 1 - r) + 1, 0)
    return tl.where(r >= 0, inside, tl.maximum(LEFT + 1 + r, 0)).to(tl.float32)


@triton.jit
def pool(p, pooling, COMPILED: tl.constexpr):
    """p [rows, KEYS] times the pooling matrix, to float32 accuracy.

    Three bfloat16 pieces hold all of a float32, range included, and the matrix' small integers
    are exact in one: the matrix units multiply at half precision's rate without loss.
    """
    if COMPILED:
        high = p.to(tl.bfloat16)
        rest = p - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        counts = pooling.to(tl.bfloat16)
        pooled = tl.dot(high, counts, tl.dot(middle, counts, tl.dot(low, counts)))
    else:  # Triton's interpreter has no bfloat16
        pooled = tl.dot(p, pooling, input_precision="ieee")
    return pooled


@triton.jit(do_not_specialize=["num_splits", "num_parts"])
def compressed_kernel(
    query_ptr, key_ptr, value_ptr, lengths_ptr, partial_ptr, top_ptr, total_ptr, score_ptr,
    rows_read_ptr, new_key_ptr, new_value_ptr, cache_key_ptr, cache_value_ptr,
    key_weight_ptr, value_weight_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    new_key_stride_b, new_key_stride_h,
    new_value_stride_b, new_value_stride_h,
    cache_key_stride_b, cache_key_stride_h, cache_key_stride_s,
    cache_value_stride_b, cache_value_stride_h, cache_value_stride_s,
    capacity, num_compressed, kv_heads, num_splits, num_parts, scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, POOL_COLUMNS: tl.constexpr,
    COMPRESS_ROWS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr,
    WEIGHTED: tl.constexpr, COMPILED: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (split, new token, KV head of a batch row). STEP also stores the one new token."""
    PER: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    BLOCKS: tl.constexpr = KEYS // PER
    SCORE_WIDTH: tl.constexpr = BLOCK_COLUMNS + BLOCK_COLUMNS // BLOCKS
    # In this order: nothing that starts early finds what came before this step unfinished.
    wait_for_the_kernel_before(EARLY)
    let_the_next_kernel_start(EARLY)
    split, token, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    unit = pair * tl.num_programs(1) + token
    query_ptr += batch * query_stride_b + head * GROUP * query_stride_h + token * query_stride_s
    q = load_members(query_ptr, query_stride_h, GROUP, ROWS, HEAD_DIM, HEAD_COLUMNS)
    length = tl.load(lengths_ptr + batch)
    position = length + token
    if position >= capacity:
        return
    seen = tl.minimum(visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    share, active = share_of_split(seen, num_splits, KEYS)
    programs = tl.maximum(active, 1)  # the last one stores the new token
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

    row, column = tl.arange(0, ROWS), tl.arange(0, POOL_COLUMNS)
    score_ptr += unit.to(tl.int64) * (GROUP * SCORE_WIDTH)
    pooling = pooling_matrix(KEYS, POOL_COLUMNS, PER, LEFT)
    first, last = split * share, tl.minimum((split + 1) * share, tl.cdiv(seen, KEYS))
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    totals = tl.zeros((ROWS, KEYS), tl.float32)
    out = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    rows_read = split * 0
    for tile in tl.range(first, last, num_stages=STAGES):
        there = tile * KEYS + tl.arange(0, KEYS) < seen
        pointers = tile_pointers(key_ptr, key_stride_s, tile * KEYS, KEYS, HEAD_COLUMNS)
        k = load_tile(pointers, there, HEAD_DIM, HEAD_COLUMNS)
        p, top, shrink = tile_weights(q, k, there, top, scale_log2, PRECISION)
        pooled = tl.log2(pool(p, pooling, COMPILED)) + top[:, None]
        place = tl.where(column < BLOCKS, tile * BLOCKS + column, BLOCK_COLUMNS + tile)
        tl.store(
            score_ptr + row[:, None] * SCORE_WIDTH + place[None, :],
            pooled,
            mask=(row < GROUP)[:, None] & (column <= BLOCKS)[None, :],
        )
        totals = totals * shrink[:, None] + p
        pointers = tile_pointers(value_ptr, value_stride_s, tile * KEYS, KEYS, VALUE_COLUMNS)
        v = load_tile(pointers, there, VALUE_DIM, VALUE_COLUMNS)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        if COUNT:
            rows_read += tl.sum(there.to(tl.int32))
    if active > 0:
        store_part(
            partial_ptr, top_ptr, total_ptr, unit, split, num_parts,
            out, top, tl.sum(totals, 1), GROUP, ROWS, VALUE_DIM, VALUE_COLUMNS,
        )  # fmt: skip
    if COUNT:
        tl.store(rows_read_ptr + unit * num_parts + split, rows_read)
