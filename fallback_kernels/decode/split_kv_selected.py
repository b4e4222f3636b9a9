"""Selected and sliding branch of a decode step: partial attention of some blocks or some window.

A program attends the tokens for all query heads of a group, so that each key and value is read
once a KV head and branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode.tiles import (
    let_the_next_kernel_start,
    load_members,
    load_tile,
    store_part,
    tile_pointers,
    tile_weights,
    wait_for_the_kernel_before,
)
from nsa_flex.fallback_kernels.decode.topk import best_of_chunks, slots_used


@triton.jit(
    do_not_specialize=[
        "num_splits",
        "num_parts",
        "window_parts",
        "forced_parts",
        "late_part",
        "forced_per_part",
        "slots_per_part",
        "tiles_per_part",
    ]
)
def attend_kernel(
    query_ptr, key_ptr, value_ptr, sliding_key_ptr, sliding_value_ptr, new_key_ptr, new_value_ptr,
    lengths_ptr, candidate_ptr, block_ptr, partial_ptr, top_ptr, total_ptr, rows_read_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    sliding_key_stride_b, sliding_key_stride_h, sliding_key_stride_s,
    sliding_value_stride_b, sliding_value_stride_h, sliding_value_stride_s,
    new_key_stride_b, new_key_stride_h,
    new_value_stride_b, new_value_stride_h,
    capacity, kv_heads, num_splits, num_parts, window_parts, forced_parts, late_part,
    forced_per_part, slots_per_part, tiles_per_part, scale_log2,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, SLOT_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (KV head of a batch row, new token, part): parts of the window come first, then of
    the forced blocks, then, from `late_part` on, of the free ones.

    Only the late ones wait for the choice: of what the step's kernels write the others need
    nothing but the new token's key and value, which under STEP they take from where the caller has
    them. With several CHUNKS of candidates a part is one or two slots.
    """
    PER_BLOCK: tl.constexpr = (SELECT + KEYS - 1) // KEYS
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    let_the_next_kernel_start(EARLY)
    pair, token, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    unit = (pair * tl.num_programs(1) + token).to(tl.int64)
    query_ptr += batch * query_stride_b + head * GROUP * query_stride_h + token * query_stride_s
    q = load_members(query_ptr, query_stride_h, GROUP, ROWS, HEAD_DIM, HEAD_COLUMNS)
    position = tl.load(lengths_ptr + batch) + token
    if part >= late_part:
        wait_for_the_kernel_before(EARLY)
    if position >= capacity:
        return
    selecting = part >= window_parts
    picking = part >= window_parts + forced_parts
    window = tl.minimum(position + 1, WINDOW)
    first_tile = part * tiles_per_part
    tiles = tl.minimum(tl.cdiv(window, KEYS) - first_tile, tiles_per_part)
    own = position // SELECT
    full = own >= NUM_SLOTS
    forced, free = slots_used(position, SELECT, NUM_SLOTS, FREE, INITIAL)
    own_part = part - window_parts - tl.where(picking, forced_parts, 0)
    per_part = tl.where(picking, slots_per_part, forced_per_part)
    first_slot = own_part * per_part
    slots = tl.minimum(tl.where(picking, free, forced) - first_slot, per_part)
    steps = tl.where(selecting, slots * PER_BLOCK, tiles)
    block_ptr += unit * NUM_SLOTS
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

    candidate_ptr += unit * (CHUNKS * SLOT_COLUMNS)
    best = first_slot.to(tl.int64) * 0
    first_best, second_best = best, best
    if CHUNKS > 1:  # noqa: SIM102
        if picking & full:
            first_best, second_best = best_of_chunks(
                candidate_ptr, first_slot, CHUNKS, SLOT_COLUMNS, FREE
            )
    window_start = position + 1 - window + first_tile * KEYS
    new_key = new_key_ptr + batch * new_key_stride_b + head * new_key_stride_h
    new_key += tl.arange(0, HEAD_COLUMNS)[None, :]
    new_value = new_value_ptr + batch * new_value_stride_b + head * new_value_stride_h
    new_value += tl.arange(0, VALUE_COLUMNS)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, VALUE_COLUMNS), tl.float32)
    rows_read = part * 0
    for step in tl.range(0, steps, num_stages=STAGES):
        place = first_slot + step // PER_BLOCK
        slot = tl.where(place < INITIAL, place, place + FREE)
        slot = tl.where(picking, place + INITIAL, slot)
        block = tl.where(full & (slot >= INITIAL), own - (NUM_SLOTS - 1 - slot), slot)
        if CHUNKS == 1:
            best = tl.load(candidate_ptr + place, mask=picking & full, other=0)
        else:
            best = tl.where(place == first_slot, first_best, second_best)
        chosen = BLOCK_COLUMNS - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        block = tl.where(picking & full, chosen, block)
        start = tl.where(
            selecting, block * SELECT + step % PER_BLOCK * KEYS, window_start + step * KEYS
        )
        stop = tl.where(selecting, tl.minimum(position, (block + 1) * SELECT - 1), position)
        key = start + tl.arange(0, KEYS)
        there = key <= stop
        key_pointers = tile_pointers(keys, key_stride, start, KEYS, HEAD_COLUMNS)
        value_pointers = tile_pointers(values, value_stride, start, KEYS, VALUE_COLUMNS)
        if STEP:
            newest = (key == position)[:, None]
            key_pointers = tl.where(newest, new_key, key_pointers)
            value_pointers = tl.where(newest, new_value, value_pointers)
        k = load_tile(key_pointers, there, HEAD_DIM, HEAD_COLUMNS)
        p, top, shrink = tile_weights(q, k, there, top, scale_log2, PRECISION)
        v = load_tile(value_pointers, there, VALUE_DIM, VALUE_COLUMNS)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None]
        out = tl.dot(p.to(v.dtype), v, out, input_precision=PRECISION)
        tl.store(block_ptr + slot, block, mask=selecting)
        if COUNT:
            rows_read += tl.sum(there.to(tl.int32))
    store_part(
        partial_ptr, top_ptr, total_ptr, unit, num_splits + part, num_parts, out, top, total,
        GROUP, ROWS, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    if COUNT:
        tl.store(rows_read_ptr + unit * num_parts + num_splits + part, rows_read)
