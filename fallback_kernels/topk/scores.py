"""Scores of the selectable blocks, recomputed from query, compressed keys and log-sum-exp.

A tile is the transposed product keys x (query head, token): the sum over the heads of a group then
runs over columns that one thread holds. The keys of a tile are taken one residue at a time: row j
of residue m is compressed block `(l'/d) j + m`, so that Eq. 9 adds tiles and shuffles nothing.
What block j - 1 lends to block j (compressed blocks that straddle both) is one shift of the
finished, group-summed tile; a tile's first row exists for that alone.

Where blocks are forced at both ends of a row, a free one and its left neighbour hold no compressed
block that the query does not see: nothing is masked, and keys past the end may read as anything.
Then one tensor copy brings a tile of keys, if the device has them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.topk.select import VECTOR


@triton.jit
def load_queries(
    query_ptr,
    query_stride_h,
    query_stride_s,
    token,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """[MEMBERS * TOKENS, COLUMNS] of head dims FIRST onwards; heads past the group repeat one."""
    column = tl.arange(0, MEMBERS * TOKENS)
    member = tl.minimum(column // TOKENS, GROUP - 1).to(tl.int64)
    token_of = tl.reshape(tl.broadcast_to(token[None, :], (MEMBERS, TOKENS)), (MEMBERS * TOKENS,))
    dim = FIRST + tl.arange(0, COLUMNS)
    place = member * query_stride_h + token_of.to(tl.int64) * query_stride_s
    pointers = query_ptr + place[:, None] + dim[None, :]
    if FIRST + COLUMNS > HEAD_DIM:
        return tl.load(pointers, mask=dim[None, :] < HEAD_DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def load_keys(
    key_ptr,
    key_stride_s,
    first_key,
    num_keys,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    FIRST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Keys first_key + STEP * row [ROWS, COLUMNS]; some other key where there is none.

    AFTER_ZERO promises that first_key is not negative: a bound less to check.
    """
    row = tl.minimum(tl.arange(0, ROWS) * STEP, num_keys - 1 - first_key)
    if not AFTER_ZERO:
        row = tl.maximum(row, -first_key)
    dim = FIRST + tl.arange(0, COLUMNS)
    base = key_ptr + first_key.to(tl.int64) * key_stride_s
    pointers = base + (row * key_stride_s)[:, None] + dim[None, :]
    if FIRST + COLUMNS > HEAD_DIM:
        return tl.load(pointers, mask=dim[None, :] < HEAD_DIM, other=0.0)
    return tl.load(pointers)


