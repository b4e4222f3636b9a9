"""Pieces that the selection kernels share: items, gathered rows, K/V blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def item_of(
    item,
    entries_start_ptr,
    item_starts_ptr,
    item_lists_ptr,
    first_batch,
    first_list,
    kv_heads,
    num_blocks,
    CHUNK: tl.constexpr,
):
    """List of an item, its range of entries, and the list's batch row, KV head and block."""
    key = tl.load(item_lists_ptr + item)
    start = tl.load(entries_start_ptr + key)
    start += (item - tl.load(item_starts_ptr + key)) * CHUNK
    stop = tl.minimum(start + CHUNK, tl.load(entries_start_ptr + key + 1))
    local = key - first_list
    block = local % num_blocks
    batch_head = local // num_blocks
    batch = first_batch + batch_head // kv_heads
    head = batch_head % kv_heads
    return start, stop, batch, head, block


@triton.jit
def widen(index, WIDE: tl.constexpr):
    """`index` as int64 where its product with a stride may pass 2**31; else it saves registers."""
    if WIDE:
        return index.to(tl.int64)
    return index


@triton.jit
def gather_rows(base_ptr, offset, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows at `offset` (elements), all of them real, as a tile; columns past WIDTH are 0."""
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + offset[:, None] + column[None, :]
    if WIDTH == COLUMNS:
        return tl.load(pointer)
    return tl.load(pointer, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def load_rows(base_ptr, offset, row_ok, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows at `offset` (elements) as a tile of COLUMNS columns; masked rows and columns are 0."""
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + offset[:, None] + column[None, :]
    if WIDTH == COLUMNS:
        return tl.load(pointer, mask=row_ok[:, None], other=0.0)
    return tl.load(pointer, mask=row_ok[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(base_ptr, offset, value, row_ok, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Inverse of `load_rows`."""
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + offset[:, None] + column[None, :]
    value = value.to(base_ptr.dtype.element_ty)
    if WIDTH == COLUMNS:
        tl.store(pointer, value, mask=row_ok[:, None])
    else:
        tl.store(pointer, value, mask=row_ok[:, None] & (column < WIDTH)[None, :])


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
    offset = position.to(tl.int64) * stride
    return load_rows(base_ptr, offset, position < num_keys, WIDTH, COLUMNS)
