"""Device functions of range attention: rows of one head, and the keys that a tile sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_tile(
    base_ptr, row, stride, row_limit,
    MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[rows, BLOCK] of a (rows, DIM) matrix with contiguous columns; 0 past DIM and, MASKED, past
    `row_limit` rows.

    `row` is int64: a row may lie past 2**31 elements.
    """
    column = tl.arange(0, BLOCK)
    pointer = base_ptr + (row * stride)[:, None] + column[None, :]
    if MASKED:
        mask = (row < row_limit)[:, None]
        if DIM != BLOCK:
            mask = mask & (column < DIM)[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0)
    elif DIM != BLOCK:
        tile = tl.load(pointer, mask=(column < DIM)[None, :], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile  # [rows, BLOCK]


@triton.jit
def store_tile(base_ptr, row, stride, row_limit, tile, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Inverse of `load_tile`, MASKED."""
    column = tl.arange(0, BLOCK)
    pointer = base_ptr + (row * stride)[:, None] + column[None, :]
    mask = (row < row_limit)[:, None] & (column < DIM)[None, :]
    tl.store(pointer, tile.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_ranges(first_key_ptr, end_key_ptr, row, num_queries):
    """[BLOCK_M] each: the range of keys that a query sees; an empty one at 0 past the queries."""
    mask = row < num_queries
    first_key = tl.load(first_key_ptr + row, mask=mask, other=0)
    end_key = tl.load(end_key_ptr + row, mask=mask, other=0)
    return first_key, end_key


@triton.jit
def key_bounds(first_key, end_key, row_mask, BLOCK_N: tl.constexpr):
    """The keys that a tile of queries sees, as multiples of BLOCK_N.

    Returns:
        begin, full_begin, full_end, end: some row sees keys of [begin, end); all rows see all of
        [full_begin, full_end), which is empty where a row sees nothing.
    """
    sees = first_key < end_key  # [BLOCK_M]
    begin = tl.min(tl.where(sees, first_key, 2147483647), 0)
    end = tl.max(tl.where(sees, end_key, 0), 0)
    full_begin = tl.max(tl.where(row_mask, first_key, 0), 0)
    full_end = tl.min(tl.where(row_mask, end_key, 2147483647), 0)
    begin = tl.minimum(begin, end) // BLOCK_N * BLOCK_N
    end = (end + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_begin = (full_begin + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
    full_end = tl.minimum(tl.maximum(full_end // BLOCK_N * BLOCK_N, full_begin), end)
    return begin, full_begin, full_end, end
