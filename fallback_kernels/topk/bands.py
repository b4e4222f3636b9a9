"""The best blocks of rows where few are wanted, from the maxima of their bands.

Scores are not negative, so that their bits have their order. A bound moves from one score to the
next without marking any: less the bound, as unsigned numbers, all lower scores are above the
others, and the highest of them is the next lower one.

A row is held by 32 threads, as columns: tensors [32], of which a thread has one element each. Rows
do not wait for one another, so that a program of several has other work where one would wait.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.topk.select import BAND, store_best_of_bands
from nsa_flex.fallback_kernels.topk.select_few import VECTOR

SLOTS = tl.constexpr(16)  # bands whose scores are read
COUNT = tl.constexpr(16)  # where the number of flags lies
ONE = tl.constexpr(1 << 16)  # one flag there
ABOVE_ALL = tl.constexpr(2**31 - 1)

# Called where scores are equal: within the kernel it would cost every row registers.
store_searched = triton.jit(store_best_of_bands.fn, noinline=True)


@triton.jit
def columns_of(x):
    """A thread's one, two or four neighbours of `x`, as a column each."""
    DEPTH: tl.constexpr = x.numel // 32
    if DEPTH == 1:
        columns = (tl.reshape(x, (32,)),)
    elif DEPTH == 2:
        columns = tl.split(tl.reshape(x, (32, 2)))
    else:
        even, odd = tl.split(tl.reshape(x, (32, 2, 2)))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        columns = (a, b, c, d)  # type: ignore[assignment]
    return tl.tuple(()) + columns


@triton.jit
def distances(columns, bound):
    """How far the int32 `columns` are above the bound; of lower ones 2**32 less, thus more."""
    above = tl.tuple(())
    for i in tl.static_range(len(columns)):
        above += ((columns[i] - bound).to(tl.uint32, bitcast=True),)
    return above


@triton.jit
def farthest(columns):
    """The highest element of all columns."""
    most = columns[0]
    for i in tl.static_range(1, len(columns)):
        most = tl.maximum(most, columns[i])
    return tl.max(most, 0)


@triton.jit
def nearest(columns):
    """The lowest element of all columns."""
    least = columns[0]
    for i in tl.static_range(1, len(columns)):
        least = tl.minimum(least, columns[i])
    return tl.min(least, 0)


@triton.jit
def nth_highest(columns, N: tl.constexpr):
    """Number N of the different elements, the highest first: the same in all threads."""
    above = distances(columns, farthest(columns))
    for _ in tl.static_range(N - 1):
        above = distances(above, farthest(above))
    return columns[0] - above[0].to(tl.int32, bitcast=True)


@triton.jit
def without_lowest(columns, bound, times):
    """The bound above the `times` lowest different elements that reach `bound`."""
    raised = times * 0  # below 0 once no element is left
    while (times > 0) & (raised >= 0):
        step = nearest(distances(columns, bound + raised)) + 1
        raised += step.to(tl.int32, bitcast=True)
        times -= 1
    return bound + raised


@triton.jit
def flags_of(columns, bound):
    """Which of each thread reach the bound: a bit each, and their number from bit COUNT."""
    flags = tl.where(columns[0] >= bound, 1 + ONE, 0)
    for i in tl.static_range(1, len(columns)):
        flags += tl.where(columns[i] >= bound, (1 << i) + ONE, 0)
    return flags


@triton.jit
def number_of_bands(maxima, bound):
    """How many bands of each thread reach the bound."""
    reached = (maxima[0] >= bound).to(tl.int32)
    for i in tl.static_range(1, len(maxima)):
        reached += (maxima[i] >= bound).to(tl.int32)
    return reached


@triton.jit
def load_vector(score_ptr, first, some):
    """Bits of the scores of the VECTOR blocks from each of `first` on, as columns."""
    block = first[:, None] + tl.arange(0, VECTOR)[None, :]
    score = tl.load(score_ptr + block, mask=some[:, None], other=-1.0)
    return columns_of(score.to(tl.int32, bitcast=True))


