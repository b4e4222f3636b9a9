"""Scores of the selectable blocks on Hopper: queries stay in registers, products run ahead.

Gluon, for compute capability 9.0: Triton's interpreter cannot run it, and `scores` computes the
same elsewhere. There a query tile is read from shared memory for every tile of keys, and
exponentials wait for the MMA they belong to. Here a CTA keeps two query tiles in registers, as the
left operand; the exponentials of one overlap with the MMA of the other.

A row of a tile is a (query head, token), a column a block. The keys of a tile are one residue of
64 blocks, `(l'/d) j + m`, as in `scores`; the residues are as many shared buffers, refilled as
soon as they are read. Rows are dealt out so that a thread holds up to four heads of a token: two
rows of each tile. More heads lie in neighbouring lanes and are summed once a tile of blocks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor as HostDescriptor

from nsa_flex.fallback_kernels.common.gluon import fast_exp2, thread_barrier, tma_load
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.topk.config import QueryChunk, TopkPlan

BLOCK_N = gl.constexpr(64)  # blocks of a tile
BAND = gl.constexpr(16)  # blocks that share a maximum; `select.BAND`

HEAD_DIM = 128
GROUPS = (1, 4, 8, 16, 32)  # heads of a group, rounded up: registers suffice
NUM_RESIDUES = 4  # l'/d


@gluon.jit
def hidden_zero(step):
    """0, unknown to the compiler, which would keep 32 descriptors of buffers in registers."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 31;", "=r,r", [step], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def token_and_head(row, TILE: gl.constexpr, PADDED_GROUP: gl.constexpr):
    """Token of the CTA and head in the group of each row of tile TILE (0 or 1)."""
    BLOCK_M: gl.constexpr = 16 * gl.num_warps()
    token, head = row, row * 0
    if PADDED_GROUP == 1:
        token += TILE * BLOCK_M
    elif PADDED_GROUP == 2:
        head += TILE
    else:
        # A thread holds rows i and i + 8 of every 16.
        LANES: gl.constexpr = PADDED_GROUP // 4
        half, lane = row // 8 % 2, row % 8
        token = row // 16 * (8 // LANES) + lane // LANES
        head = (2 * TILE + half) * LANES + lane % LANES
    return token, head


@gluon.jit
def row_offset(token, head, first_token, last_token, stride_h, stride_s):
    """Offset of a head's row of a token of the CTA; tokens past the last repeat it."""
    token = gl.minimum(first_token + token, last_token).to(gl.int64)
    return head.to(gl.int64) * stride_h + token * stride_s