@triton.jit
def pin_layout(x, COMPILED: tl.constexpr):
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
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIES: tl.constexpr,
):
    """Key . query [ROWS, columns of q]; row j is key PER (first_block + j) + residue.

    `key_tiles` is a descriptor of (B, Hkv, PER, N // PER, D) if COPIES, else unused.
    """
    if COPIES:
        k = key_tiles.load([batch, head, residue, first_block, 0])
        k = tl.reshape(k, (ROWS, HEAD_COLUMNS))
        return tl.dot(k, tl.trans(q), input_precision=PRECISION)
    first_key = first_block * PER + residue
    k = load_keys(
        key_ptr, key_stride_s, first_key, num_keys,
        ROWS, PER, AFTER_ZERO, 0, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if TAIL_COLUMNS > 0:
        k_tail = load_keys(
            key_ptr, key_stride_s, first_key, num_keys,
            ROWS, PER, AFTER_ZERO, HEAD_COLUMNS, HEAD_DIM, TAIL_COLUMNS,
        )  # fmt: skip
        logits = tl.dot(k_tail, tl.trans(q_tail), logits, input_precision=PRECISION)
    return logits


@triton.jit
def hide(
    p,
    first_key,
    num_keys,
    position,
    start,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
    AFTER_ZERO: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """p [ROWS, tokens], 0 where the query does not see the key; there it may be inf or NaN."""
    partly = (first_key + PER * (ROWS - 1)) * STRIDE + COMPRESS - 1 > tl.min(position, 0)
    if not AFTER_ZERO:
        partly |= first_key < 0
    if DOCUMENTS:
        partly |= first_key * STRIDE < tl.max(start, 0)
    if partly:
        key = first_key + PER * tl.arange(0, ROWS)
        seen = (key * STRIDE + COMPRESS - 1)[:, None] <= position[None, :]
        seen = seen & ((key >= 0) & (key < num_keys))[:, None]
        if DOCUMENTS:
            seen = seen & ((key * STRIDE)[:, None] >= start[None, :])
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit(
    do_not_specialize=[
        "first_query",
        "num_queries",
        "chunk_queries",
        "num_keys",
        "kv_heads",
    ]
)
def score_kernel(
    query_ptr,
    key_ptr,
    key_tiles,
    lse_ptr,
    position_ptr,
    start_ptr,
    score_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    lse_stride_b,
    lse_stride_h,
    lse_stride_s,
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
    MEMBERS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    TAIL_COLUMNS: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    COPIES: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Scores of a tile of queries: rows of `width` in natural order, `pitch` apart.

    Written are the vectors with a free block of some query of the tile, -1 for what is not free.
    """
    PER: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    LENT: tl.constexpr = 1 if LEFT > 0 else 0
    VALID: tl.constexpr = ROWS - LENT
    AFTER_ZERO: tl.constexpr = INITIAL >= LENT
    HIDES: tl.constexpr = INITIAL < LENT or LOCAL < 1 + LENT
    # Late queries have the most to do: they go first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    row_of_batch, first_head = batch.to(tl.int64), head.to(tl.int64) * GROUP
    split, num_splits = tl.program_id(2), tl.num_programs(2)

    place = tile * TOKENS + tl.arange(0, TOKENS)
    token = first_query + tl.minimum(place, chunk_queries - 1)
    position = tl.load(position_ptr + row_of_batch * position_stride_b + token).to(tl.int32)
    own = position // SELECT
    first = tl.zeros_like(own)
    start = tl.zeros_like(own)
    if DOCUMENTS:
        start = tl.load(start_ptr + row_of_batch * start_stride_b + token).to(tl.int32)
        first = start // SELECT
    first_free, last_free = first + INITIAL, own - LOCAL
    # Where all candidates fit, nobody asks for scores; nor for those of forced blocks.
    crowded = own - first >= NUM_SLOTS
    lowest = tl.min(tl.where(crowded, first_free, width), 0)
    # Whole vectors are read: to their end -1 says that a block is not free.
    highest = tl.max(tl.where(crowded, last_free, -1), 0) // VECTOR * VECTOR + VECTOR - 1
    highest = tl.minimum(highest, width - 1)
    num_tiles = tl.cdiv(highest - lowest + 1, VALID)
    if split >= num_tiles:
        return

    query_ptr += row_of_batch * query_stride_b + first_head * query_stride_h
    key_ptr += row_of_batch * key_stride_b + head.to(tl.int64) * key_stride_h
    q = load_queries(
        query_ptr, query_stride_h, query_stride_s, token,
        GROUP, MEMBERS, TOKENS, 0, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    q_tail = q
    if TAIL_COLUMNS > 0:
        q_tail = load_queries(
            query_ptr, query_stride_h, query_stride_s, token,
            GROUP, MEMBERS, TOKENS, HEAD_COLUMNS, HEAD_DIM, TAIL_COLUMNS,
        )  # fmt: skip
    member = tl.arange(0, MEMBERS)[:, None]
    lse_ptr += row_of_batch * lse_stride_b + (first_head + member) * lse_stride_h
    lse = tl.load(
        lse_ptr + token[None, :].to(tl.int64) * lse_stride_s,
        mask=(member < GROUP) & (token[None, :] >= 0),
        other=float("inf"),
    )
    lse = tl.reshape(lse, (MEMBERS * TOKENS,)) * LOG2E

    row = tl.arange(0, ROWS)
    score_ptr += (tl.program_id(1) * chunk_queries + place).to(tl.int64)[None, :] * pitch
    kept = (place < chunk_queries)[None, :]
    if split == 0:
        block = lowest // VECTOR * VECTOR + tl.arange(0, VECTOR)
        tl.store(
            score_ptr + block[:, None],
            tl.full((VECTOR, TOKENS), -1.0, tl.float32),
            mask=(block < lowest)[:, None] & kept,
        )
    own_part = tl.zeros((ROWS, TOKENS), tl.float32)
    lent_part = tl.zeros((ROWS, TOKENS), tl.float32)
    steps = tl.cdiv(num_tiles - split, num_splits) * PER
    for step in tl.range(0, steps, num_stages=STAGES):
        residue = step % PER
        first_block = lowest - LENT + (split + step // PER * num_splits) * VALID
        logits = multiply(
            key_tiles, key_ptr, key_stride_s, first_block, residue, batch, head, num_keys,
            q, q_tail, ROWS, PER, AFTER_ZERO, HEAD_DIM, HEAD_COLUMNS, TAIL_COLUMNS,
            PRECISION, COPIES,
        )  # fmt: skip
        p = tl.exp2(logits * scale_log2 - lse[None, :])
        p = tl.sum(tl.reshape(p, (ROWS, MEMBERS, TOKENS)), 1)
        if HIDES:
            p = hide(
                p, first_block * PER + residue, num_keys, position, start,
                ROWS, PER, AFTER_ZERO, COMPRESS, STRIDE, DOCUMENTS,
            )  # fmt: skip
        own_weight = (tl.minimum(LEFT, PER - 1 - residue) + 1).to(tl.float32)
        own_part += own_weight * p
        if LEFT > 1:
            lent_weight = tl.maximum(residue - (PER - 1 - LEFT), 0).to(tl.float32)
            lent_part += lent_weight * p
        if residue == PER - 1:
            scores = pin_layout(own_part, COMPILED)
            # The row above; said by way of `residue`, it takes no registers while others come.
            above = tl.maximum(row + residue - PER, 0)[:, None]
            above = tl.broadcast_to(above, (ROWS, TOKENS))
            if LEFT == 1:
                scores += tl.gather(p, above, 0)
            if LEFT > 1:
                scores += tl.gather(pin_layout(lent_part, COMPILED), above, 0)
            scores = tl.where(scores > 0.0, scores, 0.0)  # NaN counts as 0
            block = first_block + row
            free = (block[:, None] >= first_free[None, :]) & (block[:, None] <= last_free[None, :])
            scores = tl.where(free, scores, -1.0)
            wanted = (row >= LENT) & (block <= highest)
            tl.store(score_ptr + block[:, None], scores, mask=wanted[:, None] & kept)
            own_part = tl.zeros((ROWS, TOKENS), tl.float32)
            lent_part = tl.zeros((ROWS, TOKENS), tl.float32)
