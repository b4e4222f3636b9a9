"""Pieces that the sliding kernels share: places of programs, tiles of keys, rows of queries.

A tile of queries is TOKENS consecutive tokens times HEADS query heads of one KV head, the heads
innermost: all its rows look through nearly the same window, so that a window of w keys costs
w + TOKENS of them instead of w plus the rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class HeadRows(NamedTuple):
    """The tokens of one head of a (B, H, S, D) tensor, inside a kernel: what `load_tile` reads."""

    tiles: Any  # a tensor descriptor, or None to go by `ptr`
    ptr: Any
    b: Any
    h: Any
    stride_b: Any
    stride_h: Any
    stride_s: Any
    num_tokens: Any


@triton.jit
def place_of_queries(
    num_tokens, kv_heads, GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr
):
    """Batch row, KV head, first token and first head of the group of this program's queries.

    Programs that share keys are neighbours: parts of a group first, then tokens.
    """
    parts: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    tiles = (num_tokens + TOKENS - 1) // TOKENS
    program = tl.program_id(0)
    tile = program // parts
    head = tile // tiles
    return head // kv_heads, head % kv_heads, tile % tiles * TOKENS, program % parts * HEADS


@triton.jit
def rows_of_queries(
    first, first_member, num_tokens,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Token and member of the group of every row, and whether there is such a query."""
    row = tl.arange(0, ROWS)
    token = first + row // HEADS
    member = first_member + row % HEADS
    there = (token < num_tokens) & (member < GROUP)
    if TOKENS * HEADS != ROWS:
        there = there & (row < TOKENS * HEADS)
    return token, member, there


@triton.jit
def row_places(token, member, stride_h, stride_s):
    """Element offsets of rows from the first head of their group, 64 bits."""
    return token.to(tl.int64) * stride_s + member.to(tl.int64) * stride_h


@triton.jit
def load_rows(ptr, place, there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """(rows, COLUMNS) of rows that start at `place`; 0 where there is none and past WIDTH."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None]
    if WIDTH != COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(ptr + place[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, place, there, tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Inverse of `load_rows`."""
    column = tl.arange(0, COLUMNS)
    mask = there[:, None]
    if WIDTH != COLUMNS:
        mask = mask & (column < WIDTH)[None, :]
    tl.store(ptr + place[:, None] + column[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(
    rows, first, TOKENS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BY_ADDRESS: tl.constexpr = False,
):  # fmt: skip
    """Tokens [first, first + TOKENS) of `HeadRows`, (TOKENS, COLUMNS); 0 where there is none.

    BY_ADDRESS: without the descriptor, whose tiles have another number of tokens.
    """
    if rows.tiles is not None and not BY_ADDRESS:
        tile = rows.tiles.load([rows.b, rows.h, first, 0]).reshape(TOKENS, COLUMNS)
    else:
        token = tl.arange(0, TOKENS)
        column = tl.arange(0, COLUMNS)
        start = rows.b.to(tl.int64) * rows.stride_b + rows.h.to(tl.int64) * rows.stride_h
        start += first.to(tl.int64) * rows.stride_s
        mask = ((first + token >= 0) & (first + token < rows.num_tokens))[:, None]
        if WIDTH != COLUMNS:
            mask = mask & (column < WIDTH)[None, :]
        place = (token * rows.stride_s)[:, None] + column[None, :]
        tile = tl.load(rows.ptr + start + place, mask=mask, other=0.0)
    return tile


@triton.jit
def load_keys(
    keys, values, first, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr, BY_ADDRESS: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of the keys [first, first + KEYS) and of their values."""
    k = load_tile(keys, first, KEYS, HEAD_DIM, HEAD_COLUMNS, BY_ADDRESS)
    v = load_tile(values, first, KEYS, VALUE_DIM, VALUE_COLUMNS, BY_ADDRESS)
    return k, v


@triton.jit
def seen(token, key, window):
    """Whether the queries at `token` see the keys at `key`: both broadcast."""
    return (key <= token) & (key > token - window) & (key >= 0)


@triton.jit
def load_numbers(tiles, ptr, b, h, stride_b, stride_h, first, num_tokens, TOKENS: tl.constexpr):
    """One number a token (TOKENS,) from rows along the tokens; 0 past the last."""
    if tiles is not None:
        numbers = tiles.load([b, h, first]).reshape(TOKENS)
    else:
        token = first + tl.arange(0, TOKENS)
        row = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        numbers = tl.load(ptr + row + token, mask=token < num_tokens, other=0.0)
    return numbers
