"""Block unions: neighbouring queries whose top-k blocks overlap, computed together.

A query tile is what the combine kernel works on: the query heads of a few neighbouring queries,
`tile_rows` rows. Where its queries selected nearly the same blocks, attending the union of their
blocks once, with the rows masked that did not select a block, is less work than a partial output
for every block of every query. The device decides tile by tile, so that the host never waits. The
entries of a tile that has a union are last in their CSR rows, where the forward skips them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_QUERIES, all_have_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv, store_zeros, tile_width, width_of
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.tiles import row_offset, split_blocks

# Tiles of so few queries at most sort their blocks. Longer ones search one block after the other,
# which takes no longer than the union is, if a first test finds their queries alike.
SORTED_TOKENS = 4
ZEROS = tl.constexpr(128)  # numbers that one CTA sets to zero at a time
OTHERS = tl.constexpr(-2)  # size of the union of a tile of short queries: `short/` has them


class BlockUnions(NamedTuple):
    """Union of every tile's top-k blocks, int32; tiles are (B * Hkv, span / combine_tokens)."""

    # (tiles,): blocks in the union, -1 where the tile goes by the index, or OTHERS
    sizes: Tensor
    blocks: Tensor  # (tiles, capacity): ascending
    masks: (
        Tensor  # (tiles, capacity, words): bit t % 32 of word t // 32: token t selected the block
    )


@triton.jit
def alike(
    blocks_ptr, first, last,
    NUM_SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, NUM_INITIAL_LOCAL: tl.constexpr,
):  # fmt: skip
    """Whether two queries share a quarter of their blocks, initial and local ones apart.

    A cheap test before the union of a tile is made: where queries of its middle and its end
    differ more, it is long.
    """
    column = tl.arange(0, PADDED_SLOTS)
    mask = column < NUM_SLOTS
    one = tl.load(blocks_ptr + first * NUM_SLOTS + column, mask=mask, other=-1)  # [PADDED_SLOTS]
    other = tl.load(blocks_ptr + last * NUM_SLOTS + column, mask=mask, other=-1)  # [PADDED_SLOTS]
    same = (one[:, None] == other[None, :]) & (other >= 0)[None, :]  # [slots, slots]
    shared = tl.sum(tl.sum(same.to(tl.int32), 1), 0)
    count = tl.sum((other >= 0).to(tl.int32), 0)
    return 4 * shared >= count + 3 * tl.minimum(count, NUM_INITIAL_LOCAL)


