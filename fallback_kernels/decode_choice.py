"""The choice of blocks of one new token, by the last program to finish its compressed keys."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalizers(
    top_ptr,
    total_ptr,
    lent_ptr,
    norm_ptr,
    num_splits,
    active,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Writes every head's base-2 log-sum-exp [MEMBERS] and, behind them, what each split's last
    keys add to the score of the block after them [SPLIT_COLUMNS].
    """
    member, split = tl.arange(0, MEMBERS)[:, None], tl.arange(0, SPLIT_COLUMNS)[None, :]
    there = (member < GROUP) & (split < active)
    place = split * GROUP + member
    top = tl.load(top_ptr + place, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(total_ptr + place, mask=there, other=0.0, cache_modifier=".cg")
    highest = tl.max(top, 1)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    lse = highest + tl.log2(tl.sum(total * tl.exp2(top - highest[:, None]), 1))
    members = tl.arange(0, MEMBERS)
    tl.store(norm_ptr + members, lse, mask=members < GROUP)
    if LEFT > 0:
        lent = tl.load(
            lent_ptr + member * num_splits + split,
            mask=there & (split < active - 1),
            other=float("-inf"),
            cache_modifier=".cg",
        )
        share = tl.where(lent == float("-inf"), 0.0, tl.exp2(lent - lse[:, None]))
        tl.store(norm_ptr + MEMBERS + tl.arange(0, SPLIT_COLUMNS), tl.sum(share, 0))


@triton.jit
def choose(
    score_ptr,
    top_ptr,
    total_ptr,
    lent_ptr,
    norm_ptr,
    block_ptr,
    own,
    num_splits,
    active,
    blocks_per_split,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Initial blocks, the best free ones (best first, ties to the lower index), local ones.

    The pointers are at the unit's first element. Where all candidates fit nobody asks for scores.
    """
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    slot = tl.arange(0, SLOT_COLUMNS)
    if own < NUM_SLOTS:
        tl.store(block_ptr + slot, tl.where(slot <= own, slot, -1), mask=slot < NUM_SLOTS)
    else:
        forced = (slot < INITIAL) | ((slot >= INITIAL + FREE) & (slot < NUM_SLOTS))
        block = tl.where(slot < INITIAL, slot, own - (NUM_SLOTS - 1 - slot))
        tl.store(block_ptr + slot, block, mask=forced)
        if FREE > 0:
            normalizers(
                top_ptr, total_ptr, lent_ptr, norm_ptr, num_splits, active,
                GROUP, MEMBERS, SPLIT_COLUMNS, LEFT,
            )  # fmt: skip
            tl.debug_barrier()
            block = tl.arange(0, BLOCK_COLUMNS)
            free = (block >= INITIAL) & (block <= own - LOCAL)
            score = tl.zeros((BLOCK_COLUMNS,), tl.float32)
            if LEFT > 0:
                split = block // blocks_per_split
                first = (block - split * blocks_per_split == 0) & (split > 0)
                place = norm_ptr + MEMBERS + split - 1
                score = tl.load(place, mask=free & first, other=0.0, cache_modifier=".cg")
            for head in tl.range(0, GROUP, loop_unroll_factor=4):
                lse = tl.load(norm_ptr + head, cache_modifier=".cg")
                logs = tl.load(
                    score_ptr + head * BLOCK_COLUMNS + block,
                    mask=free,
                    other=float("-inf"),
                    cache_modifier=".cg",
                )
                score += tl.exp2(logs - lse)
            score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
            rank = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
            rank = tl.where(free, rank + (BLOCK_COLUMNS - 1 - block), -1)
            for pick in range(FREE):
                best = tl.max(rank, 0)
                chosen = BLOCK_COLUMNS - 1 - (best & 0xFFFFFFFF).to(tl.int32)
                tl.store(block_ptr + INITIAL + pick, chosen)
                rank = tl.where(rank == best, -1, rank)
