"""The best blocks of each row of scores: forced ones, then the highest, the lower index first.

A row is LANES x DEPTH: a thread holds DEPTH blocks that follow one another. Memory holds them so
that neighbouring threads read neighbouring vectors; see `score_place`.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = tl.constexpr(4)  # scores one load instruction brings to a thread


@triton.jit
def score_place(block, depth, lanes):
    """Where the score of a block is, within a row of depth * lanes scores."""
    lane, rest = block // depth, block % depth
    return (rest // VECTOR * lanes + lane) * VECTOR + rest % VECTOR


@triton.jit
def load_bits(score_ptr, lowest, highest, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Scores as int32 [LANES, DEPTH], -1 for vectors without a block of [lowest, highest].

    Scores are not negative, so that their bits have their order.
    """
    place = tl.arange(0, LANES * DEPTH)
    vector = place // VECTOR  # one address in VECTOR, so that the mask leaves vectors whole
    block = vector % LANES * DEPTH + vector // LANES * VECTOR
    some = (block + VECTOR > lowest) & (block <= highest)
    score = tl.load(score_ptr + place, mask=some, other=-1.0)
    score = tl.trans(tl.reshape(score, (DEPTH // VECTOR, LANES, VECTOR)), (1, 0, 2))
    return tl.reshape(score, (LANES, DEPTH)).to(tl.int32, bitcast=True)


@triton.jit
def count(condition):
    """How many of [LANES, DEPTH] are true."""
    return tl.sum(tl.sum(condition.to(tl.int32), 1), 0)


@triton.jit
def bisect(bits, low, high, reached, wanted):
    """Raises low while at least `wanted` of `bits` are >= low.

    `reached` of them are; fewer than wanted are >= high. Returns low, high and reached, once
    reached == wanted or no number is left between low and high.
    """
    while (high - low > 1) & (reached != wanted):
        middle = low + (high - low) // 2
        above = count(bits >= middle)
        enough = above >= wanted
        reached = tl.where(enough, above, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low, high, reached


@triton.jit
def tie_limit(bits, block, low, wanted):
    """Last block that is taken of those whose bits are `low`, so that `wanted` are in all."""
    spare = wanted - count(bits > low)
    below = low * 0 - 1
    limit = below + bits.shape[0] * bits.shape[1]
    while limit - below > 1:
        middle = below + (limit - below) // 2
        enough = count((bits == low) & (block <= middle)) >= spare
        limit = tl.where(enough, middle, limit)
        below = tl.where(enough, below, middle)
    return limit


@triton.jit
def number_of_ones(word):
    """Bits set in each uint32."""
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def store_best(bits, block_ptr, WANTED: tl.constexpr, LANES: tl.constexpr, DEPTH: tl.constexpr):
    """Writes the blocks of the WANTED highest of `bits`, ascending; more than that are >= 0."""
    PARTS: tl.constexpr = 4
    lane, rest = tl.arange(0, LANES), tl.arange(0, DEPTH)
    # The WANTED best parts hold as many scores that reach the least of their maxima: a first
    # bound, and a close one, from few numbers.
    parts = tl.max(tl.reshape(bits, (LANES, PARTS, DEPTH // PARTS)), 2)
    highest = tl.max(tl.max(parts, 1), 0) + 1
    zero = highest * 0
    low, high, reached = bisect(parts, zero, highest, zero + (WANTED + 1), WANTED)
    reached = count(bits >= low)
    if reached != WANTED:
        high = tl.where(count(bits >= high) < WANTED, high, highest)
        low, high, reached = bisect(bits, low, high, reached, WANTED)
    if reached != WANTED:
        block = lane[:, None] * DEPTH + rest[None, :]
        limit = tie_limit(bits, block, low, WANTED)
        bits = tl.where((bits == low) & (block > limit), -1, bits)

    # One word of flags a thread: only they are counted across threads, and taken apart.
    word = tl.sum((bits >= low).to(tl.uint32) << rest.to(tl.uint32)[None, :], 1)
    ones = number_of_ones(word)
    slot = tl.cumsum(ones, 0) - ones
    while tl.max(word, 0) > 0:
        first = (word & (0 - word)).to(tl.float32)  # a power of two: its exponent is the place
        place = (first.to(tl.int32, bitcast=True) >> 23) - 127
        tl.store(block_ptr + slot, lane * DEPTH + place, mask=word > 0)
        word &= word - 1
        slot += 1


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
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
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
            score_ptr += row * (LANES * DEPTH)
            bits = load_bits(score_ptr, first + INITIAL, own - LOCAL, LANES, DEPTH)
            store_best(bits, block_ptr + INITIAL, FREE, LANES, DEPTH)
