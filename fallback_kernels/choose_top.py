"""The best blocks of each row of scores: forced ones, then the highest, the lower index first."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bisect(bits, low, high, wanted):
    """(low', count): the highest low' that at least `wanted` of `bits` reach, and how many do.

    Takes low and high, the one reached by at least `wanted`, the other by fewer. Stops early where
    exactly `wanted` reach low', else count is greater.
    """
    count = wanted + 1
    while (high - low > 1) & (count != wanted):
        middle = low + (high - low) // 2
        reached = tl.sum((bits >= middle).to(tl.int32), 0)
        enough = reached >= wanted
        count = tl.where(enough, reached, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, count


@triton.jit
def tie_limit(bits, block, low, wanted):
    """Last block that is taken of those whose bits are `low`, so that `wanted` are in all."""
    spare = wanted - tl.sum((bits > low).to(tl.int32), 0)
    below = tl.full((), -1, tl.int32)
    limit = below + bits.shape[0]
    while limit - below > 1:
        middle = below + (limit - below) // 2
        enough = tl.sum(((bits == low) & (block <= middle)).to(tl.int32), 0) >= spare
        limit = tl.where(enough, middle, limit)
        below = tl.where(enough, below, middle)
    return limit


@triton.jit
def store_best(
    score_ptr,
    block_ptr,
    lowest,
    highest,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    WANTED: tl.constexpr,
):
    """Writes the WANTED best of blocks [lowest, highest], ascending; there are more than that.

    Scores are not negative, so that their bits as int32 have their order.
    """
    block = tl.arange(0, COLUMNS)
    score = tl.load(score_ptr + block)
    inside = (block >= lowest) & (block <= highest)
    bits = tl.where(inside, score.to(tl.int32, bitcast=True), -1)
    # The WANTED best parts hold as many scores that reach the least of their maxima: a first
    # bound, and a close one, from few numbers.
    parts = tl.max(tl.reshape(bits, (COLUMNS // PARTS, PARTS)), 0)
    high = tl.max(parts, 0) + 1
    low = high * 0
    low, count = bisect(parts, low, high, WANTED)
    low, count = bisect(bits, low, high, WANTED)
    limit = tl.full((), COLUMNS, tl.int32)
    if count != WANTED:
        limit = tie_limit(bits, block, low, WANTED)
    chosen = (bits > low) | ((bits == low) & (block <= limit))
    slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(block_ptr + slot, block, mask=chosen)


@triton.jit(do_not_specialize=["first_query", "chunk_queries", "num_queries", "kv_heads"])
def top_kernel(
    score_ptr,
    block_ptr,
    position_ptr,
    start_ptr,
    position_stride_b,
    start_stride_b,
    first_query,
    chunk_queries,
    num_queries,
    kv_heads,
    width,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """One query and KV head: free choices lie between the initial and the local blocks."""
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    place = tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    token = first_query + place
    own = tl.load(position_ptr + batch * position_stride_b + token).to(tl.int32) // SELECT
    first = own * 0
    if DOCUMENTS:
        first = tl.load(start_ptr + batch * start_stride_b + token).to(tl.int32) // SELECT
    block_ptr += (tl.program_id(1).to(tl.int64) * num_queries + token) * NUM_SLOTS
    slot = tl.arange(0, SLOT_COLUMNS)
    if own - first < NUM_SLOTS:  # all candidates fit: nobody wrote scores
        block = tl.where(slot <= own - first, first + slot, -1)
        tl.store(block_ptr + slot, block, mask=slot < NUM_SLOTS)
    else:
        block = tl.where(slot < INITIAL, first + slot, own - (NUM_SLOTS - 1 - slot))
        forced = (slot < INITIAL) | ((slot >= INITIAL + FREE) & (slot < NUM_SLOTS))
        tl.store(block_ptr + slot, block, mask=forced)
        if FREE > 0:
            row = (tl.program_id(1) * chunk_queries + place).to(tl.int64)
            highest = tl.minimum(own - LOCAL, width - 1)
            store_best(
                score_ptr + row * width, block_ptr + INITIAL,
                first + INITIAL, highest, COLUMNS, PARTS, FREE,
            )  # fmt: skip