@triton.jit
def best_of(bits, bound, reached, WANTED: tl.constexpr):
    """The bound that the WANTED highest of `bits` reach if they differ; `reached` others do."""
    if reached > 2 * WANTED:
        bound = nth_highest(bits, WANTED)
    else:
        bound = without_lowest(bits, bound, reached - WANTED)
    return bound


@triton.jit
def store_lowest(block_ptr, first, flags, slot):
    """Writes the block of the lowest flag of each thread; the flags without it."""
    lowest = (flags & -flags).to(tl.float32)  # its exponent is its place
    rest = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
    tl.store(block_ptr + slot, first + rest, mask=flags > 0)
    return flags & (flags - 1)


@triton.jit
def store_others(
    block_ptr,
    first,
    own,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
):
    """Writes the forced blocks of a query, or all candidates and -1 where these fit."""
    slot = tl.arange(0, SLOT_COLUMNS)
    all_fit = own - first < NUM_SLOTS
    forced = tl.where(slot < INITIAL, first + slot, own - (NUM_SLOTS - 1 - slot))
    block = tl.where(all_fit, tl.where(slot <= own - first, first + slot, -1), forced)
    is_free = (slot >= INITIAL) & (slot < NUM_SLOTS - LOCAL)
    tl.store(block_ptr + slot, block, mask=(slot < NUM_SLOTS) & (all_fit | ~is_free))


