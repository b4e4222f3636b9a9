"""Scores of the selectable blocks, recomputed from query, compressed keys and log-sum-exp.

A tile is the transposed product keys x (head in group, token): the sum over the heads of a group
then runs over columns that one thread holds. The keys of a tile are taken one residue at a time:
row j of residue m is compressed block `(l'/d) j + m`, so that Eq. 9 adds tiles, without shuffles,
and max-pooling takes the larger of tiles. What block j - 1 lends to block j (compressed blocks
that straddle both) is one shift of the finished, group-summed tile; a tile's first row exists for
that alone.

Where a row has initial and local blocks, a block between them and its left neighbour hold no
compressed block that the query does not see: nothing is masked, and keys past the end may read as
anything. Then one TMA copy brings a tile of keys, if the device has TMA.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.arch import INTERPRETED
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.common.tiles import precision_of, width_of
from nsa_flex.fallback_kernels.topk.select import VECTOR

COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def load_rows(
    pointers,
    FIRST_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[rows, BLOCK_D] from head dim FIRST_DIM on, where `pointers` [rows] are to head dim 0."""
    dim = FIRST_DIM + tl.arange(0, BLOCK_D)
    pointers = pointers[:, None] + dim[None, :]
    if FIRST_DIM + BLOCK_D > HEAD_DIM:
        return tl.load(pointers, mask=dim[None, :] < HEAD_DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_queries(
    query_ptr,
    query_stride_h,
    query_stride_s,
    token,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """[BLOCK_M, BLOCK_D], head dims from FIRST_DIM on; BLOCK_M: PADDED_GROUP * BLOCK_TOKENS.

    Heads past the group repeat the last one.
    """
    column = tl.arange(0, PADDED_GROUP * BLOCK_TOKENS)
    head_in_group = tl.minimum(column // BLOCK_TOKENS, GROUP - 1).to(tl.int64)
    token_of = tl.reshape(
        tl.broadcast_to(token[None, :], (PADDED_GROUP, BLOCK_TOKENS)),
        (PADDED_GROUP * BLOCK_TOKENS,),
    )
    offset = head_in_group * query_stride_h + token_of.to(tl.int64) * query_stride_s
    return load_rows(query_ptr + offset, FIRST_DIM, HEAD_DIM, BLOCK_D)


@triton.jit
def load_keys(
    key_ptr,
    key_stride_s,
    first_key,
    num_keys,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    FIRST_DIM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys first_key + STEP * row [BLOCK_N, BLOCK_D]; some other key where there is none.

    AFTER_ZERO promises that first_key is not negative: a bound less to check.
    """
    row = tl.minimum(tl.arange(0, BLOCK_N) * STEP, num_keys - 1 - first_key)
    if not AFTER_ZERO:
        row = tl.maximum(row, -first_key)
    base = key_ptr + first_key.to(tl.int64) * key_stride_s
    return load_rows(base + row * key_stride_s, FIRST_DIM, HEAD_DIM, BLOCK_D)


@triton.constexpr_function
def first_columns(dim):
    """BLOCK_D of the first tile of a head dim, a power of two: it may take a second."""
    return max(16, 1 << (dim.bit_length() - 1))


@triton.constexpr_function
def other_columns(dim):
    """BLOCK_D_TAIL, of the second tile; 0 without one."""
    first = max(16, 1 << (dim.bit_length() - 1))
    return width_of(dim - first) if dim > first else 0


@triton.jit
def pin_layout(x):
    """x itself. Triton may not move the conversion of what follows to before this point."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return x


@triton.jit
def multiply(
    key_tiles,
    key_ptr,
    key_stride_s,
    first_block,
    residue,
    batch,
    head,
    num_keys,
    q,
    q_tail,
    BLOCK_N: tl.constexpr,
    RESIDUES: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Key . query [BLOCK_N, columns of q]; row j is key RESIDUES (first_block + j) + residue.

    key_tiles: a descriptor of (B, Hkv, RESIDUES, N // RESIDUES, D), or None to use `key_ptr`.
    """
    if key_tiles is not None:
        k = key_tiles.load([batch, head, residue, first_block, 0])
        k = tl.reshape(k, (BLOCK_N, BLOCK_D))  # [BLOCK_N, BLOCK_D]
        return tl.dot(k, tl.trans(q), input_precision=PRECISION)
    first_key = first_block * RESIDUES + residue
    k = load_keys(  # [BLOCK_N, BLOCK_D]
        key_ptr, key_stride_s, first_key, num_keys,
        BLOCK_N, RESIDUES, AFTER_ZERO, 0, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if BLOCK_D_TAIL > 0:
        k_tail = load_keys(  # [BLOCK_N, BLOCK_D_TAIL]
            key_ptr, key_stride_s, first_key, num_keys,
            BLOCK_N, RESIDUES, AFTER_ZERO, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL,
        )  # fmt: skip
        logits = tl.dot(k_tail, tl.trans(q_tail), logits, input_precision=PRECISION)
    return logits


@triton.jit
def mask_keys(
    p,
    first_key,
    num_keys,
    position,
    start,
    BLOCK_N: tl.constexpr,
    RESIDUES: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """p [BLOCK_N, tokens], 0 where the query does not see the key; there it may be inf or NaN."""
    partly = (first_key + RESIDUES * (BLOCK_N - 1)) * STRIDE + COMPRESS - 1 > tl.min(position, 0)
    if not AFTER_ZERO:
        partly |= first_key < 0
    if DOCUMENTS:
        partly |= first_key * STRIDE < tl.max(start, 0)
    if partly:
        key = first_key + RESIDUES * tl.arange(0, BLOCK_N)
        key_mask = (key * STRIDE + COMPRESS - 1)[:, None] <= position[None, :]
        key_mask = key_mask & ((key >= 0) & (key < num_keys))[:, None]
        if DOCUMENTS:
            key_mask = key_mask & ((key * STRIDE)[:, None] >= start[None, :])
        p = tl.where(key_mask, p, 0.0)
    return p


@triton.jit
def pooled(total, p, weight, MAXIMUM: tl.constexpr):
    """The maximum so far with p, or the sum, where p counts `weight` times; NaN stays."""
    if MAXIMUM:
        return tl.maximum(total, p, tl.PropagateNan.ALL)
    return total + weight * p


@recordable
@triton.jit(
    do_not_specialize=[
        "first_query",
        "num_queries",
        "chunk_queries",
        "num_keys",
        "kv_heads",
    ]
)
def topk_scores_kernel(
    query_ptr,
    key_ptr,
    key_tiles,
    lse_ptr,
    position_ptr,
    start_ptr,
    score_ptr,
    query_strides,
    key_strides,
    lse_strides,
    position_stride_b,
    start_stride_b,
    first_query,
    chunk_queries,
    num_keys,
    kv_heads,
    width,
    pitch,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    SELECT: tl.constexpr,
    SCORED: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr,
    MAXIMUM: tl.constexpr,
):
    """Scores of a tile of queries: rows of `width` in natural order, `pitch` apart.

    MAXIMUM: of the compressed blocks that overlap a block, not the sum of Eq. 9.

    Stored are the vectors with a block that top-k may select for some query of the tile, -1 for
    other blocks in them.
    """
    PADDED_GROUP: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_D: tl.constexpr = first_columns(HEAD_DIM)
    BLOCK_D_TAIL: tl.constexpr = other_columns(HEAD_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    RESIDUES: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    LENT: tl.constexpr = 1 if LEFT > 0 else 0
    VALID: tl.constexpr = BLOCK_N - LENT
    AFTER_ZERO: tl.constexpr = INITIAL >= LENT
    MASKS_KEYS: tl.constexpr = INITIAL < LENT or LOCAL < 1 + LENT
    # Late queries have the most to do: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    row_of_batch, first_head = batch.to(tl.int64), head.to(tl.int64) * GROUP
    split, num_splits = tl.program_id(2), tl.num_programs(2)

    query = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token = first_query + tl.minimum(query, chunk_queries - 1)
    position = tl.load(position_ptr + row_of_batch * position_stride_b + token).to(tl.int32)
    own = position // SELECT
    first = tl.zeros_like(own)
    start = tl.zeros_like(own)
    if DOCUMENTS:
        start = tl.load(start_ptr + row_of_batch * start_stride_b + token).to(tl.int32)
        first = start // SELECT
    first_topk, last_topk = first + INITIAL, own - LOCAL
    # Where few are before a query's own, its blocks need no scores, or are chosen elsewhere; those
    # of initial and local blocks nobody needs.
    crowded = own - first >= SCORED
    lowest = tl.min(tl.where(crowded, first_topk, width), 0)
    # Whole vectors are read: to their end -1 marks blocks that are no candidates.
    highest = tl.max(tl.where(crowded, last_topk, -1), 0) // VECTOR * VECTOR + VECTOR - 1
    highest = tl.minimum(highest, width - 1)
    num_tiles = tl.cdiv(highest - lowest + 1, VALID)
    if split >= num_tiles:
        return

    query_ptr += row_of_batch * query_strides[0] + first_head * query_strides[1]
    key_ptr += row_of_batch * key_strides[0] + head.to(tl.int64) * key_strides[1]
    q = load_queries(  # [BLOCK_M, BLOCK_D]
        query_ptr, query_strides[1], query_strides[2], token,
        GROUP, PADDED_GROUP, BLOCK_TOKENS, 0, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    q_tail = q
    if BLOCK_D_TAIL > 0:
        q_tail = load_queries(  # [BLOCK_M, BLOCK_D_TAIL]
            query_ptr, query_strides[1], query_strides[2], token,
            GROUP, PADDED_GROUP, BLOCK_TOKENS, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL,
        )  # fmt: skip
    head_in_group = tl.arange(0, PADDED_GROUP)[:, None]
    lse_ptr += row_of_batch * lse_strides[0] + (first_head + head_in_group) * lse_strides[1]
    lse = tl.load(
        lse_ptr + token[None, :].to(tl.int64) * lse_strides[2],
        mask=(head_in_group < GROUP) & (token[None, :] >= 0),
        other=float("inf"),
    )
    lse = tl.reshape(lse, (PADDED_GROUP * BLOCK_TOKENS,)) * LOG2E  # [BLOCK_M]

    row = tl.arange(0, BLOCK_N)
    score_ptr += (tl.program_id(1) * chunk_queries + query).to(tl.int64)[None, :] * pitch
    kept = (query < chunk_queries)[None, :]
    if split == 0:
        block = lowest // VECTOR * VECTOR + tl.arange(0, VECTOR)
        tl.store(
            score_ptr + block[:, None],
            tl.full((VECTOR, BLOCK_TOKENS), -1.0, tl.float32),
            mask=(block < lowest)[:, None] & kept,
        )
    own_total = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)  # [BLOCK_N, BLOCK_TOKENS]
    lent_total = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)  # [BLOCK_N, BLOCK_TOKENS]
    steps = tl.cdiv(num_tiles - split, num_splits) * RESIDUES
    for step in tl.range(0, steps, num_stages=STAGES):
        residue = step % RESIDUES
        first_block = lowest - LENT + (split + step // RESIDUES * num_splits) * VALID
        logits = multiply(  # [BLOCK_N, BLOCK_M]
            key_tiles, key_ptr, key_strides[2], first_block, residue, batch, head, num_keys,
            q, q_tail, BLOCK_N, RESIDUES, AFTER_ZERO, HEAD_DIM, BLOCK_D, BLOCK_D_TAIL,
            PRECISION,
        )  # fmt: skip
        p = tl.exp2(logits * scale_log2 - lse[None, :])  # [BLOCK_N, BLOCK_M]
        p = tl.sum(
            tl.reshape(p, (BLOCK_N, PADDED_GROUP, BLOCK_TOKENS)), 1
        )  # [BLOCK_N, BLOCK_TOKENS]
        if MASKS_KEYS:
            p = mask_keys(
                p, first_block * RESIDUES + residue, num_keys, position, start,
                BLOCK_N, RESIDUES, AFTER_ZERO, COMPRESS, STRIDE, DOCUMENTS,
            )  # fmt: skip
        own_weight = (tl.minimum(LEFT, RESIDUES - 1 - residue) + 1).to(tl.float32)
        own_total = pooled(own_total, p, own_weight, MAXIMUM)
        if LEFT > 1:
            lent_weight = tl.maximum(residue - (RESIDUES - 1 - LEFT), 0).to(tl.float32)
            part = tl.where(lent_weight > 0.0, p, 0.0) if MAXIMUM else p
            lent_total = pooled(lent_total, part, lent_weight, MAXIMUM)
        if residue == RESIDUES - 1:
            scores = pin_layout(own_total)
            # The row above; said by way of `residue`, it takes no registers while others come.
            above = tl.maximum(row + residue - RESIDUES, 0)[:, None]
            above = tl.broadcast_to(above, (BLOCK_N, BLOCK_TOKENS))
            if LEFT == 1:
                scores = pooled(scores, tl.gather(p, above, 0), 1.0, MAXIMUM)
            if LEFT > 1:
                lent = tl.gather(pin_layout(lent_total), above, 0)
                scores = pooled(scores, lent, 1.0, MAXIMUM)
            scores = tl.where(scores > 0.0, scores, 0.0)  # NaN counts as 0
            block = first_block + row
            is_topk = (block[:, None] >= first_topk[None, :]) & (
                block[:, None] <= last_topk[None, :]
            )
            scores = tl.where(is_topk, scores, -1.0)  # [BLOCK_N, BLOCK_TOKENS]
            wanted = (row >= LENT) & (block <= highest)
            tl.store(score_ptr + block[:, None], scores, mask=wanted[:, None] & kept)
            own_total = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)  # [BLOCK_N, BLOCK_TOKENS]
            lent_total = tl.zeros((BLOCK_N, BLOCK_TOKENS), tl.float32)  # [BLOCK_N, BLOCK_TOKENS]
