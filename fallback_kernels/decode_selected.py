"""Selected and sliding branch of a decode step: partial attention of some blocks or some window.

A program attends the tokens for all query heads of a group, so that each key and value is read
once a KV head and branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode_tiles import (
    let_the_next_kernel_start,
    load_members,
    load_tile,
    store_part,
    tile_weights,
    wait_for_the_kernel_before,
)


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "num_parts",
        "select_parts",
        "slots_per_part",
        "tiles_per_part",
    ]
)
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    sliding_key_ptr,
    sliding_value_ptr,
    lengths_ptr,
    block_ptr,
    partial_ptr,
    top_ptr,
    total_ptr,
    rows_read_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    sliding_key_stride_b,
    sliding_key_stride_h,
    sliding_key_stride_s,
    sliding_value_stride_b,
    sliding_value_stride_h,
    sliding_value_stride_s,
    capacity,
    kv_heads,
    num_splits,
    num_parts,
    select_parts,
    slots_per_part,
    tiles_per_part,
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
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (part, new token, KV head of a batch row): selected parts first, then the window."""
    PER_BLOCK: tl.constexpr = (SELECT + KEYS - 1) // KEYS
    let_the_next_kernel_start(EARLY)
    part, token, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    unit = pair * tl.num_programs(1) + token
    position = tl.load(lengths_ptr + batch) + token
    wait_for_the_kernel_before(EARLY)
    if position >= capacity:
        return
    selecting = part < select_parts
    window = tl.minimum(position + 1, WINDOW)
    first_slot = part * slots_per_part
    first_tile = (part - select_parts) * tiles_per_part
    slots = tl.minimum(position // SELECT + 1, NUM_SLOTS) - first_slot
    tiles = tl.cdiv(window, KEYS) - first_tile
    steps = tl.where(
        selecting,
        tl.minimum(slots, slots_per_part) * PER_BLOCK,
        tl.minimum(tiles, tiles_per_part),
    )
    if steps <= 0:
        return
    if selecting:
        keys = key_ptr + batch * key_stride_b + head * key_stride_h
        values = value_ptr + batch * value_stride_b + head * value_stride_h
        key_stride, value_stride = key_stride_s, value_stride_s
    else:
        keys = sliding_key_ptr + batch * sliding_key_stride_b + head * sliding_key_stride_h
        values = sliding_value_ptr + batch * sliding_value_stride_b + head * sliding_value_stride_h
        key_stride, value_stride = sliding_key_stride_s, sliding_value_stride_s

    query_ptr += batch * query_stride_b + head * GROUP * query_stride_h + token * query_stride_s
    q = load_members(query_ptr, query_stride_h, GROUP, ROWS, HEAD_DIM, HEAD_COLUMNS)
    block_ptr += unit * NUM_SLOTS + first_slot
    window_start = position + 1 - window + first_tile * KEYS
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    rows_read = part * 0
    for step in tl.range(0, steps, num_stages=STAGES):
        block = tl.load(block_ptr + step // PER_BLOCK, mask=selecting, other=0)
        start = tl.where(
            selecting, block * SELECT + step % PER_BLOCK * KEYS, window_start + step * KEYS
        )
        stop = tl.where(selecting, tl.minimum(position, (block + 1) * SELECT - 1), position)
        there = start + tl.arange(0, KEYS) <= stop
        k = load_tile(keys, key_stride, start, there, KEYS, HEAD_DIM, HEAD_COLUMNS)
        p, new_top, shrink = tile_weights(q, k, there, top, scale_log2, PRECISION)
        v = load_tile(values, value_stride, start, there, KEYS, VALUE_DIM, VALUE_COLUMNS)
        top = new_top
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        if COUNT:
            rows_read += tl.sum(there.to(tl.int32))
    store_part(
        partial_ptr, top_ptr, total_ptr, unit * num_parts + num_splits + part, out, top, total,
        GROUP, ROWS, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    if COUNT:
        tl.store(rows_read_ptr + unit * num_parts + num_splits + part, rows_read)
