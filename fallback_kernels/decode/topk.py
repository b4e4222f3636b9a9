"""Top-k block selection of a decode step.

CTAs share the blocks of a new token and KV head in chunks, and each writes the best candidates of
its own chunk. Where there are several chunks, the CTAs that read the selected blocks merge them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.decode.config import MAX_COUNTED
from nsa_flex.fallback_kernels.decode.tiles import (
    count_slots,
    count_visible_blocks,
    pdl_launch_dependents,
    pdl_wait,
    tiles_of_split,
)

COUNTED = tl.constexpr(MAX_COUNTED)


@triton.jit
def compressed_lse_log2(
    row_max_ptr, row_sum_ptr, num_splits, num_used,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, PADDED_COMPRESSED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Base-2 log-sum-exp [PADDED_GROUP] of the compressed branch of every head in the group."""
    head_in_group = tl.arange(0, PADDED_GROUP)[:, None]
    split = tl.arange(0, PADDED_COMPRESSED_SPLITS)[None, :]
    mask = (head_in_group < GROUP) & (split < num_used)  # [PADDED_GROUP, PADDED_COMPRESSED_SPLITS]
    row = head_in_group * num_splits
    split_max = tl.load(row_max_ptr + row + split, mask=mask, other=float("-inf"))
    split_sum = tl.load(row_sum_ptr + row + split, mask=mask, other=0.0)
    row_max = tl.max(split_max, 1)  # [PADDED_GROUP]
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    return row_max + tl.log2(tl.sum(split_sum * tl.exp2(split_max - row_max[:, None]), 1))


