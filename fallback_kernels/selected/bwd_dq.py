"""dQ of selected attention: initial and local blocks recomputed, top-k blocks by partials."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.softmax import load_lse_log2
from nsa_flex.fallback_kernels.common.tiles import group_rows, load_masked_rows, store_rows
from nsa_flex.fallback_kernels.selected.fwd_combine import load_candidate, merge_rows_of


@triton.jit
def forced_query_gradient(
    grad, summary, position, own, line, row_ok, query_ptr, key_ptr, value_ptr, grad_out_ptr,
    lse_ptr, delta_ptr, key_stride_s, value_stride_s, num_keys, scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """`grad` plus dQ of dense candidates, before the scale."""
    q = load_masked_rows(query_ptr, line, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS)
    grad_out = load_masked_rows(grad_out_ptr, line, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS)
    lse_log2 = load_lse_log2(lse_ptr, line, row_ok)
    delta = tl.load(delta_ptr + line, mask=row_ok, other=0.0)
    for candidate in range(LOCAL + INITIAL):
        chosen = ((summary >> candidate) & 1) != 0
        if tl.max(chosen.to(tl.int32), 0) > 0:
            k, v, seen = load_candidate(
                candidate, chosen, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s,
                num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS, LOCAL,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
            p = tl.where(seen, p, 0.0)
            grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
            grad_scores = (p * (grad_p - delta[:, None])).to(k.dtype)
            grad = tl.dot(grad_scores, k, grad, input_precision=PRECISION)
    return grad


@triton.jit(do_not_specialize=["first_head", "window_start"])
def query_gradient_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, delta_ptr, partial_ptr, summary_ptr,
    grad_query_ptr,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    first_head, window_start, window_tokens, query_offset, num_queries, num_keys,
    kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, FORCED: tl.constexpr, ADDED: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ: dense candidates by recomputation, free choices by their partial results.

    FORCED: with the dense candidates. ADDED: to what is in `grad_query_ptr`.
    """
    batch, head, member, position, query, row_ok, place = merge_rows_of(
        first_head, window_start, window_tokens, query_offset, num_queries, kv_heads, GROUP,
        NUM_SLOTS, TOKENS, ROWS,
    )  # fmt: skip
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    grad_query_ptr = group_rows(grad_query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    line = query * query_heads + member
    summary = tl.load(summary_ptr + (b * kv_heads + h) * num_queries + query, mask=row_ok, other=0)
    grad = tl.zeros([ROWS, HEAD_COLUMNS], tl.float32)
    if FORCED:
        grad = forced_query_gradient(
            grad, summary, position, (window_start + tl.program_id(0) * TOKENS) // BLOCK_SIZE,
            line, row_ok,
            group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM),
            key_ptr + b * key_stride_b + h * key_stride_h,
            value_ptr + b * value_stride_b + h * value_stride_h,
            group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM),
            group_rows(lse_ptr, b, h, num_queries, kv_heads, GROUP, 1),
            group_rows(delta_ptr, b, h, num_queries, kv_heads, GROUP, 1),
            key_stride_s, value_stride_s, num_keys, scale_log2,
            BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            PRECISION, WIDE, INITIAL, LOCAL,
        )  # fmt: skip

    free = summary >> 24
    for s in tl.range(0, tl.max(free, 0), num_stages=STAGES):
        part = load_masked_rows(
            partial_ptr, place + s * GROUP, s < free, WIDE, HEAD_DIM, HEAD_COLUMNS, True
        )
        grad += part.to(tl.float32)
    grad *= scale
    if ADDED:
        there = load_masked_rows(grad_query_ptr, line, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS)
        grad += there.to(tl.float32)
    store_rows(grad_query_ptr, line, grad, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS)
