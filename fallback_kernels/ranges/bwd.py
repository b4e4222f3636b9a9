"""Gradients of range attention: dQ by tile of queries, dK and dV by tile of keys.

Ranges do not go back from one query to the next, so that the queries that see a tile of keys are
neighbours too: from the first whose range ends behind the tile's first key to the last whose range
begins before its end. Binary searches on the device find them. Nothing is added by atomics.

What no query of a tile sees may be large: its products are masked behind them, where 0 times inf
would be NaN. Every tile is masked: a second, unmasked copy of the loop makes ptxas spill and
serialise MMAs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.add_splits import Splits
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, all_have_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale, load_lse_log2
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.ranges.config import MOST_KEYS, MOST_QUERIES, RangesPlan
from nsa_flex.fallback_kernels.ranges.tiles import (
    key_bounds,
    load_ranges,
    load_tile,
    store_tile,
)


def tokens_read_around(stride: int) -> int:
    """How far beyond a document that is not short the kernels of dK and dV may read gradients.

    A tile may have keys of short documents too, `stride` tokens each, and queries of both see it.
    """
    return MOST_KEYS * stride + MOST_QUERIES


@recordable
@triton.jit
def ranges_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, first_key_ptr, end_key_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_q_ptr,
    q_strides, k_strides, v_strides, do_strides, range_stride_b,
    num_queries, num_keys, query_heads, group, scale, scale_log2,
    kinds_ptr, SELECT: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dQ (B, Sq, Hq, D) of one tile of queries and one head.

    With `kinds_ptr`, of blocks of SELECT tokens, tiles of short documents are not written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(k_ptr.dtype.element_ty)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    if kinds_ptr is not None and all_have_kind(
        kinds_ptr, b, row, num_queries, SHORT_DOCUMENT, SELECT
    ):
        return
    query = row.to(tl.int64)
    row_mask = row < num_queries
    first_key, end_key = load_ranges(
        first_key_ptr + b * range_stride_b, end_key_ptr + b * range_stride_b, row, num_queries
    )
    begin, _, _, end = key_bounds(first_key, end_key, row_mask, BLOCK_N)
    num_keys = tl.minimum(num_keys, tl.max(end_key, 0))  # what follows may hold anything

    kv_head = (head // group).to(tl.int64)
    wide_head = head.to(tl.int64)
    q_ptr += b * q_strides[0] + wide_head * q_strides[1]
    grad_out_ptr += b * do_strides[0] + wide_head * do_strides[1]
    k_ptr += b * k_strides[0] + kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + kv_head * v_strides[1]
    q = load_tile(q_ptr, query, q_strides[2], num_queries, True, HEAD_DIM, BLOCK_D)
    grad_out = load_tile(
        grad_out_ptr, query, do_strides[2], num_queries, True, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    stats = (b * num_queries + query) * query_heads + head
    lse_log2 = load_lse_log2(lse_ptr, stats, row_mask)  # [BLOCK_M]
    delta = tl.load(delta_ptr + stats, mask=row_mask, other=0.0)  # [BLOCK_M]
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key = column.to(tl.int64)
        k = load_tile(k_ptr, key, k_strides[2], num_keys, True, HEAD_DIM, BLOCK_D)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
        seen = (column[None, :] >= first_key[:, None]) & (column[None, :] < end_key[:, None])
        v = load_tile(v_ptr, key, v_strides[2], num_keys, True, VALUE_DIM, BLOCK_DV)
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        grad_logits = tl.where(seen, p * (grad_p - delta[:, None]), 0.0).to(k.dtype)
        grad_q = tl.dot(grad_logits, k, grad_q, input_precision=PRECISION)  # [BLOCK_M, BLOCK_D]
    row_stride = query_heads * HEAD_DIM
    grad_q_ptr += b * num_queries * row_stride + head * HEAD_DIM
    store_tile(grad_q_ptr, query, row_stride, num_queries, grad_q * scale, HEAD_DIM, BLOCK_D)


@recordable
@triton.jit
def ranges_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, first_key_ptr, end_key_ptr, grad_out_ptr, lse_ptr, delta_ptr,
    seeing_ptr, grad_k_ptr, grad_v_ptr,
    q_strides, k_strides, v_strides, do_strides,
    range_stride_b, seeing_stride_b,
    num_queries, num_keys, query_heads, kv_heads, heads_per_cta, query_splits, scale, scale_log2,
    kinds_ptr, SELECT: tl.constexpr, STRIDE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dK (splits, B, Sk, Hkv, D) and dV of one tile of keys, from `heads_per_cta` query heads.

    Of the queries that see the tile, a CTA takes one of `query_splits` equal parts.

    seeing: int32 (B or 1, 2, tiles): the first query that sees any key of the tile, and one past
    the last. One loop, always masked: a comparison costs less than a second copy of the loop.
    With `kinds_ptr`, of blocks of SELECT tokens, STRIDE of them a key, tiles of short documents
    are not written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(k_ptr.dtype.element_ty)
    tile = tl.program_id(0)  # early keys are seen by more queries: they start first
    head_splits = query_heads // kv_heads // heads_per_cta
    splits = head_splits * query_splits
    kv_head = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    head_split = split // query_splits
    b = tl.program_id(2).to(tl.int64)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if kinds_ptr is not None and all_have_kind(
        kinds_ptr, b, column * STRIDE, num_queries, SHORT_DOCUMENT, SELECT
    ):
        return
    key = column.to(tl.int64)
    seeing_ptr += b * seeing_stride_b + tile
    begin = tl.load(seeing_ptr) // BLOCK_M * BLOCK_M
    end = tl.load(seeing_ptr + tl.num_programs(0))
    queries = tl.cdiv(tl.cdiv(end - begin, BLOCK_M), query_splits) * BLOCK_M
    begin += split % query_splits * queries
    end = tl.minimum(end, begin + queries)

    wide_kv_head = kv_head.to(tl.int64)
    k_ptr += b * k_strides[0] + wide_kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + wide_kv_head * v_strides[1]
    k = load_tile(k_ptr, key, k_strides[2], num_keys, True, HEAD_DIM, BLOCK_D)
    v = load_tile(v_ptr, key, v_strides[2], num_keys, True, VALUE_DIM, BLOCK_DV)
    first_key_ptr += b * range_stride_b
    end_key_ptr += b * range_stride_b
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for turn in range(heads_per_cta):
        head = ((kv_head * head_splits + head_split) * heads_per_cta + turn).to(tl.int64)
        head_q_ptr = q_ptr + b * q_strides[0] + head * q_strides[1]
        head_do_ptr = grad_out_ptr + b * do_strides[0] + head * do_strides[1]
        head_stats = b * num_queries * query_heads + head
        for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
            row = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            query = row.to(tl.int64)
            stats = head_stats + query * query_heads
            first_key, end_key = load_ranges(first_key_ptr, end_key_ptr, row, num_queries)
            lse_log2 = load_lse_log2(lse_ptr, stats, row < num_queries)  # [BLOCK_M]
            delta = tl.load(delta_ptr + stats, mask=row < num_queries, other=0.0)
            q = load_tile(head_q_ptr, query, q_strides[2], num_queries, True, HEAD_DIM, BLOCK_D)
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
            p = tl.exp2(logits * scale_log2 - lse_log2[None, :])
            seen = (column[:, None] >= first_key[None, :]) & (column[:, None] < end_key[None, :])
            p = tl.where(seen, p, 0.0)
            grad_out = load_tile(
                head_do_ptr, query, do_strides[2], num_queries, True, VALUE_DIM, BLOCK_DV
            )  # [BLOCK_M, BLOCK_DV]
            grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
            grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
            grad_logits = tl.where(seen, p * (grad_p - delta[None, :]), 0.0).to(q.dtype)
            grad_k = tl.dot(grad_logits, q, grad_k, input_precision=PRECISION)
    batch = tl.num_programs(2)
    first_row = (split * batch + b) * num_keys
    row_stride = kv_heads * HEAD_DIM
    grad_k_ptr += first_row * row_stride + kv_head * HEAD_DIM
    store_tile(grad_k_ptr, key, row_stride, num_keys, grad_k * scale, HEAD_DIM, BLOCK_D)
    row_stride = kv_heads * VALUE_DIM
    grad_v_ptr += first_row * row_stride + kv_head * VALUE_DIM
    store_tile(grad_v_ptr, key, row_stride, num_keys, grad_v, VALUE_DIM, BLOCK_DV)


def seeing_queries(first_key: Tensor, end_key: Tensor, num_keys: int, block_n: int) -> Tensor:
    """int32 (B or 1, 2, tiles) of `ranges_bwd_dkdv_kernel`; neither range may go back."""
    tile = torch.arange(0, num_keys, block_n, device=first_key.device, dtype=torch.int32)
    tile = tile.expand(first_key.shape[0], -1).contiguous()
    begin = torch.searchsorted(end_key, tile, right=True, out_int32=True)  # end > first key
    end = torch.searchsorted(first_key, tile + block_n, out_int32=True)  # first <= last key
    return torch.stack((begin, end), 1)


def ranges_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    end_key: Tensor,
    lse: Tensor,
    delta: Tensor,
    grad_out: Tensor,
    scale: float,
    kinds: Tensor | None = None,
    block_size: int = 1,
    stride: int = 1,
) -> tuple[Tensor, Splits]:
    """dQ with memory (B, S, H, D), and dK and dV (B, S, H, D) by splits, which are to be added.

    lse, delta: (B, H, S) with memory (B, S, H).
    kinds: of `block_kinds` for blocks of `block_size` tokens. Gradients of short documents, whose
    queries have empty ranges, are left to other kernels. stride: tokens from one key to the next,
    for `kinds` alone.
    """
    plan = RangesPlan.of(query, key, value)
    assert plan.bwd_dkdv.block_m <= MOST_QUERIES
    assert plan.bwd_dkdv.block_n <= MOST_KEYS
    q, k, v, grad = (rows_contiguous(x) for x in (query, key, value, grad_out))
    batch, heads, num_queries, head_dim = q.shape
    kv_heads, num_keys, value_dim = v.shape[1:]
    options: dict = {"dtype": q.dtype, "device": q.device}
    grad_q = torch.empty((batch, num_queries, heads, head_dim), **options)
    sides = tuple(strides(x) for x in (q, k, v, grad))
    range_stride = first_key.stride(0)
    scales = (scale, base2_scale(scale))
    ranges_bwd_dq_kernel[(heads, cdiv(num_queries, plan.bwd_dq.block_m), batch)](
        q, k, v, first_key, end_key, grad, lse, delta, grad_q,
        *sides, range_stride, num_queries, num_keys, heads, heads // kv_heads, *scales,
        kinds, SELECT=block_size, **plan.constants(), **plan.bwd_dq.constants(),
    )  # fmt: skip
    splits = plan.head_splits * plan.query_splits
    if splits > 1:
        options["dtype"] = torch.float32
    grad_k = torch.empty((splits, batch, num_keys, kv_heads, head_dim), **options)
    grad_v = torch.empty((splits, batch, num_keys, kv_heads, value_dim), **options)
    seeing = seeing_queries(first_key, end_key, num_keys, plan.bwd_dkdv.block_n)
    seeing_stride = seeing.stride(0) if seeing.shape[0] > 1 else 0
    grid = (cdiv(num_keys, plan.bwd_dkdv.block_n), kv_heads * splits, batch)
    ranges_bwd_dkdv_kernel[grid](
        q, k, v, first_key, end_key, grad, lse, delta, seeing, grad_k, grad_v,
        *sides, range_stride, seeing_stride,
        num_queries, num_keys, heads, kv_heads, heads // kv_heads // plan.head_splits,
        plan.query_splits, *scales, kinds,
        SELECT=block_size, STRIDE=stride, **plan.constants(), **plan.bwd_dkdv.constants(),
    )  # fmt: skip
    return grad_q.transpose(1, 2), Splits(grad_k, grad_v)
