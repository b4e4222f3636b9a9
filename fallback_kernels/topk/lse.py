"""Log-sum-exp of the compressed branch, for callers that have none of float32 accuracy.

A tile is transposed, keys x (head in group, token), without values: hence not
`online_softmax_update`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.common.tiles import precision_of
from nsa_flex.fallback_kernels.topk.scores import (
    first_columns,
    load_keys,
    load_queries,
    other_columns,
)


@recordable
@triton.jit(do_not_specialize=["num_queries", "num_keys", "kv_heads"])
def compressed_lse_kernel(
    query_ptr,
    key_ptr,
    lse_ptr,
    position_ptr,
    start_ptr,
    query_strides,
    key_strides,
    position_stride_b,
    start_stride_b,
    num_queries,
    num_keys,
    kv_heads,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COMPRESS: tl.constexpr,
    STRIDE: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Natural log-sum-exp (splits, B, Hq, Sq) of every num_splits-th tile of keys."""
    PADDED_GROUP: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_D: tl.constexpr = first_columns(HEAD_DIM)
    BLOCK_D_TAIL: tl.constexpr = other_columns(HEAD_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = (tl.program_id(1) % kv_heads).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)

    query = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token = tl.minimum(query, num_queries - 1)
    position = tl.load(position_ptr + batch * position_stride_b + token).to(tl.int32)
    start = tl.zeros_like(position)
    if DOCUMENTS:
        start = tl.load(start_ptr + batch * start_stride_b + token).to(tl.int32)
    query_ptr += batch * query_strides[0] + head * GROUP * query_strides[1]
    key_ptr += batch * key_strides[0] + head * key_strides[1]
    q = load_queries(  # [BLOCK_M, BLOCK_D]
        query_ptr, query_strides[1], query_strides[2], token,
        GROUP, PADDED_GROUP, BLOCK_TOKENS, 0, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if BLOCK_D_TAIL > 0:
        q_tail = load_queries(
            query_ptr, query_strides[1], query_strides[2], token,
            GROUP, PADDED_GROUP, BLOCK_TOKENS, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL,
        )  # fmt: skip

    row = tl.arange(0, BLOCK_N)
    least = tl.min(start, 0) // STRIDE
    # Compressed blocks that end at or before the last query.
    visible = tl.maximum(tl.max(position, 0) + STRIDE - COMPRESS + 1, 0) // STRIDE
    num_tiles = tl.cdiv(tl.minimum(visible, num_keys) - least, BLOCK_N)
    row_max = tl.full(
        (PADDED_GROUP, BLOCK_TOKENS), float("-inf"), tl.float32
    )  # [PADDED_GROUP, BLOCK_TOKENS]
    row_sum = tl.zeros((PADDED_GROUP, BLOCK_TOKENS), tl.float32)  # [PADDED_GROUP, BLOCK_TOKENS]
    for step in tl.range(split, num_tiles, num_splits, num_stages=STAGES):
        first_key = least + step * BLOCK_N
        k = load_keys(  # [BLOCK_N, BLOCK_D]
            key_ptr, key_strides[2], first_key, num_keys,
            BLOCK_N, 1, True, 0, HEAD_DIM, BLOCK_D,
        )  # fmt: skip
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if BLOCK_D_TAIL > 0:
            k_tail = load_keys(
                key_ptr, key_strides[2], first_key, num_keys,
                BLOCK_N, 1, True, BLOCK_D, HEAD_DIM, BLOCK_D_TAIL,
            )  # fmt: skip
            logits = tl.dot(k_tail, tl.trans(q_tail), logits, input_precision=PRECISION)
        key = first_key + row
        key_mask = (key * STRIDE + COMPRESS - 1)[:, None] <= position[None, :]
        key_mask = key_mask & (key < num_keys)[:, None]
        if DOCUMENTS:
            key_mask = key_mask & ((key * STRIDE)[:, None] >= start[None, :])
        logits = tl.reshape(
            logits * scale_log2, (BLOCK_N, PADDED_GROUP, BLOCK_TOKENS)
        )  # [BLOCK_N, PADDED_GROUP, BLOCK_TOKENS]
        logits = tl.where(key_mask[:, None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - base) + tl.sum(tl.exp2(logits - base[None, :, :]), 0)
        row_max = new_max
    head_in_group = tl.arange(0, PADDED_GROUP)[:, None]
    lse = tl.where(
        row_sum > 0.0, (row_max + tl.log2(row_sum)) / LOG2E, float("-inf")
    )  # [PADDED_GROUP, BLOCK_TOKENS]
    lse_row = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    lse_ptr += (lse_row * GROUP + head_in_group) * num_queries + query[None, :]
    tl.store(lse_ptr, lse, mask=(head_in_group < GROUP) & (query[None, :] < num_queries))