@triton.jit
def sorted_union(
    block, token, step, budget, union_ptr, masks_ptr,
    BLOCK_TOKENS: tl.constexpr, PADDED_SLOTS: tl.constexpr,
):  # fmt: skip
    """Writes the union of some queries' blocks, of which -1 is none, by a sort; returns its size.

    That is -1 if so many steps exceed the budget. Masks, of one word each, must be zeros.
    """
    NOTHING: tl.constexpr = 0x7FFFFFFF
    SIZE: tl.constexpr = BLOCK_TOKENS * PADDED_SLOTS
    sort_key = tl.where(block >= 0, block * BLOCK_TOKENS + token[:, None], NOTHING)
    sort_key = tl.sort(tl.reshape(sort_key, [SIZE]))  # [BLOCK_TOKENS * PADDED_SLOTS]
    index = tl.arange(0, SIZE)
    before = tl.gather(sort_key, tl.maximum(index - 1, 0), 0)
    some = sort_key != NOTHING
    first = some & ((index == 0) | (sort_key // BLOCK_TOKENS != before // BLOCK_TOKENS))
    size = tl.sum(first.to(tl.int32), 0)
    if size * step <= budget:
        rank = tl.cumsum(first.to(tl.int32), 0) - 1
        tl.store(union_ptr + rank, sort_key // BLOCK_TOKENS, mask=first)
        tl.atomic_or(masks_ptr + rank, 1 << (sort_key % BLOCK_TOKENS), mask=some, sem="relaxed")
    else:
        size = -1
    return size


@triton.jit
def distances_from(start, block):
    """How far the nearest of each row of blocks is ahead of `start`; the least, signed, of all.

    As unsigned numbers, distances to blocks behind, or to none (-1), exceed any ahead.
    """
    distance = tl.min((block - start).to(tl.uint32, bitcast=True), 1)  # [BLOCK_TOKENS * slots / 4]
    return distance, tl.min(distance).to(tl.int32, bitcast=True)


@triton.jit
def searched_union(
    block, step, budget, union_ptr, masks_ptr,
    BLOCK_TOKENS: tl.constexpr, PADDED_SLOTS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """`sorted_union`, found block by block, the least first; masks may hold anything."""
    FOURS: tl.constexpr = BLOCK_TOKENS * PADDED_SLOTS // 4  # of a query, which one thread holds
    block = tl.reshape(block, [FOURS, 4])
    bit = 1 << (tl.arange(0, FOURS) // (PADDED_SLOTS // 4) % 32)
    size = 0
    current = 0
    distance, least = distances_from(current, block)
    while (least >= 0) & ((size + 1) * step <= budget):
        current += least
        word = tl.where(distance == least, bit, 0)
        word = tl.reduce_or(tl.reshape(word, [WORDS, FOURS // WORDS]), 1)  # [WORDS]
        tl.store(union_ptr + size, current)
        tl.store(masks_ptr + size * WORDS + tl.arange(0, WORDS), word)
        size += 1
        current += 1
        distance, least = distances_from(current, block)
    return tl.where(least < 0, size, -1)


@recordable
@triton.jit(do_not_specialize=["num_queries", "query_offset", "base", "num_counters"])
def block_union_kernel(
    blocks_ptr, offsets_ptr, sizes_ptr, union_ptr, masks_ptr, counts_ptr,
    num_queries, query_offset, base, num_counters, kinds_ptr, kv_heads,
    NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, CAPACITY: tl.constexpr, WORDS: tl.constexpr, LIMIT: tl.constexpr,
    SORTED: tl.constexpr,
):  # fmt: skip
    """The union of a tile's blocks, if attending it is worth it.

    That is where it has, initial and local blocks apart, at most LIMIT / 4 blocks for each top-k
    block of a query; with LIMIT 0 it never is. Besides, the zeros that the inverted index counts
    from. With `kinds_ptr`, tiles of short queries alone have none.
    """
    PADDED_SLOTS: tl.constexpr = width_of(NUM_SLOTS)
    batch_head = tl.program_id(1)
    if counts_ptr is not None:
        store_zeros(counts_ptr, tl.where(batch_head == 0, num_counters, 0), ZEROS)
    query_offset, base = row_offset(offsets_ptr, batch_head, query_offset, base, BLOCK_SIZE)
    tile = batch_head * tl.num_programs(0) + tl.program_id(0)
    token = tl.arange(0, BLOCK_TOKENS)
    position = base + tl.program_id(0) * BLOCK_TOKENS + token
    query = position - query_offset
    row_mask = (query >= 0) & (query < num_queries)  # [BLOCK_TOKENS]
    row = batch_head * num_queries + query
    if kinds_ptr is not None:
        b = batch_head // kv_heads
        if all_have_kind(kinds_ptr, b, query, num_queries, SHORT_QUERIES, BLOCK_SIZE):
            tl.store(sizes_ptr + tile, OTHERS)
            return
    worth = LIMIT > 0
    if worth and not SORTED:
        start = base + tl.program_id(0) * BLOCK_TOKENS - query_offset
        # A tile at either end may lie wholly outside the queries.
        final = num_queries - 1
        middle = start + BLOCK_TOKENS // 2
        one = batch_head * num_queries + tl.minimum(tl.maximum(middle, 0), final)
        other = batch_head * num_queries + tl.minimum(
            tl.maximum(start + BLOCK_TOKENS - 1, 0), final
        )
        worth = alike(blocks_ptr, one, other, NUM_SLOTS, PADDED_SLOTS, INITIAL + LOCAL)
    size = -1
    if worth:
        block, is_topk, _, _ = split_blocks(
            blocks_ptr,
            row,
            row_mask,
            position,
            NUM_SLOTS,
            PADDED_SLOTS,
            BLOCK_SIZE,
            INITIAL,
            LOCAL,
        )
        block = tl.where(block < (position // BLOCK_SIZE)[:, None], block, -1)
        step = 4 * tl.sum(row_mask.to(tl.int32), 0)  # what a block costs, and what all may
        budget = LIMIT * tl.sum(tl.sum(is_topk.to(tl.int32), 1), 0) + (INITIAL + LOCAL - 1) * step
        union_ptr += tile.to(tl.int64) * CAPACITY
        masks_ptr += tile.to(tl.int64) * CAPACITY * WORDS
        if SORTED:
            size = sorted_union(
                block, token, step, budget, union_ptr, masks_ptr, BLOCK_TOKENS, PADDED_SLOTS
            )
        else:
            size = searched_union(
                block, step, budget, union_ptr, masks_ptr, BLOCK_TOKENS, PADDED_SLOTS, WORDS
            )
    tl.store(sizes_ptr + tile, size)


def build_block_unions(
    plan: SelectedPlan,
    blocks: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    kinds: Tensor | None = None,
) -> BlockUnions:
    """Unions of all tiles of `blocks` (B, Hkv, Sq, n), int32, contiguous.

    offsets: int32 (B, Hkv), of a plan with `offset_tensor`. counts: contiguous, set to 0.
    kinds: of `block_kinds`, without offsets: tiles of short queries get none.
    """
    tiles, words = plan.span // plan.combine_tokens, cdiv(plan.combine_tokens, 32)
    number = tiles * plan.batch * plan.kv_heads

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=blocks.device)

    # The combine kernel asks for tiles past the end of a row's last query chunk as well.
    past = (plan.chunks_per_head * plan.chunk_tokens - plan.span) // plan.combine_tokens
    unions = BlockUnions(
        new(number + past)[:number],
        new(number, plan.union_capacity),
        new(number, plan.union_capacity, words),
    )
    by_sort = plan.combine_tokens <= SORTED_TOKENS
    if by_sort:
        unions.masks.zero_()
    block_union_kernel[(tiles, plan.batch * plan.kv_heads)](
        blocks,
        offsets,
        *unions,
        counts,
        plan.num_queries,
        plan.query_offset,
        plan.base,
        0 if counts is None else counts.numel(),
        kinds,
        plan.kv_heads,
        **plan.index_constants(),
        BLOCK_TOKENS=plan.combine_tokens,
        CAPACITY=plan.union_capacity,
        WORDS=words,
        LIMIT=plan.union_limit,
        SORTED=by_sort,
        num_warps=max(1, min(4, plan.combine_tokens * tile_width(plan.num_slots) // 1024)),
    )
    return unions
