"""Compressed branch of a decode step, split over keys.

A CTA attends some tiles of compressed keys for all query heads of a group, so that each key and
value is read once per KV head. It also pools the probabilities into blocks (Eq. 9): what a head
adds to a block's score is written as log2(sum of exp2(logit)), which depends on no other split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.arch import INTERPRETED
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import precision_of, width_of
from nsa_flex.fallback_kernels.decode.append_kv import append_token, store_completed_block
from nsa_flex.fallback_kernels.decode.tiles import (
    completes_any,
    count_visible_blocks,
    load_query_group,
    load_tile,
    page_pointers,
    pdl_launch_dependents,
    pdl_wait,
    softmax_step,
    store_partial,
    tile_pointers,
    tiles_of_split,
)

COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def pooling_matrix(
    BLOCK_N: tl.constexpr, BLOCK_POOL: tl.constexpr, PER_BLOCK: tl.constexpr, LEFT: tl.constexpr
):
    """Eq. 9 within a tile as float32 [BLOCK_N, BLOCK_POOL]: how often a block counts each key.

    The r-th key of a block, l'/d of them to a block, is counted by as many pairs (m, n) as satisfy
    m - n = r. Column BLOCK_N / PER_BLOCK is the next tile's first block, which the last keys
    overlap.
    """
    r = tl.arange(0, BLOCK_N)[:, None] - PER_BLOCK * tl.arange(0, BLOCK_POOL)[None, :]
    count = tl.where(r < PER_BLOCK, tl.minimum(LEFT, PER_BLOCK - 1 - r) + 1, 0)
    return tl.where(r >= 0, count, tl.maximum(LEFT + 1 + r, 0)).to(tl.float32)


@triton.jit
def pool(p, pooling):
    """p [BLOCK_M, BLOCK_N] times the pooling matrix [BLOCK_N, BLOCK_POOL], to float32 accuracy.

    Three bfloat16 pieces hold all of a float32, range included, and the matrix' small integers
    are exact in one: tensor cores multiply at half precision's rate without loss.
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


