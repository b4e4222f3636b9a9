"""Branch 1: compressed blocks that lie wholly in a query's past, as a staircase and folded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nsa_flex.config import NSAConfig
from nsa_flex.masks.block_mask import (
    TILE,
    BlockRanges,
    MaskMod,
    as_table,
    build_block_mask,
    cdiv,
    num_tiles,
    offset_rows,
    table_width,
    tables_from_ranges,
    tile_rows,
    token_table,
)


def compressed_mask_mod(
    config: NSAConfig, *, offset: Tensor | None = None, document_start: Tensor | None = None
) -> MaskMod:
    """Compressed block `i` is visible to the query at `t` iff `i*d + l - 1 <= t`.

    With `document_start` (int (B, Sq)) the block must also start in the query's document;
    `offset` (int (B,)) is the key index of query row 0.

    >>> from nsa_flex.masks import materialize
    >>> mod = compressed_mask_mod(NSAConfig(4, 2, 4, 3))
    >>> materialize(mod, 1, 1, 6, 2)[0, 0].int().tolist()
    [[0, 0], [0, 0], [0, 0], [1, 0], [1, 0], [1, 1]]
    """
    stride, reach = config.compress_stride, config.compress_block_size - 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, block: Tensor) -> Tensor:
        t = q if offset is None else q + offset[b]
        visible = block * stride + reach <= t
        if document_start is not None:
            visible = visible & (block * stride >= document_start[b, q])
        return visible

    return mask_mod


def compressed_block_mask(
    config: NSAConfig,
    q_len: int,
    num_blocks: int,
    device: torch.device,
    *,
    offset: Tensor | None = None,
    document_start: Tensor | None = None,
    backward: bool = True,
) -> BlockMask:
    """The BlockMask of `compressed_mask_mod` over `num_blocks` compressed keys."""
    d, reach, off = config.compress_stride, config.compress_block_size - 1, offset_rows(offset)
    whole = document_start is None

    first = tile_rows(q_len, device) + off
    last = first + TILE - 1
    zero = torch.zeros_like(first)
    rows = BlockRanges(
        low=zero,
        high=(last - reach) // d // TILE,
        full_low=zero if whole else zero + 1,
        full_high=((first - reach) // d + 1) // TILE - 1 if whole else zero,
    )
    num_columns = num_tiles(num_blocks)
    kv_tables = tables_from_ranges(
        rows, num_columns, table_width(num_columns, num_columns, device)
    )
    q_tables = None
    if backward:
        key = tile_rows(num_blocks, device)
        num_rows = num_tiles(q_len)
        end = torch.full_like(key + off, num_rows - 1)
        columns = BlockRanges(
            low=(key * d + reach - off) // TILE,
            high=end,
            full_low=cdiv((key + TILE - 1) * d + reach - off, TILE) if whole else end + 1,
            full_high=end,
        )
        q_tables = tables_from_ranges(columns, num_rows, table_width(num_rows, num_rows, device))
    mask_mod = compressed_mask_mod(
        config, offset=as_table(offset), document_start=token_table(document_start, q_len)
    )
    return build_block_mask(mask_mod, (q_len, num_blocks), (TILE, TILE), kv_tables, q_tables)


def folded_mask_mod(
    config: NSAConfig, num_query_heads: int, *, document_start: Tensor | None = None
) -> MaskMod:
    """`compressed_mask_mod` after the fold: plain causal attention over rows `j >= i`.

    Row `j` of head `r * num_query_heads + h` is query `t = j*d + r + l - 1`, so that
    `i*d + l - 1 <= t` is `i <= j`. `document_start` stays indexed by token; it must reach as far
    as the last row, which may lie past the last token.
    """
    stride, reach = config.compress_stride, config.compress_block_size - 1

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, block: Tensor) -> Tensor:
        visible = block <= row
        if document_start is not None:
            t = row * stride + h // num_query_heads + reach
            visible = visible & (block * stride >= document_start[b, t])
        return visible

    return mask_mod


def folded_block_mask(
    config: NSAConfig,
    num_blocks: int,
    num_query_heads: int,
    device: torch.device,
    *,
    document_start: Tensor | None = None,
    backward: bool = True,
) -> BlockMask:
    """The BlockMask of `folded_mask_mod`: causal over `num_blocks` x `num_blocks`."""
    tile = tile_rows(num_blocks, device) // TILE
    zero = torch.zeros_like(tile)
    tiles = num_tiles(num_blocks)
    width = table_width(tiles, tiles, device)
    whole = document_start is None
    rows = BlockRanges(zero, tile, zero if whole else tile + 1, tile - 1)
    kv_tables = tables_from_ranges(rows, tiles, width)
    q_tables = None
    if backward:
        end = zero + tiles - 1
        columns = BlockRanges(tile, end, tile + 1 if whole else end + 1, end)
        q_tables = tables_from_ranges(columns, tiles, width)
    rows_end = cdiv(num_blocks, TILE) * TILE * config.compress_stride + config.compress_block_size
    starts = token_table(document_start, rows_end)
    mask_mod = folded_mask_mod(config, num_query_heads, document_start=starts)
    return build_block_mask(mask_mod, (num_blocks, num_blocks), (TILE, TILE), kv_tables, q_tables)
