"""The choice of blocks of a decode step, one program a new token and KV head."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.decode_tiles import (
    let_the_next_kernel_start,
    share_of_split,
    visible_blocks,
    wait_for_the_kernel_before,
)


@triton.jit
def log_sum_exp(
    top_ptr,
    total_ptr,
    num_parts,
    active,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
):
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
    score_ptr,
    top_ptr,
    total_ptr,
    num_parts,
    active,
    last_free,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEFT: tl.constexpr,
):
    """Eq. 10 of blocks 0 ... last_free, [TILES * BLOCKS]; behind them anything.

    A row of memory is TILES * BLOCKS logarithms, then what each tile lends to the next one. HEADS
    rows are read at once: one memory latency for them all.
    """
    COLUMNS: tl.constexpr = TILES * BLOCKS
    WIDTH: tl.constexpr = COLUMNS + TILES
    block, tile = tl.arange(0, COLUMNS), tl.arange(0, TILES)
    # Whole tiles, so that whole vectors are read.
    wanted = block // BLOCKS * BLOCKS <= last_free
    borrows = (tile > 0) & (tile * BLOCKS <= last_free)
    score = tl.zeros((COLUMNS,), tl.float32)
    borrowed = tl.zeros((TILES,), tl.float32)
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
            more = tl.load(row + COLUMNS - 1 + tile, mask=borrows & there, other=float("-inf"))
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
        first = block % BLOCKS == 0
        score += tl.where(first, tl.gather(borrowed, block // BLOCKS, 0), 0.0)
    return score


@triton.jit(do_not_specialize=["num_splits", "num_parts"])
def choice_kernel(
    lengths_ptr,
    score_ptr,
    top_ptr,
    total_ptr,
    block_ptr,
    capacity,
    num_compressed,
    kv_heads,
    num_splits,
    num_parts,
    GROUP: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT_COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (new token, KV head of a batch row): its blocks.

    Initial ones, the best free ones (best first, ties to the lower index), local ones. Where all
    candidates fit nobody asks for scores.
    """
    FREE: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    BLOCKS: tl.constexpr = KEYS // (SELECT // STRIDE)
    TILES: tl.constexpr = BLOCK_COLUMNS // BLOCKS
    let_the_next_kernel_start(EARLY)
    token, pair = tl.program_id(0), tl.program_id(1)
    unit = pair * tl.num_programs(0) + token
    position = tl.load(lengths_ptr + pair // kv_heads) + token
    own = position // SELECT
    wait_for_the_kernel_before(EARLY)
    if position >= capacity:
        return
    block_ptr += unit.to(tl.int64) * NUM_SLOTS
    slot = tl.arange(0, SLOT_COLUMNS)
    if own < NUM_SLOTS:
        tl.store(block_ptr + slot, tl.where(slot <= own, slot, -1), mask=slot < NUM_SLOTS)
    else:
        forced = (slot < INITIAL) | ((slot >= INITIAL + FREE) & (slot < NUM_SLOTS))
        block = tl.where(slot < INITIAL, slot, own - (NUM_SLOTS - 1 - slot))
        tl.store(block_ptr + slot, block, mask=forced)
        if FREE > 0:
            seen = tl.minimum(visible_blocks(position, COMPRESS, STRIDE), num_compressed)
            _, active = share_of_split(seen, num_splits, KEYS)
            part = unit.to(tl.int64) * (num_parts * GROUP)
            score_ptr += unit.to(tl.int64) * (GROUP * (BLOCK_COLUMNS + TILES))
            score = block_scores(
                score_ptr, top_ptr + part, total_ptr + part, num_parts, active, own - LOCAL,
                GROUP, MEMBERS, HEADS, SPLIT_COLUMNS, TILES, BLOCKS, LEFT,
            )  # fmt: skip
            score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
            block = tl.arange(0, BLOCK_COLUMNS)
            free = (block >= INITIAL) & (block <= own - LOCAL)
            rank = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
            rank = tl.where(free, rank + (BLOCK_COLUMNS - 1 - block), -1)
            for pick in range(FREE):
                best = tl.max(rank, 0)
                chosen = BLOCK_COLUMNS - 1 - (best & 0xFFFFFFFF).to(tl.int32)
                tl.store(block_ptr + INITIAL + pick, chosen)
                rank = tl.where(rank == best, -1, rank)
