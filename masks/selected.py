"""Branch 2: tokens of the chosen blocks, one choice per query and KV head.

The query heads of a group are folded into rows (row = query * rows_per_query + head of the group),
so that one Q block is one query and its KV blocks are just the chosen ones: every block before the
query's own is whole, the own one is cut at the query.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nsa_flex.config import NSAConfig
from nsa_flex.masks.block_mask import (
    BlockTables,
    MaskMod,
    as_table,
    build_block_mask,
    index_range,
)

NONE = torch.iinfo(torch.int32).max  # sorts behind every block


def visible_blocks(
    config: NSAConfig,
    blocks: Tensor,
    positions: Tensor,
    num_keys: int,
    document_start: Tensor | None = None,
) -> Tensor:
    """int32 (B, Hkv, Sq, n): those of the given blocks that a query sees, ascending, then -1.

    The form that the masks below and the kernels need, of integer blocks in any order. Left out
    are repeated blocks, negative ones, those after the query's own or the last key, and those that
    begin before the query's document.

    Args:
        config: gives `select_block_size`, l'.
        blocks: int32 or int64 (B, Hkv, Sq, n).
        positions: int (B or 1, Sq), key index of each query.
        num_keys: Sk.
        document_start: int (B, Sq), first key of each query's document.
    """
    first_key = blocks.long() * config.select_block_size
    seen = (blocks >= 0) & (blocks < config.num_select_blocks(num_keys))
    seen &= first_key <= positions[:, None, :, None]
    if document_start is not None:
        seen &= first_key >= document_start[:, None, :, None]
    ascending = torch.where(seen, blocks, NONE).to(torch.int32).sort(dim=-1).values
    first, rest = ascending[..., :1], ascending[..., 1:]
    rest = torch.where(rest == ascending[..., :-1], NONE, rest)
    once = torch.cat([first, rest], dim=-1).sort(dim=-1).values
    table = as_table(torch.where(once == NONE, -1, once))
    assert table is not None
    return table


def selected_mask_mod(
    config: NSAConfig, blocks: Tensor, rows_per_query: int = 1, *, offset: Tensor | None = None
) -> MaskMod:
    """Token `kv` is visible iff `kv <= t` and block `kv // l'` is among the query's chosen ones.

    Args:
        config: gives `select_block_size`, l'.
        blocks: int32 (B, Hkv, Sq, n), chosen block indices, -1 where there are fewer than n.
        rows_per_query: consecutive rows that belong to one query (the folded group of heads).
        offset: int (B,), key index of query 0; 0 when None.

    The head index of the mask_mod counts KV heads.
    """
    size = config.select_block_size
    query_of_row = None
    if blocks.device.type == "cpu" and rows_per_query > 1:
        # Inductor's C++ template cannot index by a quotient of its own row symbol: look it up.
        rows = index_range(blocks.shape[2] * rows_per_query, blocks.device)
        query_of_row = as_table(rows // rows_per_query)

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, kv: Tensor) -> Tensor:
        q = row // rows_per_query if query_of_row is None else query_of_row[row]
        t = q if offset is None else q + offset[b]
        mine = kv // size
        chosen = blocks[b, h, q, 0] == mine
        for slot in range(1, blocks.shape[-1]):
            chosen = chosen | (blocks[b, h, q, slot] == mine)
        return chosen & (kv <= t)

    return mask_mod


def selected_block_mask(
    config: NSAConfig,
    blocks: Tensor,
    kv_len: int,
    rows_per_query: int = 1,
    *,
    offset: Tensor | None = None,
    backward: bool = True,
) -> BlockMask:
    """The BlockMask of `selected_mask_mod`, from the chosen indices.

    Forward tables are the choice itself, O(S * n). The transposed tables of the backward are
    dense: two int32 tensors (B, Hkv, S / l', S), so FlexAttention training on long sequences is
    bounded by them (537 MB a KV head at 64k tokens and l' = 64).
    """
    num_queries, num_columns = blocks.shape[2], config.num_select_blocks(kv_len)
    if torch.compiler.is_compiling():
        num_columns = max(2, num_columns)  # for a size of one torch makes a graph of its own
    own = index_range(num_queries, blocks.device)[None]  # [1, Sq]
    if offset is not None:
        own = own + offset[:, None]
    own = own // config.select_block_size
    width = num_columns if blocks.device.type == "cpu" else blocks.shape[3]
    kv_tables = BlockTables(*query_tables(blocks, own, width))
    q_tables = BlockTables(*key_tables(blocks, own, num_columns)) if backward else None
    mask_mod = selected_mask_mod(config, blocks, rows_per_query, offset=as_table(offset))
    return build_block_mask(
        mask_mod,
        (num_queries * rows_per_query, kv_len),
        (rows_per_query, config.select_block_size),
        kv_tables,
        q_tables,
    )


# The tables are built inside custom ops: a table that a traced scatter fills reads as zeros in a
# mask captured by the same graph, and the sort of the transposed one gains nothing from fusion.


@torch.library.custom_op("nsa_flex::selected_query_tables", mutates_args=())
def query_tables(blocks: Tensor, own: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each query its partial block (the own one) and its full blocks (all other chosen).

    blocks int32 (B, Hkv, Sq, n) ascending, -1 at the end; own int (B or 1, Sq), block index of
    each query. Returns counts int32 (B, Hkv, Sq) and indices int32 (B, Hkv, Sq, width): partial
    counts, partial indices, full counts, full indices.
    """
    is_own = blocks == own[:, None, :, None]
    num_full = ((blocks >= 0) & ~is_own).sum(-1, dtype=torch.int32)
    num_partial = is_own.sum(-1, dtype=torch.int32)
    own_block = own[:, None].expand(blocks.shape[:3]).to(torch.int32)
    shape = (*blocks.shape[:3], width)
    full = torch.zeros(shape, dtype=torch.int32, device=blocks.device)
    listed = min(width, blocks.shape[3])
    full[..., :listed] = blocks[..., :listed].clamp(min=0)
    return num_partial, own_block[..., None].expand(shape).contiguous(), num_full, full


@query_tables.register_fake
def _(blocks: Tensor, own: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = blocks.new_empty(blocks.shape[:3], dtype=torch.int32)
    index = blocks.new_empty((*blocks.shape[:3], width), dtype=torch.int32)
    return count, index, torch.empty_like(count), torch.empty_like(index)


@torch.library.custom_op("nsa_flex::selected_key_tables", mutates_args=())
def key_tables(
    blocks: Tensor, own: Tensor, num_columns: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The transposed tables: for each key block the queries that chose it, in rising order.

    Arguments as in `query_tables`. Returns counts int32 (B, Hkv, num_columns) and indices int32
    (B, Hkv, num_columns, Sq): of queries inside the block, then of later queries.
    """
    is_own = blocks == own[:, None, :, None]
    later = (blocks >= 0) & ~is_own
    return (
        *_queries_of_blocks(torch.where(is_own, blocks, num_columns), num_columns),
        *_queries_of_blocks(torch.where(later, blocks, num_columns), num_columns),
    )


def _queries_of_blocks(keys: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Inverts (B, Hkv, Sq, n) block indices; entries equal to `num_columns` are left out."""
    num_queries, n = keys.shape[2:]
    flat = keys.flatten(2).long()  # [B, Hkv, Sq * n]
    by_block = flat.argsort(dim=-1, stable=True) // n
    counts = flat.new_zeros((*flat.shape[:2], num_columns + 1))
    counts = counts.scatter_add_(-1, flat, torch.ones_like(flat))[..., :num_columns]
    slot = torch.arange(num_queries, device=keys.device)
    listed = slot < counts[..., None]
    place = (counts.cumsum(-1) - counts)[..., None] + slot  # [B, Hkv, columns, Sq]
    place = torch.where(listed, place, 0).flatten(2)
    indices = by_block.gather(-1, place).view(listed.shape)
    return counts.to(torch.int32), torch.where(listed, indices, 0).to(torch.int32)


@key_tables.register_fake
def _(blocks: Tensor, own: Tensor, num_columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    batch, heads, num_queries, _ = blocks.shape
    count = blocks.new_empty((batch, heads, num_columns), dtype=torch.int32)
    index = blocks.new_empty((batch, heads, num_columns, num_queries), dtype=torch.int32)
    return count, index, torch.empty_like(count), torch.empty_like(index)