@triton.jit
def block_scores(
    score_ptr, row_max_ptr, row_sum_ptr, num_splits, num_used, first, last_candidate,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEADS: tl.constexpr,
    PADDED_COMPRESSED_SPLITS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
    TILE_BLOCKS: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Eq. 10 of blocks first ... last_candidate [CHUNK]; anything past them.

    A row of memory is PADDED_BLOCKS logarithms, then what each tile of TILE_BLOCKS blocks adds to
    the first block of the next tile. HEADS rows are loaded at once: one memory latency for all.
    """
    SCORE_STRIDE: tl.constexpr = PADDED_BLOCKS + PADDED_BLOCKS // TILE_BLOCKS
    offset = tl.arange(0, CHUNK)
    block = first + offset  # [CHUNK]
    tile = first // TILE_BLOCKS + tl.arange(0, CHUNK // TILE_BLOCKS)  # [CHUNK // TILE_BLOCKS]
    # Whole tiles, so that whole vectors are read.
    block_mask = block // TILE_BLOCKS * TILE_BLOCKS <= last_candidate
    carry_mask = (tile > 0) & (tile * TILE_BLOCKS <= last_candidate)
    score = tl.zeros((CHUNK,), tl.float32)
    carried = tl.zeros((CHUNK // TILE_BLOCKS,), tl.float32)
    heads = tl.arange(0, PADDED_GROUP)
    lse = tl.zeros((PADDED_GROUP,), tl.float32)
    for first_head in tl.static_range(0, GROUP, HEADS):
        logs = ()
        carries = ()
        for i in tl.static_range(HEADS):
            row = score_ptr + (first_head + i) * SCORE_STRIDE
            mask = first_head + i < GROUP
            log = tl.load(row + block, mask=block_mask & mask, other=float("-inf"))  # [CHUNK]
            logs = logs + (log,)  # type: ignore[assignment]  # noqa: RUF005
            log = tl.load(
                row + PADDED_BLOCKS - 1 + tile, mask=carry_mask & mask, other=float("-inf")
            )  # [CHUNK // TILE_BLOCKS]
            carries = carries + (log,)  # type: ignore[assignment]  # noqa: RUF005
        if first_head == 0:
            lse = compressed_lse_log2(
                row_max_ptr, row_sum_ptr, num_splits, num_used,
                GROUP, PADDED_GROUP, PADDED_COMPRESSED_SPLITS,
            )  # fmt: skip  # [PADDED_GROUP]
            # The gather puts all of it in every warp: the sums below need no CTA-wide exchange.
            lse = tl.gather(lse, heads, 0)
            lse = tl.where(heads < GROUP, lse, 0.0)
        tl.debug_barrier()  # or the compiler sinks each load to its use, and they serialise
        for i in tl.static_range(HEADS):
            head_lse = tl.sum(tl.where(heads == first_head + i, lse, 0.0), 0)
            score += tl.exp2(logs[i] - head_lse)
            carried += tl.exp2(carries[i] - head_lse)
    if LEFT > 0:
        starts_tile = offset % TILE_BLOCKS == 0
        score += tl.where(starts_tile, tl.gather(carried, offset // TILE_BLOCKS, 0), 0.0)
    return score


@triton.jit
def count_greater(rank, COUNT: tl.constexpr):
    """How many of rank [COUNT], all different, are greater than each of them: [COUNT].

    In slices that fit a thread's registers, by gathers: otherwise the compiler has every thread
    recompute them.
    """
    SLICE: tl.constexpr = min(COUNT, 32)
    greater = tl.zeros((COUNT,), tl.int32)
    for first in range(0, COUNT, SLICE):
        other = tl.gather(rank, first + tl.arange(0, SLICE), 0)  # [SLICE]
        greater += tl.sum((other[:, None] > rank[None, :]).to(tl.int32), 0)
    return greater


@triton.jit
def best_of_chunks(
    candidate_ptr, index, CHUNKS: tl.constexpr, PADDED_SLOTS: tl.constexpr, TOPK: tl.constexpr
):
    """The candidates at places `index` and `index` + 1 in descending order; 0 for none."""
    offset = tl.arange(0, CHUNKS * PADDED_SLOTS)
    mask = offset % PADDED_SLOTS < TOPK
    rank = tl.load(candidate_ptr + offset, mask=mask, other=0)  # [CHUNKS * PADDED_SLOTS]
    # Empty candidates get different negative ranks, since ranks have to differ.
    rank = tl.where(mask & (rank >= 0), rank, -1 - offset)
    greater = count_greater(rank, CHUNKS * PADDED_SLOTS)
    best = tl.sum(tl.where(greater == index, rank, 0), 0)
    return best, tl.sum(tl.where(greater == index + 1, rank, 0), 0)


@triton.jit
def rank_by_tiles(
    rank, block, own_block,
    NUM_SLOTS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`rank` [CHUNK] such that the highest are what `tiled_top_k` takes.

    Of the query's tile of NUM_SLOTS blocks, which lies in one chunk, the best NUM_SLOTS / 2 - 1
    stay, above all others; `count_slots` says how many of the others follow them.
    """
    tile = own_block // NUM_SLOTS * NUM_SLOTS
    # Of another chunk than the tile's, whose blocks are all before it, anything may be compared.
    place = tl.minimum(tl.maximum(tile - tl.min(block, 0), 0), CHUNK - NUM_SLOTS)
    other = tl.gather(rank, place + tl.arange(0, NUM_SLOTS), 0)  # [NUM_SLOTS]
    better = tl.sum((other[:, None] > rank[None, :]).to(tl.int64), 0)  # [CHUNK]
    inside = (block >= tile) & (rank >= 0)
    above = ((0x7FFFFFFF - better) << 32) + (PADDED_BLOCKS - 1 - block)
    kept = tl.where(better < NUM_SLOTS // 2 - 1, above, -1 - block)
    return tl.where(inside, kept, rank)


@recordable
@triton.jit(do_not_specialize=["num_compressed_splits", "num_splits"])
def decode_topk_kernel(
    lengths_ptr, score_ptr, row_max_ptr, row_sum_ptr, candidate_ptr, block_ptr, capacity,
    num_compressed, kv_heads, num_compressed_splits, num_splits,
    GROUP: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr, HEADS: tl.constexpr, PADDED_COMPRESSED_SPLITS: tl.constexpr,
    PADDED_BLOCKS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, TILED: tl.constexpr,
    PDL: tl.constexpr, LAUNCH_AFTER_WAIT: tl.constexpr,
):  # fmt: skip
    """CTA (chunk, new token, KV head of a batch row): the top-k blocks of its chunk.

    int64 candidates [PADDED_SLOTS], best first: the score's bits, then the block's number from
    behind, so that ties go to the lower block; negative where there is none. Where every block
    fits into the slots, no CTA reads the candidates.
    """
    PADDED_GROUP: tl.constexpr = triton.next_power_of_2(GROUP)
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    TOPK: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    TILE_BLOCKS: tl.constexpr = BLOCK_N // (SELECT // STRIDE)
    pdl_launch_dependents(PDL and not LAUNCH_AFTER_WAIT)
    chunk, token, batch_head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    unit = (batch_head * tl.num_programs(1) + token).to(tl.int64)
    position = tl.load(lengths_ptr + batch_head // kv_heads) + token
    own_block = position // SELECT
    pdl_wait(PDL)
    # Launched only here, the next kernel's window does not compete for bandwidth before.
    pdl_launch_dependents(PDL and LAUNCH_AFTER_WAIT)
    if position >= capacity:
        return
    if own_block < NUM_SLOTS:
        slot = tl.arange(0, PADDED_SLOTS)
        tl.store(
            block_ptr + unit * NUM_SLOTS + slot, -1, mask=(slot > own_block) & (slot < NUM_SLOTS)
        )
        return
    if TOPK == 0:
        return
    num_visible = tl.minimum(count_visible_blocks(position, COMPRESS, STRIDE), num_compressed)
    _, num_used = tiles_of_split(num_visible, num_compressed_splits, BLOCK_N)
    first_split = unit * (num_splits * GROUP)
    score_ptr += unit * (GROUP * (PADDED_BLOCKS + PADDED_BLOCKS // TILE_BLOCKS))
    score = block_scores(
        score_ptr, row_max_ptr + first_split, row_sum_ptr + first_split, num_splits, num_used,
        chunk * CHUNK, own_block - LOCAL, GROUP, PADDED_GROUP, HEADS, PADDED_COMPRESSED_SPLITS,
        PADDED_BLOCKS, CHUNK, TILE_BLOCKS, LEFT,
    )  # fmt: skip  # [CHUNK]
    score = tl.where(score > 0.0, score, 0.0)  # NaN counts as 0
    block = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    is_candidate = (block >= INITIAL) & (block <= own_block - LOCAL)
    rank = score.to(tl.int32, bitcast=True).to(tl.int64) << 32
    rank = tl.where(is_candidate, rank + (PADDED_BLOCKS - 1 - block), -1 - block)
    if TILED:
        rank = rank_by_tiles(rank, block, own_block, NUM_SLOTS, PADDED_BLOCKS, CHUNK)
        if chunk == 0:
            slot = tl.arange(0, PADDED_SLOTS)
            _, num_topk = count_slots(position, SELECT, NUM_SLOTS, TOPK, INITIAL, TILED)
            empty = (slot >= num_topk) & (slot < TOPK)
            tl.store(block_ptr + unit * NUM_SLOTS + slot, -1, mask=empty)
    candidate_ptr += (unit * tl.num_programs(0) + chunk) * PADDED_SLOTS
    if CHUNK <= COUNTED:
        slot = count_greater(rank, CHUNK)
        tl.store(candidate_ptr + slot, rank, mask=slot < PADDED_SLOTS)
    else:
        for slot in range(TOPK):
            best = tl.max(rank, 0)
            tl.store(candidate_ptr + slot, best)
            rank = tl.where(rank == best, -PADDED_BLOCKS - 1, rank)
