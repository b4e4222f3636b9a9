"""Union tiles: neighbouring queries whose free choices overlap, computed together.

A tile is what the merge works on: the query heads of a few neighbouring queries, `tile_rows` rows.
Where its queries chose nearly the same blocks, walking the union of their choices once, with the
rows masked that did not choose a block, is less work than a partial result for every choice. The
device decides tile by tile, so that the host never waits; a tile that walks its union has its
entries at the end of the lists, where the forward's list kernel does not look.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.tiles import split_choices

# Tiles of so few queries at most sort their choices. Longer ones look for one block after the
# other, which takes no longer than the union does, if a first test finds their queries alike.
SORTED_TOKENS = 4


class UnionLists(NamedTuple):
    """The union of every tile's free choices, int32; tiles are (B * Hkv, span / merge_tokens)."""

    sizes: Tensor  # (tiles,): blocks in the union, -1 where the tile goes by lists
    blocks: Tensor  # (tiles, capacity): ascending
    masks: Tensor  # (tiles, capacity, words): bit t % 32 of word t // 32: token t chose the block


@triton.jit
def alike(
    blocks_ptr, first, last,
    NUM_SLOTS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, FORCED: tl.constexpr,
):  # fmt: skip
    """Whether two queries share a quarter of their choices, forced ones apart.

    A cheap test before the union of a tile is made: where queries of its middle and its end
    differ more, it is long.
    """
    column = tl.arange(0, SLOT_COLUMNS)
    ok = column < NUM_SLOTS
    one = tl.load(blocks_ptr + first * NUM_SLOTS + column, mask=ok, other=-1)
    other = tl.load(blocks_ptr + last * NUM_SLOTS + column, mask=ok, other=-1)
    same = (one[:, None] == other[None, :]) & (other >= 0)[None, :]
    shared = tl.sum(tl.sum(same.to(tl.int32), 1), 0)
    count = tl.sum((other >= 0).to(tl.int32), 0)
    return 4 * shared >= count + 3 * tl.minimum(count, FORCED)


