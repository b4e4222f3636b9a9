"""Scores and choice in one kernel, of queries that see at most SPAN blocks.

So few that a query's scores stay in registers: no memory has to hold them, and one launch takes
the queries of all rows. A tile is the product (tokens of one head) x keys, summed over heads. Its
columns are ordered by residue, column `SPAN m + j` is compressed block `(l'/d) j + m`, so that
Eq. 9 adds columns that one thread holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.topk import config
from nsa_flex.fallback_kernels.topk.scores import first_columns, load_rows, other_columns

FAR = tl.constexpr(1 << 30)  # past any block
SPAN = tl.constexpr(config.SPAN)
STAGES = tl.constexpr(config.SPAN_STAGES)


@triton.jit
def are_highest(bits, WANTED: tl.constexpr):
    """Which the WANTED highest of each row of `bits` are, of equal ones the first."""
    # Where none is wanted this is compiled all the same, and never runs.
    SORTED: tl.constexpr = triton.next_power_of_2(max(WANTED, 1))
    number = tl.arange(0, SORTED)[None, :]
    descending = tl.topk(bits, SORTED, 1)  # [rows, SORTED]
    least = tl.sum(tl.where(number == WANTED - 1, descending, 0), 1)[:, None]  # [rows, 1]
    above, equal = bits > least, (bits == least).to(tl.int32)
    spare = WANTED - tl.sum(above.to(tl.int32), 1)[:, None]
    return above | ((equal > 0) & (tl.cumsum(equal, 1) <= spare))


@recordable
@triton.jit(do_not_specialize=["num_queries", "num_keys", "kv_heads"])
def topk_span_kernel(
    query_ptr,
    key_ptr,
    lse_ptr,
    position_ptr,
    start_ptr,
    block_ptr,
    query_strides,
    key_strides,
    lse_strides,
    position_stride_b,
    start_stride_b,
    num_queries,
    num_keys,
    kv_heads,
    scale_log2,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    ALL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """Blocks of those of TOKENS queries of a KV head that see at most SPAN; TOKENS is at most l'.

    Queries that see more than they choose are then of one document: another begins with a block.
    ALL: of others, too, which what follows the last document may hold, the first blocks they see.
    """
    BLOCK_D: tl.constexpr = first_columns(HEAD_DIM)
    BLOCK_D_TAIL: tl.constexpr = other_columns(HEAD_DIM)
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    RESIDUES: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1
    LENT: tl.constexpr = 1 if LEFT > 0 else 0
    TOPK: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    MASKS_KEYS: tl.constexpr = INITIAL < LENT or LOCAL < 1 + LENT
    batch, head = tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    row_of_batch, first_head = batch.to(tl.int64), head.to(tl.int64) * GROUP
    query = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = query < num_queries
    token = tl.minimum(query, num_queries - 1)
    position = tl.load(position_ptr + row_of_batch * position_stride_b + token).to(tl.int32)
    own = position // SELECT
    start = tl.zeros_like(own)
    if DOCUMENTS:
        start = tl.load(start_ptr + row_of_batch * start_stride_b + token).to(tl.int32)
    first = start // SELECT
    before = own - first  # blocks that a query sees before its own
    chooses = exists & (before >= NUM_SLOTS) & (before < SPAN)
    mine = exists
    if not ALL:
        mine = exists & (before < SPAN)
    lowest = tl.where(chooses, first + INITIAL, FAR)
    highest = tl.where(chooses, own - LOCAL, -1)

    block_ptr += (tl.program_id(1).to(tl.int64) * num_queries) * NUM_SLOTS
    block_ptrs = block_ptr + (query.to(tl.int64) * NUM_SLOTS)[:, None]  # [TOKENS, 1]
    slot = tl.arange(0, PADDED_SLOTS)[None, :]
    is_initial, is_local = slot < INITIAL, slot >= INITIAL + TOPK
    every = tl.where(slot <= before[:, None], first[:, None] + slot, -1)
    forced = tl.where(is_initial, first[:, None] + slot, own[:, None] - (NUM_SLOTS - 1 - slot))
    block = tl.where(chooses[:, None], forced, every)  # [TOKENS, PADDED_SLOTS]
    known = (is_initial | is_local) | (chooses == 0)[:, None]
    tl.store(block_ptrs + slot, block, mask=mine[:, None] & known & (slot < NUM_SLOTS))
    if TOPK == 0:
        return
    if tl.max(highest, 0) < 0:
        return

    # Block of column 0 of each residue: the one before the first that may be chosen lends to it.
    first_block = tl.min(lowest, 0) - LENT
    column = tl.arange(0, RESIDUES * SPAN)
    key = (first_block + column % SPAN) * RESIDUES + column // SPAN
    query_ptr += row_of_batch * query_strides[0]
    key_ptr += row_of_batch * key_strides[0] + head.to(tl.int64) * key_strides[1]
    lse_ptr += row_of_batch * lse_strides[0]
    query_ptrs = query_ptr + token.to(tl.int64) * query_strides[2]
    lse_ptrs = lse_ptr + token.to(tl.int64) * lse_strides[2]
    in_row = tl.minimum(tl.maximum(key, 0), num_keys - 1)
    key_ptrs = key_ptr + in_row.to(tl.int64) * key_strides[2]
    k = load_rows(key_ptrs, 0, HEAD_DIM, BLOCK_D)  # [RESIDUES * SPAN, BLOCK_D]
    k_tail = k
    if BLOCK_D_TAIL > 0:
        k_tail = load_rows(key_ptrs, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL)
    p = tl.zeros((TOKENS, RESIDUES * SPAN), tl.float32)  # [TOKENS, RESIDUES * SPAN]
    for i in tl.range(0, GROUP, num_stages=STAGES):
        query_head = first_head + i  # int64
        of_head = query_ptrs + query_head * query_strides[1]
        q = load_rows(of_head, 0, HEAD_DIM, BLOCK_D)  # [TOKENS, BLOCK_D]
        lse = tl.load(lse_ptrs + query_head * lse_strides[1]) * LOG2E
        logits = tl.dot(q, tl.trans(k))  # [TOKENS, RESIDUES * SPAN]
        if BLOCK_D_TAIL > 0:
            q_tail = load_rows(of_head, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL)
            logits = tl.dot(q_tail, tl.trans(k_tail), logits)
        p += tl.exp2(logits * scale_log2 - lse[:, None])

    if MASKS_KEYS:  # what a query does not see may be anything, and be among what is added
        sees = (key * STRIDE + COMPRESS - 1)[None, :] <= position[:, None]
        sees = sees & ((key >= 0) & (key < num_keys))[None, :]
        if DOCUMENTS:
            sees = sees & ((key * STRIDE)[None, :] >= start[:, None])
        p = tl.where(sees, p, 0.0)
    p = tl.reshape(p, (TOKENS, RESIDUES, SPAN))
    residue = tl.arange(0, RESIDUES)[None, :, None]
    scores = tl.sum(p * (tl.minimum(LEFT, RESIDUES - 1 - residue) + 1), 1)  # [TOKENS, SPAN]
    span = tl.arange(0, SPAN)[None, :]
    if LENT > 0:
        weight = tl.maximum(residue - (RESIDUES - 1 - LEFT), 0)
        lent = tl.sum(tl.where(weight > 0, p * weight, 0.0), 1)  # [TOKENS, SPAN]
        left = tl.broadcast_to(tl.maximum(span - 1, 0), (TOKENS, SPAN))
        scores += tl.gather(lent, left, 1)
    scores = tl.where(scores > 0.0, scores, 0.0)  # NaN counts as 0
    block = first_block + span  # [1, SPAN]
    is_topk = (block >= lowest[:, None]) & (block <= highest[:, None])
    # Scores are not negative, so that their bits have their order.
    bits = tl.where(is_topk, scores, -1.0).to(tl.int32, bitcast=True)
    taken = is_topk & are_highest(bits, TOPK)
    slot = INITIAL + tl.cumsum(taken.to(tl.int32), 1) - 1
    tl.store(block_ptrs + slot, tl.zeros_like(slot) + block, mask=taken)