@recordable
@triton.jit(do_not_specialize=["num_compressed_splits", "num_splits"])
def decode_compressed_kernel(
    query_ptr, key_ptr, value_ptr, lengths_ptr, partial_ptr, row_max_ptr, row_sum_ptr, score_ptr,
    rows_read_ptr, new_key_ptr, new_value_ptr, cache_key_ptr, cache_value_ptr,
    key_weight_ptr, value_weight_ptr,
    query_strides, key_strides, value_strides, new_key_strides, new_value_strides,
    cache_key_strides, cache_value_strides,
    capacity, num_compressed, kv_heads, num_compressed_splits, num_splits, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr,
    BLOCK_N: tl.constexpr, PADDED_BLOCKS: tl.constexpr, BLOCK_POOL: tl.constexpr,
    STAGES: tl.constexpr, HAS_NEW_TOKEN: tl.constexpr, WRITE_COMPRESSED: tl.constexpr,
    WEIGHTED: tl.constexpr, COUNT_ROWS: tl.constexpr, PADDED_BATCH: tl.constexpr,
    PDL: tl.constexpr, OUTPUT: tl.constexpr,
    PAGE: tl.constexpr = 0, table_ptr=None, table_stride=0,
):  # fmt: skip
    """CTA (split, new token, KV head of a batch row).

    With PAGE, compressed rows are in pages of so many: a row of the table, int (B, pages), lists
    those of a request, and the first strides of keys and values lead from page to page. The first
    COMPRESS / STRIDE - 1 rows of a request's first page are of no block. HAS_NEW_TOKEN is False.

    With PADDED_BATCH, φ's own kernels are right before this one.

    HAS_NEW_TOKEN also stores the one new token of each row, and with WRITE_COMPRESSED the block
    that it completes.

    Without BLOCK_POOL no block is scored: none are selected. Without OUTPUT no value is read, and
    of the partial outputs only row_max and row_sum are written: selection alone takes them.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    BLOCK_M: tl.constexpr = width_of(GROUP)
    PADDED_COMPRESS: tl.constexpr = triton.next_power_of_2(COMPRESS)
    PRECISION: tl.constexpr = precision_of(query_ptr.dtype.element_ty)
    PER_BLOCK: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    TILE_BLOCKS: tl.constexpr = BLOCK_N // PER_BLOCK
    SCORE_STRIDE: tl.constexpr = PADDED_BLOCKS + PADDED_BLOCKS // TILE_BLOCKS
    waits = True
    if PADDED_BATCH:
        # φ's first kernel launched the others once all work from before this step was done: only
        # what φ's write is waited for, and only where they write.
        waits = completes_any(
            lengths_ptr, tl.num_programs(2) // kv_heads, tl.num_programs(1), capacity,
            num_compressed, COMPRESS, STRIDE, PADDED_BATCH,
        )  # fmt: skip
    if waits:
        pdl_wait(PDL)
    # In this order: no kernel launched early finds work from before it unfinished.
    pdl_launch_dependents(PDL)
    split, token, batch_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (batch_head // kv_heads).to(tl.int64), (batch_head % kv_heads).to(tl.int64)
    unit = batch_head * tl.num_programs(1) + token
    query_ptr += (
        batch * query_strides[0] + head * GROUP * query_strides[1] + token * query_strides[2]
    )
    q = load_query_group(
        query_ptr, query_strides[1], GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    length = tl.load(lengths_ptr + batch)
    position = length + token
    if position >= capacity:
        return
    num_visible = tl.minimum(count_visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    tiles_per_split, num_used = tiles_of_split(num_visible, num_compressed_splits, BLOCK_N)
    num_ctas = tl.maximum(num_used, 1)  # the last one stores the new token
    if split >= num_ctas:
        return
    key_ptr += head * key_strides[1]
    value_ptr += head * value_strides[1]
    if PAGE:
        table_ptr += batch * table_stride
    else:
        key_ptr += batch * key_strides[0]
        value_ptr += batch * value_strides[0]

    if HAS_NEW_TOKEN:  # noqa: SIM102  # known to the compiler, what follows is not
        if split == num_ctas - 1:
            new_keys = new_key_ptr + batch * new_key_strides[0] + head * new_key_strides[1]
            new_values = new_value_ptr + batch * new_value_strides[0] + head * new_value_strides[1]
            keys = cache_key_ptr + batch * cache_key_strides[0] + head * cache_key_strides[1]
            values = cache_value_ptr + batch * cache_value_strides[0]
            values += head * cache_value_strides[1]
            append_token(
                new_keys, new_values, keys, values, cache_key_strides[2], cache_value_strides[2],
                position, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            )  # fmt: skip
            if WRITE_COMPRESSED:
                store_completed_block(
                    new_keys, new_values, 0, 0, keys, values,
                    cache_key_strides[2], cache_value_strides[2],
                    key_ptr, value_ptr, key_strides[2], value_strides[2],
                    key_weight_ptr + head * COMPRESS, value_weight_ptr + head * COMPRESS,
                    position, length, num_compressed,
                    HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
                    COMPRESS, STRIDE, PADDED_COMPRESS, WEIGHTED,
                )  # fmt: skip
                tl.debug_barrier()  # the loop below reads what other threads wrote here

    if BLOCK_POOL:
        head_in_group, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_POOL)
        score_ptr += unit.to(tl.int64) * (GROUP * SCORE_STRIDE)
        pooling = pooling_matrix(BLOCK_N, BLOCK_POOL, PER_BLOCK, LEFT)  # [BLOCK_N, BLOCK_POOL]
    first = split * tiles_per_split
    last = tl.minimum((split + 1) * tiles_per_split, tl.cdiv(num_visible, BLOCK_N))
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    # Summed over keys once behind the loop, not in every step.
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    rows_read = split * 0
    for tile in tl.range(first, last, num_stages=STAGES):
        key_mask = tile * BLOCK_N + tl.arange(0, BLOCK_N) < num_visible  # [BLOCK_N]
        if PAGE:
            pointers = page_pointers(
                key_ptr, table_ptr, key_strides[0], key_strides[2], tile * BLOCK_N + LEFT,
                key_mask, PAGE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
        else:
            pointers = tile_pointers(key_ptr, key_strides[2], tile * BLOCK_N, BLOCK_N, BLOCK_D)
        k = load_tile(pointers, key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        p, row_max, alpha = softmax_step(q, k, key_mask, row_max, scale_log2, PRECISION)
        if BLOCK_POOL:
            pooled = tl.log2(pool(p, pooling)) + row_max[:, None]  # [BLOCK_M, BLOCK_POOL]
            slot = tl.where(
                column < TILE_BLOCKS, tile * TILE_BLOCKS + column, PADDED_BLOCKS + tile
            )
            tl.store(
                score_ptr + head_in_group[:, None] * SCORE_STRIDE + slot[None, :],
                pooled,
                mask=(head_in_group < GROUP)[:, None] & (column <= TILE_BLOCKS)[None, :],
            )
        sums = sums * alpha[:, None] + p  # [BLOCK_M, BLOCK_N]
        if OUTPUT:
            if PAGE:
                pointers = page_pointers(
                    value_ptr, table_ptr, value_strides[0], value_strides[2],
                    tile * BLOCK_N + LEFT, key_mask, PAGE, BLOCK_N, BLOCK_DV,
                )  # fmt: skip
            else:
                pointers = tile_pointers(
                    value_ptr, value_strides[2], tile * BLOCK_N, BLOCK_N, BLOCK_DV
                )
            v = load_tile(pointers, key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
            acc = acc * alpha[:, None]
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
        if COUNT_ROWS:
            rows_read += tl.sum(key_mask.to(tl.int32))
    if num_used > 0:
        store_partial(
            partial_ptr, row_max_ptr, row_sum_ptr, unit, split, num_splits,
            acc, row_max, tl.sum(sums, 1), GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV, OUTPUT,
        )  # fmt: skip
    if COUNT_ROWS:
        tl.store(rows_read_ptr + unit * num_splits + split, rows_read)
