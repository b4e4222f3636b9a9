"""The best blocks of a row where few are wanted: taken one after the other, without a search.

Scores are not negative, so that their bits have their order. A key is the upper bits of a score
above the number of its block: no two are the same, and the highest key of a row names its block.
Afterwards it is checked what the lost bits may hide: where the last key that is taken and the
first that is left agree in what they have of their scores, `select.store_best` searches the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

VECTOR = tl.constexpr(4)  # scores one load instruction brings to a thread
MOST = tl.constexpr(16)  # most blocks that are taken this way
WARP = tl.constexpr(32)
LOWEST = tl.constexpr(-(2**31))  # below all keys


@triton.jit
def descending(a, b):
    """The larger and the smaller of both."""
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def columns_of(keys, DEPTH: tl.constexpr):
    """Up to four neighbouring `keys` of each thread, as tensors of one each, descending."""
    if DEPTH == 1:
        columns = (keys,)
    else:
        a, b = tl.split(tl.reshape(keys, (keys.numel // 2, 2)))
        a, b = descending(a, b)
        if DEPTH == 2:
            columns = (a, b)  # type: ignore[assignment]
        else:
            a, c = tl.split(tl.reshape(a, (keys.numel // 4, 2)))
            b, d = tl.split(tl.reshape(b, (keys.numel // 4, 2)))
            a, c = descending(a, c)
            b, d = descending(b, d)
            b, c = descending(b, c)
            columns = (a, b, c, d)  # type: ignore[assignment]
    return columns


@triton.jit
def by_halves(x):
    """[THREADS, n] as `take` wants it: of eight in a thread, four belong to the second half."""
    if x.shape[1] == 8:
        x = tl.permute(tl.reshape(x, (x.shape[0], 2, 4)), (1, 0, 2))
    return x


@triton.jit
def halves(x):
    """The first and the second half of a vector."""
    return tl.split(tl.trans(tl.reshape(x, (2, x.numel // 2))))


@triton.jit
def best_four(columns):
    """Of four descending columns the halves merged, index by index, and the highest left out."""
    a, h = halves(columns[0])
    b, g = halves(columns[1])
    c, f = halves(columns[2])
    d, e = halves(columns[3])
    a, e = descending(a, e)
    b, f = descending(b, f)
    c, g = descending(c, g)
    d, h = descending(d, h)
    left = tl.max(tl.maximum(tl.maximum(e, f), tl.maximum(g, h)), 0)
    a, c = descending(a, c)
    b, d = descending(b, d)
    a, b = descending(a, b)
    c, d = descending(c, d)
    return (a, b, c, d), left


@triton.jit
def take(keys, slot, WANTED: tl.constexpr):
    """The WANTED highest of `keys`, which differ: key number `slot` of them, all, and the next.

    keys: int32, a power of two of them. A thread has up to four that follow one another in each
    128 of them, and takes no more than four in all: where more would have been taken, the next
    key is higher than the last one taken.
    """
    keys = tl.reshape(keys, (keys.numel,))
    left = LOWEST
    columns = columns_of(keys, min(4, max(1, keys.numel // WARP)))
    for i in tl.static_range(3):
        if keys.numel >= (8 << i) * WARP:
            columns, left_out = best_four(columns)
            left = tl.maximum(left, left_out)
    DEPTH: tl.constexpr = len(columns)
    own = tl.full(slot.shape, LOWEST, tl.int32)  # [MOST]
    taken = tl.tuple(())
    for i in tl.static_range(WANTED):
        best = tl.max(columns[0], 0)
        taken += (best,)
        own = tl.where(slot == i, best, own)
        taken_here = columns[0] == best
        rest = tl.tuple(())
        for j in tl.static_range(DEPTH):
            below = columns[j + 1] if j + 1 < DEPTH else LOWEST
            rest += (tl.where(taken_here, below, columns[j]),)
        columns = rest
    return own, taken, tl.maximum(tl.max(columns[0], 0), left)


@triton.jit
def exponent(x):
    """At least the number of bits of a positive int32."""
    return (x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126


@triton.jit
def store_few(
    score_ptr,
    bits,
    number,
    block_ptr,
    lowest,
    highest,
    WANTED: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Writes the WANTED best blocks of [lowest, highest], ascending, if they are sure; whether so.

    bits: of the maxima of every SPAN scores of a row of WIDTH, below 0 where there are none; those
    of a thread are its `number` in rising order. More than WANTED scores of a row are not below 0.
    """
    BLOCK: tl.constexpr = WIDTH - 1
    BITS: tl.constexpr = BLOCK.bit_length()
    PART: tl.constexpr = WIDTH // SPAN - 1
    slot = tl.arange(0, MOST)
    own, taken, left = take(bits & ~PART | number, slot, WANTED)
    if SPAN == 1:
        block = own & PART
        sure = (left & ~PART) < (taken[WANTED - 1] & ~PART)
    else:
        # As many parts hold the best blocks: any other has WANTED better ones before it.
        block = (own & PART)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        vector = block // VECTOR * VECTOR
        some = (own >= 0)[:, None] & (vector + VECTOR > lowest) & (vector <= highest)
        score = tl.load(score_ptr + block, mask=some, other=-1.0)  # [MOST, SPAN]
        # They lie close together: keys of how far they are above the least of the maxima, or 0.
        base = tl.maximum(taken[WANTED - 1] & ~PART, 0)
        lost = tl.maximum(exponent((taken[0] | PART) - base) - (30 - BITS), 0)
        base -= 1 << lost
        above = tl.maximum(score.to(tl.int32, bitcast=True), base) - base
        own, taken, next_left = take(above >> lost << BITS | block, slot, WANTED)
        block = own & BLOCK
        least = taken[WANTED - 1] >> BITS
        sure = ((next_left >> BITS) < least) & (
            (tl.maximum(left, 0) | PART) - base < (least << lost)
        )
    rank = slot * 0
    for i in tl.static_range(WANTED):
        rank += ((taken[i] & BLOCK) < block).to(tl.int32)
    tl.store(block_ptr + rank, block, mask=(slot < WANTED) & sure)
    return sure
