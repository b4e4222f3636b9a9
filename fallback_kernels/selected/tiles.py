"""Pieces that the selection kernels share: items, gathered rows, K/V blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def item_of(items_ptr, item, first_head, first_list, kv_heads, num_blocks, LISTED: tl.constexpr):
    """An item's range of entries, and its list: batch row, KV head, that in the window, block.

    LISTED leaves out the entries of tiles that have a union.
    """
    key = tl.load(items_ptr + item * 4)
    start = tl.load(items_ptr + item * 4 + 1)
    stop = tl.load(items_ptr + item * 4 + 2)
    if LISTED:
        stop = tl.minimum(stop, tl.load(items_ptr + item * 4 + 3))
    local = key - first_list
    within = local // num_blocks
    batch_head = first_head + within
    return start, stop, batch_head // kv_heads, batch_head % kv_heads, within, local % num_blocks


@triton.jit
def first_entry(within, window_tokens, window_shift, NUM_SLOTS: tl.constexpr):
    """Place in the partial buffer of the entry 0 of a KV head, counted within the window."""
    return (within * window_tokens + window_shift) * NUM_SLOTS


@triton.jit
def load_block(
    base_ptr,
    stride,
    block,
    num_keys,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr = False,
):
    """Keys or values of one block (BLOCK_SIZE, COLUMNS); 0 past the last key.

    WHOLE: no key of the block is past the last one, so that no mask is needed.
    """
    position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (position.to(tl.int64) * stride)[:, None] + column[None, :]
    if WHOLE and WIDTH == COLUMNS:
        tile = tl.load(pointer)
    else:
        mask = (position < num_keys)[:, None] & (column < WIDTH)[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0)
    return tile


@triton.jit
def split_choices(
    blocks_ptr,
    row,
    row_ok,
    position,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Blocks of some queries, which of them are free, their slots, and the summary's bits.

    A block in a query's future is taken as no choice, so that no kernel reads out of bounds.
    """
    column = tl.arange(0, SLOT_COLUMNS)
    place = row[:, None] * NUM_SLOTS + column[None, :]
    place_ok = row_ok[:, None] & (column < NUM_SLOTS)[None, :]
    block = tl.load(blocks_ptr + place, mask=place_ok, other=-1)
    age = (position // BLOCK_SIZE)[:, None] - block
    chosen = (block >= 0) & (age >= 0)
    local = chosen & (age < LOCAL)
    initial = chosen & (age >= LOCAL) & (block < INITIAL)
    free = chosen & (age >= LOCAL) & (block >= INITIAL)
    count = free.to(tl.int32)
    slot = tl.cumsum(count, 1) - 1
    candidate = tl.where(local, age, tl.where(initial, LOCAL + block, 0))
    bit = tl.where(local | initial, 1 << candidate, 0)
    summary = tl.sum(bit, 1) | (tl.sum(count, 1) << 24)
    return block, free, slot, summary
