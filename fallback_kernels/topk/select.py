"""The best blocks of each row of scores: initial, local, then the highest, ties to the lower.

A row is THREADS x DEPTH: a thread holds every THREADS-th vector of consecutive blocks, so that
neighbouring threads read neighbouring vectors of a row in memory order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.topk.select_few import VECTOR, by_halves, store_few

BAND = tl.constexpr(16)  # blocks that share a maximum, where the scores come with maxima
SHALLOW = tl.constexpr(8)  # rows with no more scores a thread are searched whole


@triton.jit
def block_of(thread, rest, THREADS: tl.constexpr):
    """Block that is number `rest` of thread `lane`."""
    return (rest // VECTOR * THREADS + thread) * VECTOR + rest % VECTOR


@triton.jit
def load_bits(score_ptr, lowest, highest, THREADS: tl.constexpr, DEPTH: tl.constexpr):
    """Scores as int32 [THREADS, DEPTH], -1 for vectors without a block of [lowest, highest].

    Scores are not negative, so that their bits have their order.
    """
    block = tl.arange(0, THREADS * DEPTH)
    vector = block // VECTOR * VECTOR  # one in VECTOR, so that the mask leaves vectors whole
    some = (vector + VECTOR > lowest) & (vector <= highest)
    score = tl.load(score_ptr + block, mask=some, other=-1.0)
    score = tl.trans(tl.reshape(score, (DEPTH // VECTOR, THREADS, VECTOR)), (1, 0, 2))
    return tl.reshape(score, (THREADS, DEPTH)).to(tl.int32, bitcast=True)


@triton.jit
def count(condition):
    """How many of [THREADS, DEPTH] are true."""
    return tl.sum(tl.sum(condition.to(tl.int32), 1), 0)


@triton.jit
def bisect(bits, low, high, reached, wanted, most):
    """Raises low while at least `wanted` of `bits` are >= low.

    `reached` of them are; fewer than wanted are >= high. Returns low, high and reached, once no
    more than `most` are reached or no number is left between low and high.
    """
    while (high - low > 1) & (reached > most):
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
def popcount(word):
    """Bits set in each uint32."""
    word = popcount_by_vector(word)
    return ((((word + (word >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def popcount_by_vector(word):
    """Bits set in each of the eight vectors of a uint32, four bits a count."""
    word -= (word >> 1) & 0x55555555
    return (word & 0x33333333) + ((word >> 2) & 0x33333333)


@triton.jit
def first_slots(word, DEPTH: tl.constexpr):
    """How many flags come before each vector of a thread: (even vectors, odd ones), a byte each.

    Vector v of every thread comes before vector v + 1 of any. At most 128 flags are set.
    """
    if DEPTH == VECTOR:
        ones = popcount(word).to(tl.uint32)
        before = tl.cumsum(ones, 0) - ones
        return before, before
    ones = popcount_by_vector(word)
    even, odd = ones & 0x0F0F0F0F, (ones >> 4) & 0x0F0F0F0F
    all_even, all_odd = tl.sum(even, 0), tl.sum(odd, 0)
    before = (all_even + all_odd) * 0x01010100  # a byte sums the bytes below it
    return (
        before + (tl.cumsum(even, 0) - even),
        before + all_even + (tl.cumsum(odd, 0) - odd),
    )


@triton.jit
def store_flagged(flags, out_ptr, band_ptr, THREADS: tl.constexpr, DEPTH: tl.constexpr):
    """Writes the blocks of all flags [THREADS, DEPTH] that are set, ascending.

    If band_ptr is not None, flags are of the blocks of the bands in it.
    """
    thread, rest = tl.arange(0, THREADS), tl.arange(0, DEPTH)
    # One word of flags a thread: only they are counted across threads, and taken apart.
    word = tl.sum(flags.to(tl.uint32) << rest.to(tl.uint32)[None, :], 1)  # [THREADS]
    even, odd = first_slots(word, DEPTH)
    left = word
    while tl.max(left, 0) > 0:
        lowest = (left & (0 - left)).to(tl.float32)  # a power of two: its exponent is the bit
        bit = ((lowest.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.uint32)
        if DEPTH == VECTOR:
            slot = even + popcount(word ^ left).to(tl.uint32)
        else:
            vector = bit // VECTOR
            slots = tl.where(vector % 2 == 0, even, odd) >> (vector // 2 * 8)
            taken = (word ^ left) >> (vector * VECTOR) & 0xF
            slot = (slots & 0xFF) + popcount(taken).to(tl.uint32)
        block = block_of(thread, bit.to(tl.int32), THREADS)
        if band_ptr is not None:
            band = tl.load(band_ptr + block // BAND, mask=left > 0, other=0.0).to(
                tl.int32
            )  # [SPACE / BAND]
            block = band * BAND + block % BAND
        tl.store(out_ptr + slot.to(tl.int32), block.to(out_ptr.dtype.element_ty), mask=left > 0)
        left &= left - 1


@triton.jit
def exactly(
    bits, low, high, reached, WANTED: tl.constexpr, MOST: tl.constexpr, THREADS: tl.constexpr
):
    """`bits` [THREADS, depth] and the bound that the WANTED highest reach, of equal ones the lower
    blocks: the others are -1 then. Up to MOST may reach it, if they are the highest.

    `reached` are >= low, no fewer than WANTED; fewer are >= high.
    """
    low, high, reached = bisect(bits, low, high, reached, WANTED, MOST)
    if reached > MOST:
        thread, rest = tl.arange(0, THREADS), tl.arange(0, bits.shape[1])
        block = block_of(thread[:, None], rest[None, :], THREADS)
        limit = tie_limit(bits, block, low, WANTED)
        bits = tl.where((bits == low) & (block > limit), -1, bits)
    return bits, low


@triton.jit
def store_best(
    bits,
    score_ptr,
    block_ptr,
    WANTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    THREADS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Writes the blocks of the WANTED highest of `bits`, ascending; more than that are >= 0.

    In a deep row a bound that a few more reach comes from the maxima of parts; those few, at most
    CANDIDATES, go to the scratch behind the row and come back one a thread.
    """
    PARTS: tl.constexpr = 1 if 2 * WANTED <= THREADS else 4
    parts = tl.max(tl.reshape(bits, (THREADS, PARTS, DEPTH // PARTS)), 2)  # [THREADS, PARTS]
    of_threads = tl.max(parts, 1)  # [threads]
    highest = tl.max(of_threads, 0) + 1
    low = highest * 0
    if THREADS >= WANTED:  # as many scores reach the least of the threads' maxima
        low = tl.maximum(low, tl.min(of_threads, 0))
    many = low * 0 + (WANTED + 1)
    if DEPTH <= SHALLOW:
        bits, low = exactly(bits, low, highest, many, WANTED, WANTED, THREADS)
        store_flagged(bits >= low, block_ptr, None, THREADS, DEPTH)
        return

    low, high, reached = bisect(parts, low, highest, many, WANTED, WANTED)
    reached = count(bits >= low)
    if reached > CANDIDATES:
        bits, low = exactly(bits, low, highest, reached, WANTED, WANTED, THREADS)
        reached = low * 0 + WANTED
    scratch_ptr = score_ptr + THREADS * DEPTH
    store_flagged(bits >= low, scratch_ptr, None, THREADS, DEPTH)
    tl.debug_barrier()
    slot = tl.arange(0, CANDIDATES)
    block = tl.load(scratch_ptr + slot, mask=slot < reached, other=0.0).to(tl.int32)
    value = tl.load(score_ptr + block, mask=slot < reached, other=-1.0)  # [CANDIDATES]
    value = value.to(tl.int32, bitcast=True)
    high = tl.where(count((value >= high)[:, None]) < WANTED, high, highest)
    low, high, reached = bisect(value[:, None], low, high, reached, WANTED, WANTED)
    # Blocks ascend with the slots: of equal scores the first ones stay.
    above, equal = (value > low).to(tl.int32), (value == low).to(tl.int32)
    spare = WANTED - tl.sum(above, 0)
    own = above + (equal << 16)
    before = tl.cumsum(own, 0) - own
    equal_before = before >> 16
    kept = (above > 0) | ((equal > 0) & (equal_before < spare))
    slot = (before & 0xFFFF) + tl.minimum(equal_before, spare)
    tl.store(block_ptr + slot, block, mask=kept)


@triton.jit
def store_best_of_bands(
    score_ptr,
    block_ptr,
    lowest,
    highest,
    WANTED: tl.constexpr,
    CANDIDATES: tl.constexpr,
    THREADS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`store_best` of a row whose bands' maxima lie behind its scratch.

    Of the bands, too, only the WANTED highest can hold a block that is taken: any other has WANTED
    better ones before it.
    """
    BANDS: tl.constexpr = THREADS * DEPTH // BAND
    BAND_THREADS: tl.constexpr = min(THREADS, BANDS // VECTOR)
    BAND_DEPTH: tl.constexpr = BANDS // BAND_THREADS
    SPACE: tl.constexpr = CANDIDATES // 2 * BAND  # blocks of as many bands as are wanted, or more
    scratch_ptr = score_ptr + THREADS * DEPTH
    maxima_ptr = scratch_ptr + CANDIDATES
    maxima = load_bits(maxima_ptr, lowest // BAND, highest // BAND, BAND_THREADS, BAND_DEPTH)
    thread, rest = tl.arange(0, BAND_THREADS), tl.arange(0, BAND_DEPTH)
    written = block_of(thread[:, None], rest[None, :], BAND_THREADS) <= highest // BAND
    maxima = tl.where(written, maxima, -1)
    of_threads = tl.max(maxima, 1)  # [threads]
    high = tl.max(of_threads, 0) + 1
    low = high * 0 - 1
    if BAND_THREADS >= WANTED:
        low = tl.maximum(low, tl.min(of_threads, 0))
    many = high * 0 + THREADS * DEPTH
    maxima, low = exactly(maxima, low, high, many, WANTED, SPACE // BAND, BAND_THREADS)
    taken = maxima >= tl.maximum(low, 0)
    num_bands = count(taken)
    store_flagged(taken, scratch_ptr, None, BAND_THREADS, BAND_DEPTH)
    tl.debug_barrier()
    slot = tl.arange(0, SPACE // BAND)
    band = tl.load(scratch_ptr + slot, mask=slot < num_bands, other=0.0).to(
        tl.int32
    )  # [SPACE / BAND]
    block = band[:, None] * BAND + tl.arange(0, BAND)[None, :]
    vector = block // VECTOR * VECTOR
    some = (slot < num_bands)[:, None] & (vector + VECTOR > lowest) & (vector <= highest)
    score = tl.reshape(tl.load(score_ptr + block, mask=some, other=-1.0), (SPACE,))
    score = tl.trans(tl.reshape(score, (SPACE // THREADS // VECTOR, THREADS, VECTOR)), (1, 0, 2))
    bits = tl.reshape(score, (THREADS, SPACE // THREADS)).to(tl.int32, bitcast=True)
    bits, low = exactly(bits, low, high, count(bits >= low), WANTED, WANTED, THREADS)
    store_flagged(bits >= low, block_ptr, scratch_ptr, THREADS, SPACE // THREADS)


@triton.jit
def select_of_query(
    score_ptr,
    block_ptr,
    position_ptr,
    start_ptr,
    query,
    pitch,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    PADDED_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    CANDIDATES: tl.constexpr,
    THREADS: tl.constexpr,
    DEPTH: tl.constexpr,
    BANDED: tl.constexpr,
    FEW: tl.constexpr,
    SCORED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Writes the blocks of `query`, int64, of a KV head; pointers are to what query 0 has."""
    TOPK: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    score_ptr += query * pitch
    if FEW and BANDED and TOPK > 0:
        # Before it is known whether anybody wrote them: both loads wait for memory at once.
        band = tl.arange(0, THREADS * DEPTH // BAND)
        maxima = tl.load(score_ptr + THREADS * DEPTH + CANDIDATES + band)  # [bands]
    own = tl.load(position_ptr + query).to(tl.int32) // SELECT
    first = own * 0
    if DOCUMENTS:
        first = tl.load(start_ptr + query).to(tl.int32) // SELECT
    block_ptr += query * NUM_SLOTS
    slot = tl.arange(0, PADDED_SLOTS)
    if own - first < SCORED:  # nobody wrote scores: all candidates fit, or another kernel chooses
        if SCORED == NUM_SLOTS:
            block = tl.where(slot <= own - first, first + slot, -1)
            tl.store(block_ptr + slot, block, mask=slot < NUM_SLOTS)
    else:
        block = tl.where(slot < INITIAL, first + slot, own - (NUM_SLOTS - 1 - slot))
        initial_local = (slot < INITIAL) | ((slot >= INITIAL + TOPK) & (slot < NUM_SLOTS))
        tl.store(block_ptr + slot, block, mask=initial_local)
        if TOPK > 0:
            block_ptr += INITIAL
            lowest, highest = first + INITIAL, own - LOCAL
            if BANDED:
                sure = False
                if FEW:
                    some = (band >= lowest // BAND) & (band <= highest // BAND)
                    bits = tl.where(some, maxima, -1.0).to(tl.int32, bitcast=True)
                    sure = store_few(
                        score_ptr,
                        bits,
                        band,
                        block_ptr,
                        lowest,
                        highest,
                        TOPK,
                        THREADS * DEPTH,
                        BAND,
                    )
                if not sure:
                    store_best_of_bands(
                        score_ptr, block_ptr, lowest, highest, TOPK, CANDIDATES, THREADS, DEPTH
                    )
            else:
                bits = load_bits(score_ptr, lowest, highest, THREADS, DEPTH)  # [THREADS, DEPTH]
                sure = False
                if FEW:
                    SPAN: tl.constexpr = 1 if DEPTH <= SHALLOW else VECTOR
                    SPANS: tl.constexpr = DEPTH // SPAN
                    thread, part = tl.arange(0, THREADS)[:, None], tl.arange(0, SPANS)[None, :]
                    maxima = tl.max(tl.reshape(bits, (THREADS, SPANS, SPAN)), 2)
                    number = block_of(thread, part * SPAN, THREADS) // SPAN
                    sure = store_few(
                        score_ptr, by_halves(maxima), by_halves(number), block_ptr, lowest,
                        highest, TOPK, THREADS * DEPTH, SPAN,
                    )  # fmt: skip
                if not sure:
                    store_best(bits, score_ptr, block_ptr, TOPK, CANDIDATES, THREADS, DEPTH)


@recordable
@triton.jit(do_not_specialize=["first_query", "chunk_queries", "num_queries"])
def topk_select_kernel(
    score_ptr,
    block_ptr,
    position_ptr,
    start_ptr,
    position_stride_b,
    start_stride_b,
    first_query,
    chunk_queries,
    num_queries,
    pitch,
    QUERIES: tl.constexpr,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    CANDIDATES: tl.constexpr,
    THREADS: tl.constexpr,
    DEPTH: tl.constexpr,
    BANDED: tl.constexpr,
    FEW: tl.constexpr,
    SCORED: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """QUERIES queries of a KV head: top-k blocks lie between the initial and the local ones.

    Queries with less than SCORED blocks before their own, as most in packed rows may be, have no
    scores; SCORED above NUM_SLOTS says that `topk_span_kernel` writes their blocks.
    """
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    first_of_tile = tl.program_id(0).to(tl.int64) * QUERIES
    batch = tl.program_id(2).to(tl.int64)
    batch_head = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    position_ptr += batch * position_stride_b + first_query
    if DOCUMENTS:
        start_ptr += batch * start_stride_b + first_query
    score_ptr += batch_head * chunk_queries * pitch
    block_ptr += (batch_head * num_queries + first_query) * NUM_SLOTS
    if QUERIES == 1:
        select_of_query(
            score_ptr, block_ptr, position_ptr, start_ptr, first_of_tile, pitch,
            SELECT, NUM_SLOTS, PADDED_SLOTS, INITIAL, LOCAL, CANDIDATES, THREADS, DEPTH,
            BANDED, FEW, SCORED, DOCUMENTS,
        )  # fmt: skip
    else:
        query = first_of_tile + tl.arange(0, QUERIES)
        exists = query < chunk_queries  # [QUERIES]
        own = tl.load(position_ptr + query, mask=exists, other=0).to(tl.int32) // SELECT
        first = own * 0
        if DOCUMENTS:
            first = tl.load(start_ptr + query, mask=exists, other=0).to(tl.int32) // SELECT
        if tl.max(own - first, 0) < SCORED:
            if SCORED == NUM_SLOTS:
                slot = tl.arange(0, PADDED_SLOTS)[None, :]
                block = first[:, None] + slot  # [QUERIES, PADDED_SLOTS]
                block = tl.where(block <= own[:, None], block, -1)
                pointer = block_ptr + query[:, None] * NUM_SLOTS + slot
                tl.store(pointer, block, mask=exists[:, None] & (slot < NUM_SLOTS))
            return
        for i in tl.range(tl.minimum(chunk_queries - first_of_tile, QUERIES), num_stages=1):
            select_of_query(
                score_ptr, block_ptr, position_ptr, start_ptr, first_of_tile + i, pitch,
                SELECT, NUM_SLOTS, PADDED_SLOTS, INITIAL, LOCAL, CANDIDATES, THREADS, DEPTH,
                BANDED, FEW, SCORED, DOCUMENTS,
            )  # fmt: skip
