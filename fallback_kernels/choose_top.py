"""The best blocks of each row of scores: forced ones, then the highest, ties to the lower index."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_query", "num_queries", "chunk_queries", "kv_heads"])
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
    DOCUMENTS: tl.constexpr,
):
    """One row: bisects the bits of the scores for the last one that has a slot.

    Scores are not negative, so that their bits as int32 have their order. -1 is no candidate.
    """
    place = tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    token = first_query + place
    own = tl.load(position_ptr + batch * position_stride_b + token).to(tl.int32) // SELECT
    first = 0
    if DOCUMENTS:
        first = tl.load(start_ptr + batch * start_stride_b + token).to(tl.int32) // SELECT
    block = tl.arange(0, COLUMNS)
    forced = (block < first + INITIAL) | (block > own - LOCAL)
    forced = forced & (block >= first) & (block <= own)
    free = (block >= first + INITIAL) & (block <= own - LOCAL)
    # Where all candidates fit, scores were not written, and any will do.
    crowded = own - first >= NUM_SLOTS
    row = (tl.program_id(1) * chunk_queries + place).to(tl.int64)
    last_written = tl.where(crowded, tl.minimum(own - LOCAL, width - 1), -1)
    score = tl.load(
        score_ptr + row * width + block, mask=free & (block <= last_written), other=0.0
    )
    score = tl.where(score > 0, score, 0.0)  # NaN and -0.0 too
    bits = tl.where(free, score.to(tl.int32, bitcast=True), -1)
    wanted = NUM_SLOTS - tl.sum(forced.to(tl.int32), 0)

    # At least `wanted` scores are >= low, fewer are >= high, but where none at all are wanted. Of
    # SLOT_COLUMNS parts each has a score >= the least of their maxima.
    high = tl.max(bits, 0) + 1
    low = 0
    if COLUMNS > SLOT_COLUMNS:
        parts = tl.max(tl.reshape(bits, (COLUMNS // SLOT_COLUMNS, SLOT_COLUMNS)), 0)
        low = tl.maximum(tl.min(parts, 0), 0)
    count = tl.where(crowded, NUM_SLOTS + 1, wanted)
    while (high - low > 1) & (count != wanted):
        middle = low + (high - low) // 2
        at_least = tl.sum((bits >= middle).to(tl.int32), 0)
        enough = at_least >= wanted
        count = tl.where(enough, at_least, count)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)

    taken = forced | (bits > low)
    tied = bits == low
    # One scan counts both: at most NUM_SLOTS <= 255 are taken.
    counts = taken.to(tl.int32) + (tied.to(tl.int32) << 8)
    total = tl.sum(counts, 0)
    ranks = tl.cumsum(counts, 0)
    spare = NUM_SLOTS - (total & 255)
    chosen = taken | (tied & (ranks >> 8 <= spare))
    slot = (ranks & 255) + tl.minimum(ranks >> 8, spare) - 1
    heads_row = tl.program_id(1).to(tl.int64) * num_queries + token
    block_ptr += heads_row * NUM_SLOTS
    tl.store(block_ptr + slot, block, mask=chosen)
    filled = (total & 255) + tl.minimum(total >> 8, spare)
    slots = tl.arange(0, SLOT_COLUMNS)
    empty = tl.full((SLOT_COLUMNS,), -1, tl.int32)
    tl.store(block_ptr + slots, empty, mask=(slots >= filled) & (slots < NUM_SLOTS))