@triton.jit(do_not_specialize=["first_query", "chunk_queries", "num_queries"])
def top_of_bands_kernel(
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
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LANES: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """`top_kernel` of ROWS queries and a KV head, with up to 128 bands and few free choices.

    Where fewer queries are left, the last one is chosen for again.
    """
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    WIDTH: tl.constexpr = LANES * DEPTH
    place = tl.program_id(0) * ROWS
    batch = tl.program_id(2).to(tl.int64)
    pair = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    token = first_query + place
    score_ptr += (pair * chunk_queries + place).to(tl.int64) * pitch
    block_ptr += (pair.to(tl.int64) * num_queries + token) * NUM_SLOTS
    position_ptr += batch * position_stride_b + token
    start_ptr += batch * start_stride_b + token
    band = tl.arange(0, WIDTH // BAND)
    lane = tl.arange(0, 32)

    # Before it is known whether anybody wrote maxima: both loads wait for memory at once.
    written = tl.tuple(())
    owns = tl.tuple(())
    firsts = tl.tuple(())
    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        written += (tl.load(score_ptr + step * pitch + WIDTH + CANDIDATES + band),)
        owns += ((tl.load(position_ptr + step).to(tl.uint32) // SELECT).to(tl.int32),)
        first = 0
        if DOCUMENTS:
            first = (tl.load(start_ptr + step).to(tl.uint32) // SELECT).to(tl.int32)
        firsts += (first,)

    # The bands that reach the bound hold all scores that do: at least FREE.
    maxima = tl.tuple(())
    bounds = tl.tuple(())
    counts = lane * 0  # of bands, a byte for each row
    for r in tl.static_range(ROWS):
        lowest, highest = firsts[r] + INITIAL, tl.maximum(owns[r] - LOCAL, 0)
        some = (band >= lowest // BAND) & (band <= highest // BAND)
        row = columns_of(tl.where(some, written[r], -1.0).to(tl.int32, bitcast=True))
        bound = nth_highest(row, FREE)
        bound = tl.where(highest // BAND - lowest // BAND + 1 < FREE, 0, bound)
        counts += number_of_bands(row, bound) << (8 * r)
        maxima += (row,)
        bounds += (bound,)
    all_bands = tl.sum(counts.to(tl.uint32), 0)
    before = tl.cumsum(counts, 0) - counts
    nums = tl.tuple(())
    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        list_ptr = (score_ptr + step * pitch + WIDTH).to(tl.pointer_type(tl.int32))
        num_bands = (all_bands >> (8 * r)).to(tl.int32) & 0xFF
        # A row of few candidates has nothing but what others left in its memory.
        some = (num_bands <= SLOTS) & (owns[r] - firsts[r] >= NUM_SLOTS)
        num_bands = tl.where(some, num_bands, 0)
        bound = tl.where(some, bounds[r], ABOVE_ALL)
        slot = (before >> (8 * r)) & 0xFF
        for i in tl.static_range(len(maxima[r])):
            taken = maxima[r][i] >= bound
            tl.store(list_ptr + slot, lane * len(maxima[r]) + i, mask=taken)
            slot += taken.to(tl.int32)
        nums += (num_bands,)
    tl.debug_barrier()

    listed = tl.tuple(())
    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        list_ptr = (score_ptr + step * pitch + WIDTH).to(tl.pointer_type(tl.int32))
        listed += (tl.load(list_ptr + lane // 2, mask=lane // 2 < nums[r], other=0),)
    halves = tl.tuple(())
    scores = tl.tuple(())
    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        half = listed[r] * BAND + lane % 2 * (BAND // 2)
        bits = tl.tuple(())
        for i in tl.static_range(BAND // 2 // VECTOR):
            block = half + i * VECTOR
            some = (block + VECTOR > firsts[r] + INITIAL) & (block <= owns[r] - LOCAL)
            some &= lane // 2 < nums[r]
            bits += load_vector(score_ptr + step * pitch, block, some)
        halves += (half,)
        scores += (bits,)

    flags = tl.tuple(())
    reached = tl.tuple(())
    for r in tl.static_range(ROWS):
        flags += (flags_of(scores[r], bounds[r]),)
        reached += (tl.sum(flags[r], 0) >> COUNT,)
    sure = tl.tuple(())
    chosen = tl.tuple(())
    counts = lane * 0
    for r in tl.static_range(ROWS):
        row_flags, num_chosen = flags[r], reached[r]
        if num_chosen > FREE:
            bound = best_of(scores[r], bounds[r], num_chosen, FREE)
            row_flags = flags_of(scores[r], bound)
            num_chosen = tl.sum(row_flags, 0) >> COUNT
        sure += (num_chosen == FREE,)
        row_flags = tl.where(num_chosen == FREE, row_flags, 0)
        counts += row_flags >> COUNT << (8 * r)
        chosen += (row_flags & (ONE - 1),)
    before = tl.cumsum(counts, 0) - counts
    more = lane * 0
    rests = tl.tuple(())
    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        own_ptr = block_ptr + step * NUM_SLOTS + INITIAL
        rests += (store_lowest(own_ptr, halves[r], chosen[r], (before >> (8 * r)) & 0xFF),)
        more |= rests[r]
    if tl.max(more, 0) > 0:
        for r in tl.static_range(ROWS):
            step = tl.minimum(r, chunk_queries - 1 - place)
            own_ptr = block_ptr + step * NUM_SLOTS + INITIAL
            left = rests[r]
            slot = ((before >> (8 * r)) & 0xFF) + 1
            while tl.max(left, 0) > 0:
                left = store_lowest(own_ptr, halves[r], left, slot)
                slot += 1

    for r in tl.static_range(ROWS):
        step = tl.minimum(r, chunk_queries - 1 - place)
        own_ptr = block_ptr + step * NUM_SLOTS
        store_others(own_ptr, firsts[r], owns[r], NUM_SLOTS, SLOT_COLUMNS, INITIAL, LOCAL)
        if (owns[r] - firsts[r] >= NUM_SLOTS) & (not sure[r]):
            store_searched(
                score_ptr + step * pitch,
                own_ptr + INITIAL,
                firsts[r] + INITIAL,
                owns[r] - LOCAL,
                FREE,
                CANDIDATES,
                LANES,
                DEPTH,
            )
