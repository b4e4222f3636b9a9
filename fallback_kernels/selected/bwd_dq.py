"""dQ of selected attention: initial and local blocks recomputed, top-k blocks by partials."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_masked_rows,
    precision_of,
    store_rows,
    width_of,
)
from nsa_flex.fallback_kernels.selected.fwd_combine import combine_tile_rows, load_initial_or_local
from nsa_flex.fallback_kernels.selected.tiles import last_key, row_offset


@triton.jit
def initial_local_dq(
    grad, bitmask, position, own, query_row, row_mask, query_ptr, key_ptr, value_ptr, grad_out_ptr,
    stats_ptr, key_stride_s, value_stride_s, num_keys, scale_log2,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """`grad` plus dQ of initial and local blocks, before the scale."""
    q = load_masked_rows(
        query_ptr, query_row, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    grad_out = load_masked_rows(
        grad_out_ptr, query_row, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    stats_ptr += query_row * 2
    lse_log2 = tl.load(stats_ptr, mask=row_mask, other=float("inf"))  # [BLOCK_M]
    delta = tl.load(stats_ptr + 1, mask=row_mask, other=0.0)  # [BLOCK_M]
    for bit in range(LOCAL + INITIAL):
        selected = ((bitmask >> bit) & 1) != 0
        if tl.max(selected.to(tl.int32), 0) > 0:
            k, v, seen = load_initial_or_local(
                bit, selected, position, own, key_ptr, value_ptr, key_stride_s, value_stride_s,
                num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, LOCAL,
            )  # fmt: skip
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
            p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
            p = tl.where(seen, p, 0.0)
            grad_p = tl.dot(
                grad_out, tl.trans(v), input_precision=PRECISION
            )  # [BLOCK_M, BLOCK_SIZE]
            grad_scores = (p * (grad_p - delta[:, None])).to(k.dtype)
            grad = tl.dot(grad_scores, k, grad, input_precision=PRECISION)
    return grad


@recordable
@triton.jit(do_not_specialize=["first_head", "chunk_start"])
def selected_bwd_dq_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, stats_ptr, partial_ptr, bitmask_ptr,
    offsets_ptr, grad_query_ptr,
    key_strides, value_strides,
    first_head, chunk_start, chunk_tokens, query_offset, num_queries, num_keys,
    kv_heads, scale, scale_log2, kinds_ptr,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, INT64_OFFSETS: tl.constexpr, INITIAL_LOCAL: tl.constexpr,
    ADDED: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ: initial and local blocks recomputed, partial results of the top-k blocks added.

    `stats_ptr`: as in the kernel of dK and dV.
    INITIAL_LOCAL: with the initial and local blocks. ADDED: to what is in `grad_query_ptr`.
    With `kinds_ptr`, results of short documents stay as they are; without an offset.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    query_offset, chunk_start = row_offset(
        offsets_ptr, first_head + tl.program_id(1), query_offset, chunk_start, BLOCK_SIZE
    )
    num_keys = last_key(offsets_ptr, query_offset, num_queries, num_keys)
    batch, head, head_in_group, position, query, row_mask, offset = combine_tile_rows(
        first_head, chunk_start, chunk_tokens, query_offset, num_queries, kv_heads, GROUP,
        NUM_SLOTS, BLOCK_TOKENS, BLOCK_M,
    )  # fmt: skip
    if kinds_ptr is not None:
        row_mask &= ~has_kind(kinds_ptr, batch, query, num_queries, SHORT_DOCUMENT, BLOCK_SIZE)
        if tl.max(row_mask.to(tl.int32), 0) == 0:
            return
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    grad_query_ptr = group_rows(grad_query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    query_row = query * query_heads + head_in_group
    bitmask = tl.load(
        bitmask_ptr + (b * kv_heads + h) * num_queries + query, mask=row_mask, other=0
    )
    grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)  # [BLOCK_M, BLOCK_D]
    if INITIAL_LOCAL:
        grad = initial_local_dq(
            grad, bitmask, position, (chunk_start + tl.program_id(0) * BLOCK_TOKENS) // BLOCK_SIZE,
            query_row, row_mask,
            group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM),
            key_ptr + b * key_strides[0] + h * key_strides[1],
            value_ptr + b * value_strides[0] + h * value_strides[1],
            group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM),
            group_rows(stats_ptr, b, h, num_queries, kv_heads, GROUP, 2),
            key_strides[2], value_strides[2], num_keys, scale_log2,
            BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            PRECISION, INT64_OFFSETS, INITIAL, LOCAL,
        )  # fmt: skip

    num_topk = bitmask >> 24
    for s in tl.range(0, tl.max(num_topk, 0), num_stages=STAGES):
        partial = load_masked_rows(  # [BLOCK_M, BLOCK_D]
            partial_ptr, offset + s * GROUP, s < num_topk, INT64_OFFSETS, HEAD_DIM, BLOCK_D, True
        )
        grad += partial.to(tl.float32)
    grad *= scale
    if ADDED:
        earlier = load_masked_rows(
            grad_query_ptr, query_row, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D
        )
        grad += earlier.to(tl.float32)
    store_rows(grad_query_ptr, query_row, grad, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D)
