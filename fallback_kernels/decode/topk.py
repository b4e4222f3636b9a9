"""The choice of blocks of a decode step.

Programs share the blocks of a new token and KV head in chunks, and each writes the best of its
own. Where there are several chunks, those who read chosen blocks find the best of them all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode.tiles import (
    let_the_next_kernel_start,
    share_of_split,
    visible_blocks,
    wait_for_the_kernel_before,
)


@triton.jit
def log_sum_exp(
    top_ptr, total_ptr, num_parts, active,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, SPLIT_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp [MEMBERS] of the compressed branch of every head, from its splits."""
    head, split = tl.arange(0, MEMBERS)[:, None], tl.arange(0, SPLIT_COLUMNS)[None, :]
    there = (head < GROUP) & (split < active)
    top = tl.load(top_ptr + head * num_parts + split, mask=there, other=float("-inf"))
    total = tl.load(total_ptr + head * num_parts + split, mask=there, other=0.0)
    highest = tl.max(top, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    return highest + tl.log2(tl.sum(total * tl.exp2(top - highest[:, None]), 1))


@triton.jit
def block_scores(
    score_ptr, top_ptr, total_ptr, num_parts, active, first, last_free,
    GROUP: tl.constexpr, MEMBERS: tl.constexpr, HEADS: tl.constexpr, SPLIT_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Eq. 10 of blocks first ... last_free [CHUNK]; behind them anything.

    A row of memory is BLOCK_COLUMNS logarithms, then what each tile of BLOCKS lends to the next
    one. HEADS rows are read at once: one memory latency for them all.
    """
    WIDTH: tl.constexpr = BLOCK_COLUMNS + BLOCK_COLUMNS // BLOCKS
    place = tl.arange(0, CHUNK)
    block = first + place
    tile = first // BLOCKS + tl.arange(0, CHUNK // BLOCKS)
    # Whole tiles, so that whole vectors are read.
    wanted = block // BLOCKS * BLOCKS <= last_free
    borrows = (tile > 0) & (tile * BLOCKS <= last_free)
    score = tl.zeros((CHUNK,), tl.float32)
    borrowed = tl.zeros((CHUNK // BLOCKS,), tl.float32)
    members = tl.arange(0, MEMBERS)
    lse = tl.zeros((MEMBERS,), tl.float32)
    for first_head in tl.static_range(0, GROUP, HEADS):
        logs = ()
        lent = ()
        for i in tl.static_range(HEADS):
            row = score_ptr + (first_head + i) * WIDTH
            there = first_head + i < GROUP
            more = tl.load(row + block, mask=wanted & there, other=float("-inf"))
            logs = logs + (more,)  # type: ignore[assignment]  # noqa: RUF005
            more = tl.load(
                row + BLOCK_COLUMNS - 1 + tile, mask=borrows & there, other=float("-inf")
            )
            lent = lent + (more,)  # type: ignore[assignment]  # noqa: RUF005
        if first_head == 0:
            lse = log_sum_exp(top_ptr, total_ptr, num_parts, active, GROUP, MEMBERS, SPLIT_COLUMNS)
            lse = tl.gather(lse, members, 0)  # all of it in every warp: sums wait for no other
            lse = tl.where(members < GROUP, lse, 0.0)
        tl.debug_barrier()  # or the compiler puts each load where it is used, one after the other
        for i in tl.static_range(HEADS):
            own_lse = tl.sum(tl.where(members == first_head + i, lse, 0.0), 0)
            score += tl.exp2(logs[i] - own_lse)
            borrowed += tl.exp2(lent[i] - own_lse)
    if LEFT > 0:
        starts = place % BLOCKS == 0
        score += tl.where(starts, tl.gather(borrowed, place // BLOCKS, 0), 0.0)
    return score


@triton.jit
def count_greater(rank, COUNT: tl.constexpr):
    """How many of rank [COUNT], all different, are greater than each of them.

    By slices that the registers of a thread hold, gathered: the compiler would let each thread
    make them anew otherwise.
    """
    SLICE: tl.constexpr = min(COUNT, 32)
    greater = tl.zeros((COUNT,), tl.int32)
    for first in range(0, COUNT, SLICE):
        other = tl.gather(rank, first + tl.arange(0, SLICE), 0)
        greater += tl.sum((other[:, None] > rank[None, :]).to(tl.int32), 0)
    return greater


@triton.jit
def slots_used(
    position,
    SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr, FREE: tl.constexpr, INITIAL: tl.constexpr,
):  # fmt: skip
    """How many forced and how many free slots a query at `position` has a block for.

    With fewer blocks than slots, slot i has block i.
    """
    used = tl.minimum(position // SELECT + 1, NUM_SLOTS)
    free = tl.minimum(tl.maximum(used - INITIAL, 0), FREE)
    return used - free, free


@triton.jit
def best_of_chunks(
    candidate_ptr, wanted, CHUNKS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, FREE: tl.constexpr
):
    """The candidates that `wanted` and `wanted` + 1 others are greater than; 0 for none."""
    place = tl.arange(0, CHUNKS * SLOT_COLUMNS)
    there = place % SLOT_COLUMNS < FREE
    rank = tl.load(candidate_ptr + place, mask=there, other=0)
    # All different, those that are none too.
    rank = tl.where(there & (rank >= 0), rank, -1 - place)
    greater = count_greater(rank, CHUNKS * SLOT_COLUMNS)
    first = tl.sum(tl.where(greater == wanted, rank, 0), 0)
    return first, tl.sum(tl.where(greater == wanted + 1, rank, 0), 0)


@triton.jit(do_not_specialize=["num_splits", "num_parts"])
def choice_kernel(
    lengths_ptr, score_ptr, top_ptr, total_ptr, candidate_ptr, block_ptr, capacity, num_compressed,
    kv_heads, num_splits, num_parts,
    GROUP: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr, MEMBERS: tl.constexpr, HEADS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    COUNTED: tl.constexpr, KEYS: tl.constexpr, SLOT_COLUMNS: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Program (chunk, new token, KV head of a batch row): the best free blocks of its chunk.

    int64 candidates [SLOT_COLUMNS], best first: the score's bits, then the block counted from
    behind, so that ties go to the lower one; negative where there is none. Where all blocks fit
    nobody asks for them.
    """
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    BLOCKS: tl.constexpr = KEYS // (SELECT // STRIDE)
    let_the_next_kernel_start(EARLY and not LATE)
    chunk, token, pair = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = (pair * tl.num_programs(1) + token).to(tl.int64)
    position = tl.load(lengths_ptr + pair // kv_heads) + token
    own = position // SELECT
    wait_for_the_kernel_before(EARLY)
    let_the_next_kernel_start(EARLY and LATE)  # its window shall not take memory's time before
    if position >= capacity:
        return
    if own < NUM_SLOTS:
        slot = tl.arange(0, SLOT_COLUMNS)
        tl.store(block_ptr + unit * NUM_SLOTS + slot, -1, mask=(slot > own) & (slot < NUM_SLOTS))
        return
    if FREE == 0:
        return
    seen = tl.minimum(visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    _, active = share_of_split(seen, num_splits, KEYS)
    part = unit * (num_parts * GROUP)
    score_ptr += unit * (GROUP * (BLOCK_COLUMNS + BLOCK_COLUMNS // BLOCKS))
    score = block_scores(
        score_ptr, top_ptr + part, total_ptr + part, num_parts, active, chunk * CHUNK, own - LOCAL,
        GROUP, MEMBERS, HEADS, SPLIT_COLUMNS, BLOCK_COLUMNS, CHUNK, BLOCKS, LEFT,
    )  # fmt: skip
    score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
    block = chunk * CHUNK + tl.arange(0, CHUNK)
    free = (block >= INITIAL) & (block <= own - LOCAL)
    rank = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
    rank = tl.where(free, rank + (BLOCK_COLUMNS - 1 - block), -1 - block)
    candidate_ptr += (unit * tl.num_programs(0) + chunk) * SLOT_COLUMNS
    if CHUNK <= COUNTED:
        place = count_greater(rank, CHUNK)
        tl.store(candidate_ptr + place, rank, mask=place < SLOT_COLUMNS)
    else:
        for pick in range(FREE):
            best = tl.max(rank, 0)
            tl.store(candidate_ptr + pick, best)
            rank = tl.where(rank == best, -BLOCK_COLUMNS - 1, rank)
