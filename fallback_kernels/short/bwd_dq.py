"""Backward of short documents by query: gates, softmax stats of the key kernel, and dQ.

Every branch adds `p (a dP - b)` to the gradient of a logit, with `a` its gate, `b` its gate times
delta and `p = exp(logit - L)`. A window on the selected branch's keys has the smaller log-sum-exp:
its weights times `f = exp(L_sliding - L_selected) <= 1` are the selected branch's, so that both
together are one such term, with `a = g_sliding + f g_selected` and `b` likewise.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.softmax import base2_scale, load_lse_log2
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv
from nsa_flex.fallback_kernels.ranges.config import RangesPlan
from nsa_flex.fallback_kernels.ranges.tiles import key_bounds, load_tile, store_tile
from nsa_flex.fallback_kernels.short.fwd import ShortResults
from nsa_flex.fallback_kernels.short.spans import block_span, token_spans

NEAR, FAR, COMPRESSED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUM_STATS = 9  # L, a and b of near keys, far keys and compressed keys


@triton.jit
def _delta(ptr, grad_out, query, row_stride, num_tokens, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """rowsum(out * grad_out) [BLOCK_M] of a branch's output: its gate's gradient, too."""
    out = load_tile(ptr, query, row_stride, num_tokens, True, DIM, BLOCK)  # [BLOCK_M, BLOCK_DV]
    return tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)


@triton.jit
def _store_stats(ptr, span: tl.constexpr, plane, lse_log2, a, b, row_mask):
    """The three numbers of a row that `short_bwd_dkdv_kernel` reads of a span."""
    ptr += 3 * span * plane
    tl.store(ptr, lse_log2, mask=row_mask)
    tl.store(ptr + plane, a, mask=row_mask)
    tl.store(ptr + 2 * plane, b, mask=row_mask)


@triton.jit
def _add_span(
    grad_q, q, grad_out, k_ptr, v_ptr, k_stride, v_stride, first_key, end_key, row_mask,
    num_keys, lse_log2, a, b, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ / scale [BLOCK_M, BLOCK_D] with what the keys [first_key, end_key) of each row add."""
    begin, _, _, end = key_bounds(first_key, end_key, row_mask, BLOCK_N)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key = column.to(tl.int64)
        k = load_tile(k_ptr, key, k_stride, num_keys, True, HEAD_DIM, BLOCK_D)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
        seen = (column[None, :] >= first_key[:, None]) & (column[None, :] < end_key[:, None])
        v = load_tile(v_ptr, key, v_stride, num_keys, True, VALUE_DIM, BLOCK_DV)
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        grad_logits = tl.where(seen, p * (a[:, None] * grad_p - b[:, None]), 0.0).to(k.dtype)
        grad_q = tl.dot(grad_logits, k, grad_q, input_precision=PRECISION)
    return grad_q


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "reach", "window"])
def short_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, window_k_ptr, window_v_ptr, ck_ptr, cv_ptr, gate_ptr,
    document_start_ptr, grad_out_ptr, compressed_ptr, selected_ptr, sliding_ptr,
    compressed_lse_ptr, selected_lse_ptr, sliding_lse_ptr,
    grad_q_ptr, grad_gate_ptr, stats_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s,
    window_k_stride_b, window_k_stride_h, window_k_stride_s,
    window_v_stride_b, window_v_stride_h, window_v_stride_s,
    ck_stride_b, ck_stride_h, ck_stride_s, cv_stride_b, cv_stride_h, cv_stride_s,
    do_stride_b, do_stride_h, do_stride_s,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    lse_stride_b, lse_stride_h, lse_stride_s,
    num_tokens, num_blocks, query_heads, group, reach, window, scale, scale_log2,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ (B, S, Hq, D), gradients of the gates and softmax stats of a tile of one head's queries.

    stats: float32 (9, B, Hq, S), three of each span of keys.
    """
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late queries see more: they start first
    b = tl.program_id(2).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = row.to(tl.int64)
    row_mask = row < num_tokens
    if document_start_ptr is not None:
        document_start_ptr += b * num_tokens
    first_key, window_first, end_key = token_spans(
        document_start_ptr, row, num_tokens, reach, window
    )

    kv_head = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    q_ptr += b * q_stride_b + wide_head * q_stride_h
    grad_out_ptr += b * do_stride_b + wide_head * do_stride_h
    k_ptr += b * k_stride_b + kv_head * k_stride_h
    v_ptr += b * v_stride_b + kv_head * v_stride_h
    window_k_ptr += b * window_k_stride_b + kv_head * window_k_stride_h
    window_v_ptr += b * window_v_stride_b + kv_head * window_v_stride_h
    ck_ptr += b * ck_stride_b + kv_head * ck_stride_h
    cv_ptr += b * cv_stride_b + kv_head * cv_stride_h
    first_row = b * num_tokens * query_heads + head
    row_stride = query_heads * VALUE_DIM
    stats = first_row + query * query_heads  # [BLOCK_M]
    grad_out = load_tile(
        grad_out_ptr, query, do_stride_s, num_tokens, True, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    delta_compressed = _delta(
        compressed_ptr + first_row * VALUE_DIM, grad_out, query, row_stride, num_tokens,
        VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    delta_selected = _delta(
        selected_ptr + first_row * VALUE_DIM, grad_out, query, row_stride, num_tokens,
        VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    delta_sliding = _delta(
        sliding_ptr + first_row * VALUE_DIM, grad_out, query, row_stride, num_tokens,
        VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    grad_gate_ptr += 3 * stats
    element = grad_gate_ptr.dtype.element_ty
    tl.store(grad_gate_ptr, delta_compressed.to(element), mask=row_mask)
    tl.store(grad_gate_ptr + 1, delta_selected.to(element), mask=row_mask)
    tl.store(grad_gate_ptr + 2, delta_sliding.to(element), mask=row_mask)

    gate_ptr += b * gate_stride_b + wide_head * gate_stride_h + query * gate_stride_s
    gate = tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)  # [BLOCK_M]
    selected_gate = tl.load(gate_ptr + gate_stride_c, mask=row_mask, other=0.0).to(tl.float32)
    near_a = tl.load(gate_ptr + 2 * gate_stride_c, mask=row_mask, other=0.0).to(tl.float32)
    lse_row = b * lse_stride_b + wide_head * lse_stride_h + query * lse_stride_s
    compressed_lse = load_lse_log2(compressed_lse_ptr, lse_row, row_mask)
    selected_lse = load_lse_log2(selected_lse_ptr, stats, row_mask)
    sliding_lse = load_lse_log2(sliding_lse_ptr, stats, row_mask)
    near_b = near_a * delta_sliding
    far_b = selected_gate * delta_selected
    far_end = end_key
    if SHARED:
        far_end = window_first
        factor = tl.exp2(sliding_lse - selected_lse)
        # Not NaN where a document is so large that it has no finite results: p may be 0 there.
        factor = tl.where(factor <= 1.0, factor, 1.0)
        near_a += factor * selected_gate
        near_b += factor * far_b
    plane = tl.num_programs(2).to(tl.int64) * query_heads * num_tokens
    stats_ptr += (b * query_heads + head) * num_tokens + query
    _store_stats(stats_ptr, NEAR, plane, sliding_lse, near_a, near_b, row_mask)
    _store_stats(stats_ptr, FAR, plane, selected_lse, selected_gate, far_b, row_mask)
    compressed_b = gate * delta_compressed
    _store_stats(stats_ptr, COMPRESSED, plane, compressed_lse, gate, compressed_b, row_mask)

    q = load_tile(q_ptr, query, q_stride_s, num_tokens, True, HEAD_DIM, BLOCK_D)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_block, end_block = block_span(
        first_key, row, num_tokens, num_blocks, COMPRESS, STRIDE
    )  # [BLOCK_M] each
    grad_q = _add_span(
        grad_q, q, grad_out, ck_ptr, cv_ptr, ck_stride_s, cv_stride_s,
        first_block, end_block, row_mask, num_blocks, compressed_lse, gate, compressed_b,
        scale_log2, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
    )  # fmt: skip
    grad_q = _add_span(
        grad_q, q, grad_out, k_ptr, v_ptr, k_stride_s, v_stride_s,
        first_key, far_end, row_mask, num_tokens, selected_lse, selected_gate, far_b,
        scale_log2, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
    )  # fmt: skip
    grad_q = _add_span(
        grad_q, q, grad_out, window_k_ptr, window_v_ptr, window_k_stride_s, window_v_stride_s,
        window_first, end_key, row_mask, num_tokens, sliding_lse, near_a, near_b,
        scale_log2, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
    )  # fmt: skip
    row_stride = query_heads * HEAD_DIM
    store_tile(
        grad_q_ptr + first_row * HEAD_DIM, query, row_stride, num_tokens, grad_q * scale,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip


class QueryGradients(NamedTuple):
    """What `query_gradients` returns."""

    query: Tensor  # (B, S, Hq, D)
    gates: Tensor  # (B, S, Hq, 3)
    stats: Tensor  # float32 (9, B, Hq, S), for the gradients of keys and values


def query_gradients(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    reach: int,
) -> QueryGradients:
    """Gradients of queries and gates; `grad` (B, Hq, S, Dv), the others as of `short_forward`."""
    query, key, value, compressed_key, compressed_value, gates = tensors
    plan = RangesPlan.of(query, key, value)
    q, k, v, wk, wv, ck, cv, do = (
        rows_contiguous(x)
        for x in (
            *(query, key, value, *(own or (key, value)), compressed_key, compressed_value, grad),
        )
    )
    batch, heads, tokens, dim = q.shape
    grad_q = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
    grad_gates = gates.new_empty((batch, tokens, heads, 3))
    stats_shape = (NUM_STATS, batch, heads, tokens)
    stats = torch.empty(stats_shape, dtype=torch.float32, device=q.device)
    short_bwd_dq_kernel[(heads, cdiv(tokens, plan.bwd_dq.block_m), batch)](
        q, k, v, wk, wv, ck, cv, gates, document_start, do,
        results.compressed, results.selected, results.sliding,
        results.compressed_lse, results.selected_lse, results.sliding_lse,
        grad_q, grad_gates, stats,
        *(stride for x in (q, k, v, wk, wv, ck, cv, do) for stride in strides(x)),
        *gates.stride(), *results.compressed_lse.stride(),
        tokens, ck.shape[2], heads, heads // k.shape[1], reach, min(config.window_size, tokens),
        scale, base2_scale(scale),
        COMPRESS=config.compress_block_size, STRIDE=config.compress_stride, SHARED=own is None,
        **plan.constants(), **plan.bwd_dq.constants(),
    )  # fmt: skip
    return QueryGradients(grad_q, grad_gates, stats)
