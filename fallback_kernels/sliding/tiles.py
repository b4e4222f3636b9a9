"""Device functions of the sliding kernels: query tiles, key tiles, softmax stats.

A query tile is BLOCK_TOKENS consecutive tokens times HEADS query heads of one KV head, the heads
innermost. All its rows have nearly the same window, so that a window of w keys costs
w + BLOCK_TOKENS keys and not w + BLOCK_M.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.tiles import width_of


class HeadRows(NamedTuple):
    """The tokens of one head of a (B, H, S, D) tensor, inside a kernel: what `load_tile` reads."""

    desc: Any  # a tensor descriptor for TMA, or None to load by `ptr`
    ptr: Any
    b: Any
    h: Any
    strides: Any  # of batch, head and token
    num_tokens: Any


@triton.constexpr_function
def heads_of_tile(group, block_m):
    """HEADS: query heads of a KV head in one tile, all of them if there are rows enough."""
    return min(group, block_m)


@triton.constexpr_function
def edge_block_n(block_tokens, block_n):
    """Keys of the masked tiles at the left end of a window."""
    return min(block_n, 64, width_of(block_tokens))


@triton.jit
def query_tile_of_cta(
    num_tokens, kv_heads, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr
):
    """Batch row, KV head, first token and first head in group of this CTA's query tile.

    CTAs that share keys are neighbours: first the tiles of a group's heads, then tokens.
    """
    tiles_per_group: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token_tiles = (num_tokens + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    cta = tl.program_id(0)
    tile = cta // tiles_per_group
    batch_head = tile // token_tiles
    b, h = batch_head // kv_heads, batch_head % kv_heads
    return b, h, tile % token_tiles * BLOCK_TOKENS, cta % tiles_per_group * HEADS


@triton.jit
def query_rows(
    first, first_head, num_tokens,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Token and head in group of every row, and the mask of rows that exist: [BLOCK_M] each."""
    row = tl.arange(0, BLOCK_M)
    token = first + row // HEADS
    head_in_group = first_head + row % HEADS
    row_mask = (token < num_tokens) & (head_in_group < GROUP)
    if BLOCK_TOKENS * HEADS != BLOCK_M:
        row_mask = row_mask & (row < BLOCK_TOKENS * HEADS)
    return token, head_in_group, row_mask


@triton.jit
def row_offsets(token, head_in_group, stride_h, stride_s):
    """Element offsets of rows from the first head of their group, 64 bits: [BLOCK_M]."""
    return token.to(tl.int64) * stride_s + head_in_group.to(tl.int64) * stride_h


@triton.jit
def load_rows_at(ptr, offset, row_mask, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [BLOCK_M, BLOCK_D] that start at `offset` [BLOCK_M]; 0 in masked rows and past DIM."""
    column = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None]
    if DIM != BLOCK_D:
        mask = mask & (column < DIM)[None, :]
    return tl.load(ptr + offset[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows_at(ptr, offset, row_mask, tile, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Inverse of `load_rows_at`."""
    column = tl.arange(0, BLOCK_D)
    mask = row_mask[:, None]
    if DIM != BLOCK_D:
        mask = mask & (column < DIM)[None, :]
    tl.store(ptr + offset[:, None] + column[None, :], tile.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_tile(
    rows, first, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BY_POINTERS: tl.constexpr = False,
):  # fmt: skip
    """Tokens [first, first + BLOCK_N) of `HeadRows`: [BLOCK_N, BLOCK_D]; 0 outside of the head.

    BY_POINTERS: without the descriptor, whose tiles have another number of tokens.
    """
    return load_head_tile(rows, rows.h, first, BLOCK_N, DIM, BLOCK_D, BY_POINTERS)


@triton.jit
def load_head_tile(
    rows, head, first, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BY_POINTERS: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of any head. (A tuple made anew in here could not have None for its `desc`.)"""
    if rows.desc is not None and not BY_POINTERS:
        tile = rows.desc.load([rows.b, head, first, 0]).reshape(BLOCK_N, BLOCK_D)
    else:
        token = tl.arange(0, BLOCK_N)
        column = tl.arange(0, BLOCK_D)
        start = rows.b.to(tl.int64) * rows.strides[0] + head.to(tl.int64) * rows.strides[1]
        start += first.to(tl.int64) * rows.strides[2]
        mask = ((first + token >= 0) & (first + token < rows.num_tokens))[:, None]
        if DIM != BLOCK_D:
            mask = mask & (column < DIM)[None, :]
        offset = (token * rows.strides[2])[:, None] + column[None, :]  # [BLOCK_N, BLOCK_D]
        tile = tl.load(rows.ptr + start + offset, mask=mask, other=0.0)
    return tile


@triton.jit
def load_key_value(
    keys, values, first, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BY_POINTERS: tl.constexpr = False,
):  # fmt: skip
    """`load_tile` of the keys [first, first + BLOCK_N) and of their values."""
    k = load_tile(keys, first, BLOCK_N, HEAD_DIM, BLOCK_D, BY_POINTERS)  # [BLOCK_N, BLOCK_D]
    v = load_tile(values, first, BLOCK_N, VALUE_DIM, BLOCK_DV, BY_POINTERS)  # [BLOCK_N, BLOCK_DV]
    return k, v


@triton.jit
def is_visible(token, key, window, document_start):
    """Whether the queries at `token` see the keys at `key`: both broadcast.

    document_start: first key of each query's document, as `token`; None for one document.
    """
    visible = (key <= token) & (key > token - window)
    first_key = 0 if document_start is None else document_start
    return visible & (key >= first_key)


@triton.jit
def load_document_start(ptr, b, token, num_tokens):
    """First key of each query's document [BLOCK_M], and the lowest and the highest of them.

    Rows past the tokens have the highest.
    """
    mask = token < num_tokens
    start = tl.load(ptr + b.to(tl.int64) * num_tokens + token, mask=mask, other=0)
    highest = tl.max(start, 0)
    start = tl.where(mask, start, highest)
    return start, tl.min(start, 0), highest


@triton.jit
def load_stats(desc, ptr, b, h, stride_b, stride_h, first, num_tokens, BLOCK_M: tl.constexpr):
    """One softmax statistic per token [BLOCK_M], contiguous along the tokens; 0 past the last."""
    if desc is not None:
        stats = desc.load([b, h, first]).reshape(BLOCK_M)
    else:
        token = first + tl.arange(0, BLOCK_M)
        row = b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h
        stats = tl.load(ptr + row + token, mask=token < num_tokens, other=0.0)
    return stats