@triton.jit
def sorted_union(
    block, token, step, budget, union_ptr, masks_ptr,
    TOKENS: tl.constexpr, SLOT_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the union of some queries' blocks, of which -1 is none, by a sort; returns its size.

    That is -1 if so many steps exceed the budget. Masks, of one word each, must be zeros.
    """
    NOTHING: tl.constexpr = 0x7FFFFFFF
    SIZE: tl.constexpr = TOKENS * SLOT_COLUMNS
    choice = tl.where(block >= 0, block * TOKENS + token[:, None], NOTHING)
    choice = tl.sort(tl.reshape(choice, [SIZE]))
    place = tl.arange(0, SIZE)
    before = tl.gather(choice, tl.maximum(place - 1, 0), 0)
    some = choice != NOTHING
    first = some & ((place == 0) | (choice // TOKENS != before // TOKENS))
    size = tl.sum(first.to(tl.int32), 0)
    if size * step <= budget:
        rank = tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(union_ptr + rank, choice // TOKENS, mask=first)
        tl.atomic_or(masks_ptr + rank, 1 << (choice % TOKENS), mask=some, sem="relaxed")
    else:
        size = -1
    return size


@triton.jit
def ways_from(start, block):
    """How far the nearest of each row of blocks is ahead of `start`; the least, signed, of all.

    Without signs, the way to a block behind, or to none (-1), is longer than any ahead.
    """
    way = tl.min((block - start).to(tl.uint32, bitcast=True), 1)
    return way, tl.min(way).to(tl.int32, bitcast=True)


@triton.jit
def searched_union(
    block, step, budget, union_ptr, masks_ptr,
    TOKENS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`sorted_union`, found block by block, the least first; masks may hold anything."""
    FOURS: tl.constexpr = TOKENS * SLOT_COLUMNS // 4  # of a query, which one thread holds
    block = tl.reshape(block, [FOURS, 4])
    bit = 1 << (tl.arange(0, FOURS) // (SLOT_COLUMNS // 4) % 32)
    size = 0
    found = 0
    way, least = ways_from(found, block)
    while (least >= 0) & ((size + 1) * step <= budget):
        found += least
        chosen = tl.where(way == least, bit, 0)
        chosen = tl.reduce_or(tl.reshape(chosen, [WORDS, FOURS // WORDS]), 1)
        tl.store(union_ptr + size, found)
        tl.store(masks_ptr + size * WORDS + tl.arange(0, WORDS), chosen)
        size += 1
        found += 1
        way, least = ways_from(found, block)
    return tl.where(least < 0, size, -1)


@triton.jit
def union_lists_kernel(
    blocks_ptr, sizes_ptr, union_ptr, masks_ptr, num_queries, query_offset, base,
    NUM_SLOTS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, TOKENS: tl.constexpr, CAPACITY: tl.constexpr,
    WORDS: tl.constexpr, LIMIT: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """The union of a tile, if it is worth a walk.

    That is where it has, forced blocks apart, at most LIMIT / 4 blocks per free choice of a query;
    with LIMIT 0 no union is.
    """
    batch_head = tl.program_id(1)
    tile = batch_head * tl.num_programs(0) + tl.program_id(0)
    token = tl.arange(0, TOKENS)
    position = base + tl.program_id(0) * TOKENS + token
    query = position - query_offset
    row_ok = (query >= 0) & (query < num_queries)
    row = batch_head * num_queries + query
    worth = LIMIT > 0
    if worth and not SORTED:
        start = base + tl.program_id(0) * TOKENS - query_offset
        # A tile at either end may lie wholly outside the queries.
        final = num_queries - 1
        middle = start + TOKENS // 2
        one = batch_head * num_queries + tl.minimum(tl.maximum(middle, 0), final)
        other = batch_head * num_queries + tl.minimum(tl.maximum(start + TOKENS - 1, 0), final)
        worth = alike(blocks_ptr, one, other, NUM_SLOTS, SLOT_COLUMNS, INITIAL + LOCAL)
    size = -1
    if worth:
        block, free, _, _ = split_choices(
            blocks_ptr, row, row_ok, position, NUM_SLOTS, SLOT_COLUMNS, BLOCK_SIZE, INITIAL, LOCAL
        )
        block = tl.where(block < (position // BLOCK_SIZE)[:, None], block, -1)
        step = 4 * tl.sum(row_ok.to(tl.int32), 0)  # what a block costs, and what all may
        budget = LIMIT * tl.sum(tl.sum(free.to(tl.int32), 1), 0) + (INITIAL + LOCAL - 1) * step
        union_ptr += tile.to(tl.int64) * CAPACITY
        masks_ptr += tile.to(tl.int64) * CAPACITY * WORDS
        if SORTED:
            size = sorted_union(
                block, token, step, budget, union_ptr, masks_ptr, TOKENS, SLOT_COLUMNS
            )
        else:
            size = searched_union(
                block, step, budget, union_ptr, masks_ptr, TOKENS, SLOT_COLUMNS, WORDS
            )
    tl.store(sizes_ptr + tile, size)


def build_unions(plan: SelectedPlan, blocks: Tensor) -> UnionLists:
    """Unions of all tiles of `blocks` (B, Hkv, Sq, n), int32, contiguous."""
    tiles, words = plan.span // plan.merge_tokens, -(-plan.merge_tokens // 32)
    number = tiles * plan.batch * plan.kv_heads

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=blocks.device)

    # The merges of a row's last window ask for tiles past its end as well.
    past = (plan.windows_per_head * plan.window_tokens - plan.span) // plan.merge_tokens
    unions = UnionLists(
        new(number + past)[:number],
        new(number, plan.union_capacity),
        new(number, plan.union_capacity, words),
    )
    by_sort = plan.merge_tokens <= SORTED_TOKENS
    if by_sort:
        unions.masks.zero_()
    union_lists_kernel[(tiles, plan.batch * plan.kv_heads)](
        blocks,
        *unions,
        plan.num_queries,
        plan.query_offset,
        plan.base,
        **plan.index_constants(),
        TOKENS=plan.merge_tokens,
        CAPACITY=plan.union_capacity,
        WORDS=words,
        LIMIT=plan.union_limit,
        SORTED=by_sort,
        num_warps=max(1, min(4, plan.merge_tokens * tile_width(plan.num_slots) // 1024)),
    )
    return unions
