"""Log-sum-exp of the compressed branch, for callers that have none of float32 accuracy."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.softmax import LOG2E
from nsa_flex.fallback_kernels.topk.scores import load_keys, load_queries


@triton.jit(do_not_specialize=["num_queries", "num_keys", "kv_heads"])
def lse_kernel(
    query_ptr,
    key_ptr,
    lse_ptr,
    position_ptr,
    start_ptr,
    query_stride_b,
    query_stride_h,
    query_stride_s,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    position_stride_b,
    start_stride_b,
    num_queries,
    num_keys,
    kv_heads,
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
    DOCUMENTS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Natural log-sum-exp (splits, B, Hq, Sq) of every num_splits-th tile of keys."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    head = (tl.program_id(1) % kv_heads).to(tl.int64)
    split, num_splits = tl.program_id(2), tl.num_programs(2)

    place = tile * TOKENS + tl.arange(0, TOKENS)
    token = tl.minimum(place, num_queries - 1)
    position = tl.load(position_ptr + batch * position_stride_b + token).to(tl.int32)
    start = tl.zeros_like(position)
    if DOCUMENTS:
        start = tl.load(start_ptr + batch * start_stride_b + token).to(tl.int32)
    query_ptr += batch * query_stride_b + head * GROUP * query_stride_h
    key_ptr += batch * key_stride_b + head * key_stride_h
    q = load_queries(
        query_ptr, query_stride_h, query_stride_s, token,
        GROUP, MEMBERS, TOKENS, 0, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    if TAIL_COLUMNS > 0:
        q_tail = load_queries(
            query_ptr, query_stride_h, query_stride_s, token,
            GROUP, MEMBERS, TOKENS, HEAD_COLUMNS, HEAD_DIM, TAIL_COLUMNS,
        )  # fmt: skip

    row = tl.arange(0, ROWS)
    least = tl.min(start, 0) // STRIDE
    # Compressed blocks that end at or before the last query.
    visible = tl.maximum(tl.max(position, 0) + STRIDE - COMPRESS + 1, 0) // STRIDE
    num_tiles = tl.cdiv(tl.minimum(visible, num_keys) - least, ROWS)
    top = tl.full((MEMBERS, TOKENS), float("-inf"), tl.float32)
    total = tl.zeros((MEMBERS, TOKENS), tl.float32)
    for step in tl.range(split, num_tiles, num_splits, num_stages=STAGES):
        first_key = least + step * ROWS
        k = load_keys(
            key_ptr, key_stride_s, first_key, num_keys,
            ROWS, 1, True, 0, HEAD_DIM, HEAD_COLUMNS,
        )  # fmt: skip
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        if TAIL_COLUMNS > 0:
            k_tail = load_keys(
                key_ptr, key_stride_s, first_key, num_keys,
                ROWS, 1, True, HEAD_COLUMNS, HEAD_DIM, TAIL_COLUMNS,
            )  # fmt: skip
            logits = tl.dot(k_tail, tl.trans(q_tail), logits, input_precision=PRECISION)
        key = first_key + row
        seen = (key * STRIDE + COMPRESS - 1)[:, None] <= position[None, :]
        seen = seen & (key < num_keys)[:, None]
        if DOCUMENTS:
            seen = seen & ((key * STRIDE)[:, None] >= start[None, :])
        logits = tl.reshape(logits * scale_log2, (ROWS, MEMBERS, TOKENS))
        logits = tl.where(seen[:, None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[None, :, :]), 0)
        top = new_top
    member = tl.arange(0, MEMBERS)[:, None]
    lse = tl.where(total > 0.0, (top + tl.log2(total)) / LOG2E, float("-inf"))
    part = (split * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    lse_ptr += (part * GROUP + member) * num_queries + place[None, :]
    tl.store(lse_ptr, lse, mask=(member < GROUP) & (place[None, :] < num_queries))