@gluon.jit
def load_queries(
    query_ptr,
    stride_h,
    stride_s,
    first_token,
    last_token,
    TILE: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Tile TILE [16 * warps, HEAD_DIM]; tokens past the last and heads past the group repeat."""
    WARPS: gl.constexpr = gl.num_warps()
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS, 1], [1, 0]
    )
    row = gl.arange(0, 16 * WARPS, layout=gl.SliceLayout(1, LOAD))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
    token, head = token_and_head(row, TILE, PADDED_GROUP)
    head = gl.minimum(head, GROUP - 1)
    offset = row_offset(token, head, first_token, last_token, stride_h, stride_s)
    return gl.convert_layout(gl.load(query_ptr + offset[:, None] + dim[None, :]), LAYOUT)


@gluon.jit
def load_lse(
    lse_ptr,
    stride_h,
    stride_s,
    first_token,
    last_token,
    TILE: gl.constexpr,
    PADDED_GROUP: gl.constexpr,
    GROUP: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Binary log-sum-exp of a tile's rows; inf for heads past the group: their p are 0."""
    row = gl.arange(0, 16 * gl.num_warps(), layout=gl.SliceLayout(1, LAYOUT))
    token, head = token_and_head(row, TILE, PADDED_GROUP)
    lse_ptr += row_offset(token, head, first_token, last_token, stride_h, stride_s)
    return gl.load(lse_ptr, mask=head < GROUP, other=float("inf")) * LOG2E


@gluon.jit
def probabilities(logits, lse, scale_log2, PADDED_GROUP: gl.constexpr):
    """p of a tile, the rows of a thread summed where they are heads of one token."""
    BLOCK_M: gl.constexpr = logits.shape[0]
    p = fast_exp2(logits * scale_log2 - lse[:, None])
    if PADDED_GROUP >= 4:
        p = gl.permute(gl.reshape(p, [BLOCK_M // 16, 2, 8, BLOCK_N]), [0, 2, 3, 1])
        upper, lower = gl.split(p)
        p = gl.reshape(upper + lower, [BLOCK_M // 2, BLOCK_N])
    return p


@gluon.jit
def shifted(p, carry):
    """p of the block before, [rows, BLOCK_N], and what the next tile's first block needs.

    A thread holds columns 8 i + 2 q + e, e = 0 and 1, of its own q in 0 ... 3. What an odd column
    needs is its own; an even one's is the next lane's, in lane q = 0 lane 3's of the i before.
    """
    BLOCK_M: gl.constexpr = p.shape[0]
    even, odd = gl.split(gl.reshape(p, [BLOCK_M, 8, 4, 2]))
    LAYOUT: gl.constexpr = odd.type.layout
    quarter = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    left = gl.broadcast((quarter[None, :][:, None, :] + 3) % 4, odd)[0]
    odd = gl.gather(odd, left, 2)
    # One tensor [BLOCK_M, 4] for each i.
    by_bit = gl.reshape(gl.permute(odd, [0, 2, 1]), [BLOCK_M, 4, 2, 2, 2])
    low, high = gl.split(gl.permute(by_bit, [0, 1, 4, 3, 2]))
    low_low, low_high = gl.split(low)
    high_low, high_high = gl.split(high)
    r0, r1 = gl.split(low_low)
    r2, r3 = gl.split(low_high)
    r4, r5 = gl.split(high_low)
    r6, r7 = gl.split(high_high)
    first = gl.arange(0, 4, layout=gl.SliceLayout(0, r0.type.layout))[None, :] == 0
    low_low = gl.join(gl.where(first, carry, r0), gl.where(first, r0, r1))
    low_high = gl.join(gl.where(first, r1, r2), gl.where(first, r2, r3))
    high_low = gl.join(gl.where(first, r3, r4), gl.where(first, r4, r5))
    high_high = gl.join(gl.where(first, r5, r6), gl.where(first, r6, r7))
    by_bit = gl.join(gl.join(low_low, low_high), gl.join(high_low, high_high))
    before = gl.reshape(gl.permute(by_bit, [0, 4, 3, 2, 1]), [BLOCK_M, 8, 4])
    result = gl.reshape(gl.join(gl.convert_layout(before, LAYOUT), even), [BLOCK_M, BLOCK_N])
    return gl.convert_layout(result, p.type.layout), r7


@gluon.jit
def store_scores(
    score_ptr,
    maxima_ptr,
    scores,
    first_block,
    end,
    topk_range,
    LANES: gl.constexpr,
    BANDED: gl.constexpr,
):
    """Store scores [rows, BLOCK_N] up to block `end`, -1 outside `topk_range`; bands' maxima.

    topk_range: first and last block that top-k may select in a row, and the row mask.
    """
    LAYOUT: gl.constexpr = scores.type.layout
    BLOCK_M: gl.constexpr = scores.shape[0]
    first_topk, last_topk, row_mask = topk_range
    if LANES > 1:
        heads = gl.reshape(scores, [BLOCK_M // LANES, LANES, BLOCK_N])
        summed = gl.expand_dims(gl.sum(heads, 1), 1)
        summed = gl.reshape(gl.broadcast(summed, heads)[0], [BLOCK_M, BLOCK_N])
        scores = gl.convert_layout(summed, LAYOUT)
    scores = gl.where(scores > 0.0, scores, 0.0)  # NaN counts as 0
    block = first_block + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, LAYOUT))
    wanted = (block[None, :] >= first_topk[:, None]) & (block[None, :] <= last_topk[:, None])
    scores = gl.where(wanted, scores, -1.0)
    mask = row_mask[:, None] & (block < end)[None, :]
    gl.store(score_ptr[:, None] + block[None, :], scores, mask=mask)
    if BANDED:
        maxima = gl.max(
            gl.reshape(scores, [BLOCK_M, BLOCK_N // BAND, BAND]), 2
        )  # [rows, BLOCK_N / BAND]
        BANDS: gl.constexpr = maxima.type.layout
        band = first_block // BAND
        band += gl.arange(0, BLOCK_N // BAND, layout=gl.SliceLayout(0, BANDS))
        maxima_ptr = gl.convert_layout(maxima_ptr, gl.SliceLayout(1, BANDS))
        row_mask = gl.convert_layout(row_mask, gl.SliceLayout(1, BANDS))
        mask = row_mask[:, None] & (band * BAND < end)[None, :]
        gl.store(maxima_ptr[:, None] + band[None, :], maxima, mask=mask)


@gluon.jit
def blocks_of(
    token,
    position_ptr,
    start_ptr,
    SELECT: gl.constexpr,
    DOCUMENTS: gl.constexpr,
):
    """Own block of each token, and the first of its document."""
    own = gl.load(position_ptr + token).to(gl.int32) // SELECT
    first = own * 0
    if DOCUMENTS:
        first = gl.load(start_ptr + token).to(gl.int32) // SELECT
    return own, first


@recordable
@gluon.jit(
    do_not_specialize=["first_query", "chunk_queries", "kv_heads"],
)
def topk_scores_sm90_kernel(
    query_ptr,
    key_tiles,
    lse_ptr,
    position_ptr,
    start_ptr,
    score_ptr,
    query_strides,
    lse_strides,
    position_stride_b,
    start_stride_b,
    first_query,
    chunk_queries,
    kv_heads,
    width,
    pitch,
    maxima_offset,
    scale_log2,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    COMPRESS: gl.constexpr,
    STRIDE: gl.constexpr,
    SELECT: gl.constexpr,
    SCORED: gl.constexpr,
    INITIAL: gl.constexpr,
    LOCAL: gl.constexpr,
    DOCUMENTS: gl.constexpr,
    BANDED: gl.constexpr,
):
    """`scores.topk_scores_kernel`, if BANDED with maxima behind each row.

    Needs initial and local blocks at both ends of a row, so that nothing is masked, and l <= 2 d.
    """
    PADDED_GROUP: gl.constexpr = triton.next_power_of_2(GROUP)
    WARPS: gl.constexpr = gl.num_warps()
    BLOCK_M: gl.constexpr = 16 * WARPS
    BLOCK_TOKENS: gl.constexpr = 2 * BLOCK_M // PADDED_GROUP
    SUMMED_ROWS: gl.constexpr = (
        BLOCK_M // 2 if PADDED_GROUP >= 4 else BLOCK_M
    )  # rows once a thread's are summed
    LANES: gl.constexpr = PADDED_GROUP // 4 if PADDED_GROUP > 4 else 1
    RESIDUES: gl.constexpr = SELECT // STRIDE
    LENT: gl.constexpr = 1 if COMPRESS > STRIDE else 0
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 2)

    # Late queries have the most to do: they go first.
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    batch_head = gl.program_id(1)
    batch, head = batch_head // kv_heads, batch_head % kv_heads
    row_of_batch, first_head = batch.to(gl.int64), head.to(gl.int64) * GROUP
    position_ptr += row_of_batch * position_stride_b
    start_ptr += row_of_batch * start_stride_b
    last_query = chunk_queries - 1

    # All lanes of every warp take part, so that ptxas knows the bounds to be the same in all:
    # descriptors of products then take no registers.
    SPAN: gl.constexpr = max(BLOCK_TOKENS, 32)
    query = gl.arange(0, SPAN, layout=gl.BlockedLayout([SPAN // 32], [32], [WARPS], [0]))
    token = first_query + gl.minimum(tile * BLOCK_TOKENS + query % BLOCK_TOKENS, last_query)
    own, first = blocks_of(token, position_ptr, start_ptr, SELECT, DOCUMENTS)
    # Where all candidates fit, no scores are needed.
    crowded = own - first >= SCORED
    lowest = gl.min(gl.where(crowded, first + INITIAL, width), 0)
    highest = gl.max(gl.where(crowded, own - LOCAL, -1), 0)
    if highest < lowest:
        return
    first_tile = (lowest - LENT) // BLOCK_N
    steps = highest // BLOCK_N + 1 - first_tile
    end = highest // 4 * 4 + 4  # whole vectors are read

    # Each buffer an allocation of its own: no barrier comes between one's refill and the product
    # of another.
    SHAPE: gl.constexpr = [1, 1, 1, 1, BLOCK_N, HEAD_DIM]
    buffers, arrived = gl.tuple(()), gl.tuple(())
    for m in gl.static_range(RESIDUES):
        buffers += (gl.allocate_shared_memory(key_tiles.dtype, SHAPE, key_tiles.layout),)
        arrived += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(arrived[m], count=1)
    fence_async_shared()
    thread_barrier()
    for m in gl.static_range(RESIDUES):
        mbarrier.expect(arrived[m], key_tiles.block_type.nbytes)
        tma_load(
            key_tiles,
            [batch, head, m, first_tile * BLOCK_N, 0],
            arrived[m],
            buffers[m].index(0),
        )

    query_ptr += row_of_batch * query_strides[0] + first_head * query_strides[1]
    lse_ptr += row_of_batch * lse_strides[0] + first_head * lse_strides[1]
    first_token, last_token = first_query + tile * BLOCK_TOKENS, first_query + last_query
    q0 = load_queries(  # [BLOCK_M, HEAD_DIM]
        query_ptr, query_strides[1], query_strides[2], first_token, last_token,
        0, PADDED_GROUP, GROUP, HEAD_DIM, QUERIES,
    )  # fmt: skip
    q1 = load_queries(  # [BLOCK_M, HEAD_DIM]
        query_ptr, query_strides[1], query_strides[2], first_token, last_token,
        1, PADDED_GROUP, GROUP, HEAD_DIM, QUERIES,
    )  # fmt: skip
    lse0 = load_lse(
        lse_ptr,
        lse_strides[1],
        lse_strides[2],
        first_token,
        last_token,
        0,
        PADDED_GROUP,
        GROUP,
        PRODUCT,
    )  # [BLOCK_M]
    lse1 = load_lse(
        lse_ptr,
        lse_strides[1],
        lse_strides[2],
        first_token,
        last_token,
        1,
        PADDED_GROUP,
        GROUP,
        PRODUCT,
    )  # [BLOCK_M]

    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, PRODUCT)
    SUMMED: gl.constexpr = probabilities(zero, lse0, scale_log2, PADDED_GROUP).type.layout
    none = gl.zeros([SUMMED_ROWS, BLOCK_N], gl.float32, SUMMED)  # [SUMMED_ROWS, BLOCK_N]
    carry0 = shifted(none, 0.0)[1]
    carry1 = carry0

    # The rows that are written: tokens of both tiles, or the first tile's and the second's.
    row = gl.arange(0, SUMMED_ROWS, layout=gl.SliceLayout(1, SUMMED))
    query = tile * BLOCK_TOKENS + row // LANES
    token = first_query + gl.minimum(query, last_query)
    own, first = blocks_of(token, position_ptr, start_ptr, SELECT, DOCUMENTS)
    score0_ptr = score_ptr + (batch_head * chunk_queries + query).to(gl.int64) * pitch
    range0 = (first + INITIAL, own - LOCAL, (query <= last_query) & (row % LANES == 0))
    score1_ptr, range1 = score0_ptr, range0
    if PADDED_GROUP == 1:
        query += BLOCK_M
        token = first_query + gl.minimum(query, last_query)
        own, first = blocks_of(token, position_ptr, start_ptr, SELECT, DOCUMENTS)
        score1_ptr = score_ptr + (batch_head * chunk_queries + query).to(gl.int64) * pitch
        range1 = (first + INITIAL, own - LOCAL, query <= last_query)

    for step in range(0, steps):
        score0, score1, last0, last1 = none, none, none, none
        origin = hidden_zero(step)
        mbarrier.wait(arrived[0], step & 1)
        keys = buffers[0].index(origin).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        logits0 = warpgroup_mma(q0, keys, zero, use_acc=False, is_async=True)  # [BLOCK_M, BLOCK_N]
        for m in gl.static_range(RESIDUES):
            logits1 = warpgroup_mma(
                q1, keys, zero, use_acc=False, is_async=True
            )  # [BLOCK_M, BLOCK_N]
            logits0 = warpgroup_mma_wait(1, deps=[logits0])
            p = probabilities(logits0, lse0, scale_log2, PADDED_GROUP)  # [SUMMED_ROWS, BLOCK_N]
            # The last residue counts once here, and once in the block after.
            score0 += p * (1 + LENT if m < RESIDUES - 1 else 1)
            if m < RESIDUES - 1:
                mbarrier.wait(arrived[m + 1], step & 1)
                keys = buffers[m + 1].index(origin).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
                logits0 = warpgroup_mma(
                    q0, keys, zero, use_acc=False, is_async=True
                )  # [BLOCK_M, BLOCK_N]
                logits1 = warpgroup_mma_wait(1, deps=[logits1])
            else:
                last0 = p
                logits1 = warpgroup_mma_wait(0, deps=[logits1])
            thread_barrier()
            more = step + 1 < steps
            mbarrier.expect(arrived[m], key_tiles.block_type.nbytes, pred=more)
            # The copy follows a residue later: that one's barrier lies between both.
            for late in gl.static_range(max(m - 1, 0), m + m // (RESIDUES - 1)):
                tma_load(
                    key_tiles,
                    [batch, head, late, (first_tile + step + 1) * BLOCK_N, 0],
                    arrived[late],
                    buffers[late].index(origin),
                    pred=more,
                )
            p = probabilities(logits1, lse1, scale_log2, PADDED_GROUP)  # [SUMMED_ROWS, BLOCK_N]
            if PADDED_GROUP == 1:
                score1 += p * (1 + LENT if m < RESIDUES - 1 else 1)
                last1 = p
            else:
                score0 += p * (1 + LENT if m < RESIDUES - 1 else 1)
                if m == RESIDUES - 1:
                    last0 += p
        if LENT:
            before, carry0 = shifted(last0, carry0)
            score0 += before
        first_block = (first_tile + step) * BLOCK_N
        store_scores(
            score0_ptr, score0_ptr + maxima_offset, score0, first_block, end, range0, LANES, BANDED
        )
        if PADDED_GROUP == 1:
            if LENT:
                before, carry1 = shifted(last1, carry1)
                score1 += before
            store_scores(
                score1_ptr,
                score1_ptr + maxima_offset,
                score1,
                first_block,
                end,
                range1,
                LANES,
                BANDED,
            )
    for m in gl.static_range(RESIDUES):
        mbarrier.invalidate(arrived[m])


def unsupported_reason(
    query: Tensor, key_tiles: HostDescriptor | None, *, compress: int, stride: int, select: int
) -> str | None:
    """Why `topk_scores_sm90_kernel` does not take a call, from shapes and dtypes; None if it does.

    Args:
        query: (B, Hq, Sq, D).
        key_tiles: the compressed keys for TMA; None where some would have to be masked.
        compress, stride, select: l, d and l'.
    """
    if key_tiles is None:
        return "TMA cannot copy the compressed keys, or some would have to be masked"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}; float16 or bfloat16 is needed"
    if query.shape[3] != HEAD_DIM:
        return f"the head dim is {query.shape[3]}; {HEAD_DIM} is needed"
    group = query.shape[1] // key_tiles.shape[1]
    if next_power_of_2(group) not in GROUPS:
        return f"{group} query heads share a KV head; registers suffice for {GROUPS}, rounded up"
    if select != NUM_RESIDUES * stride or compress > 2 * stride:
        return (
            f"l={compress}, d={stride}, l'={select}; it takes l' = {NUM_RESIDUES} d and l <= 2 d"
        )
    return None


def launch_scores(
    plan: TopkPlan,
    chunk: QueryChunk,
    query: Tensor,
    key_tiles: HostDescriptor,
    lse: Tensor,
    positions: tuple[Tensor, Tensor, int, int],
    scores: Tensor,
    scale_log2: float,
    **constants: Any,
) -> None:
    """Scores of a chunk, with the maxima of bands behind each row if it is `banded`.

    `positions`: positions and document starts of the queries, and the strides of a batch row.
    """
    shape = key_tiles.block_shape
    element = gl.bfloat16 if query.dtype == torch.bfloat16 else gl.float16
    keys = TensorDescriptor(
        key_tiles.base,
        key_tiles.shape,
        key_tiles.strides,
        shape,
        gl.NVMMASharedLayout.get_default_for(shape, element),
    )
    tiles = cdiv(chunk.size, plan.sm90_tokens)
    topk_scores_sm90_kernel[(tiles, plan.batch * plan.kv_heads)](
        query,
        keys,
        lse,
        positions[0],
        positions[1],
        scores,
        strides(query),
        lse.stride(),
        positions[2],
        positions[3],
        chunk.start,
        chunk.size,
        plan.kv_heads,
        chunk.width,
        chunk.pitch,
        chunk.width + chunk.candidates,
        scale_log2,
        GROUP=plan.group,
        HEAD_DIM=plan.head_dim,
        BANDED=chunk.banded or plan.padded_group > 1,  # without, ptxas serialises those products
        **constants,
        num_warps=4,
        maxnreg=plan.sm90_registers,
    )
