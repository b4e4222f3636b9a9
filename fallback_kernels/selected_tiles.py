"""Pieces that the selection kernels share: items, gathered rows, K/V blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def item_of(items_ptr, item, first_batch, first_list, kv_heads, num_blocks):
    """An item's range of entries, and its list's batch row, KV head and block."""
    key = tl.load(items_ptr + item * 3)
    start = tl.load(items_ptr + item * 3 + 1)
    stop = tl.load(items_ptr + item * 3 + 2)
    local = key - first_list
    batch_head = local // num_blocks
    batch = first_batch + batch_head // kv_heads
    return start, stop, batch, batch_head % kv_heads, local % num_blocks


@triton.jit
def load_rows(base_ptr, row, WIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows of a dense (rows, WIDTH) matrix, all of them real; columns past WIDTH are 0.

    WIDE computes offsets in 64 bits, which costs registers.
    """
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (row * WIDTH)[:, None] + column[None, :]
    if WIDTH == COLUMNS:
        tile = tl.load(pointer)
    else:
        tile = tl.load(pointer, mask=(column < WIDTH)[None, :], other=0.0)
    return tile


@triton.jit
def load_some_rows(
    base_ptr, row, row_ok, WIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """`load_rows`, with 0 for the rows that are not there."""
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (row * WIDTH)[:, None] + column[None, :]
    mask = row_ok[:, None]
    if WIDTH != COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def store_rows(
    base_ptr, row, tile, row_ok, WIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr
):
    """Inverse of `load_some_rows`."""
    if WIDE:
        row = row.to(tl.int64)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (row * WIDTH)[:, None] + column[None, :]
    mask = row_ok[:, None]
    if WIDTH != COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(pointer, tile.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_block(
    base_ptr,
    stride,
    block,
    num_keys,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keys or values of one block (BLOCK_SIZE, COLUMNS); 0 past the last key."""
    position = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (position.to(tl.int64) * stride)[:, None] + column[None, :]
    mask = (position < num_keys)[:, None]
    if WIDTH != COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(pointer, mask=mask, other=0.0)


@triton.jit
def row_lse_log2(lse_ptr, line, row_ok):
    """Base-2 log-sum-exp of rows, +inf for those not there or without keys: no probability."""
    lse = tl.load(lse_ptr + line, mask=row_ok, other=float("-inf"))
    LOG2E_: tl.constexpr = 1.4426950408889634
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E_)
