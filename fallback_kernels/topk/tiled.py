"""The best blocks of each row of scores by `tiled_top_k`: halves before and inside a query's tile.

A tile is as many blocks as a query selects, n, counted from its document's first. Before it lie at
least n, of which `select.store_best` takes n/2; inside fewer than n before the query's own, which
one comparison of each with each ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.topk.select import block_of, load_bits, store_best


@recordable
@triton.jit(do_not_specialize=["first_query", "chunk_queries", "num_queries"])
def topk_select_tiled_kernel(
    score_ptr, block_ptr, position_ptr, start_ptr, position_stride_b, start_stride_b,
    first_query, chunk_queries, num_queries, pitch,
    SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr, CANDIDATES: tl.constexpr, THREADS: tl.constexpr,
    DEPTH: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """One query of a KV head, whose own block is the one that is forced; pointers and rows as of
    `topk_select_kernel`.
    """
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    HALF: tl.constexpr = NUM_SLOTS // 2
    query, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    batch_head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    score_ptr += (batch_head * chunk_queries + query) * pitch
    block_ptr += (batch_head * num_queries + first_query + query) * NUM_SLOTS
    own = tl.load(position_ptr + batch * position_stride_b + first_query + query)
    own = own.to(tl.int32) // SELECT
    first = own * 0
    if DOCUMENTS:
        first = tl.load(start_ptr + batch * start_stride_b + first_query + query)
        first = first.to(tl.int32) // SELECT
    slot = tl.arange(0, PADDED_SLOTS)
    if own - first < NUM_SLOTS:  # the first tile, which nobody scored
        block = tl.where(slot <= own - first, first + slot, -1)
        tl.store(block_ptr + slot, block, mask=slot < NUM_SLOTS)
    else:
        tile = own - (own - first) % NUM_SLOTS
        bits = load_bits(score_ptr, first, tile - 1, THREADS, DEPTH)  # [THREADS, DEPTH]
        thread, rest = tl.arange(0, THREADS), tl.arange(0, DEPTH)
        block = block_of(thread[:, None], rest[None, :], THREADS)
        bits = tl.where((block >= first) & (block < tile), bits, -1)
        store_best(bits, score_ptr, block_ptr, HALF, CANDIDATES, THREADS, DEPTH)

        block = tile + slot  # [PADDED_SLOTS]
        score = tl.load(score_ptr + block, mask=block < own, other=-1.0)
        earlier = slot[:, None] < slot[None, :]
        better = (score[:, None] > score[None, :]) | ((score[:, None] == score[None, :]) & earlier)
        taken = (block < own) & (tl.sum(better.to(tl.int32), 0) < HALF - 1)
        place = HALF + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(block_ptr + place, block, mask=taken)
        count = HALF + tl.sum(taken.to(tl.int32), 0)
        block = tl.where(slot == count, own, -1)
        tl.store(block_ptr + slot, block, mask=(slot >= count) & (slot < NUM_SLOTS))
