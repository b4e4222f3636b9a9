"""dK and dV of the core: the sliding branch, and the local blocks of the selected branch.

A CTA holds a key tile; the queries whose window it lies in stream past, head by head. For the
first of these queries the tile's block is a local block of the selected branch: where both
branches have the same keys, logits and `dO v^T` are the same, and the sum of both probabilities is
multiplied once. The selected branch's sums over its top-k blocks are added at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.add_splits import Splits
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, all_have_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.fused.bwd_dq import InitialLocal, QueryRows, first_local_key
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, last_queries, stats_descriptor
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    is_visible,
    load_head_tile,
    load_key_value,
    load_rows_at,
    load_stats,
    store_rows_at,
)


def key_gradients(
    rows: QueryRows,
    stats: Tensor,
    selected_sums: tuple[Tensor, Tensor] | None,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    initial_local: InitialLocal,
    window_size: int,
    scale: float,
    kinds: Tensor | None = None,
) -> Splits:
    """dK and dV of the sliding branch and the local blocks, plus `selected_sums`, by splits.

    Each (splits, B, Sk, Hkv, D), to be added.

    Args:
        stats: of `query_gradients`.
        selected_sums: float32 (B, tokens, Hkv, D) and (B, tokens, Hkv, Dv), contiguous; Sk tokens
            or more.
        key, value: of the sliding branch, (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); the queries are
            the last tokens.
        document_start: int32 (B, Sk), contiguous, first key of each query's document, never
            decreasing along a row; None for one document.
        initial_local: where it has any, the selected branch has the same keys and values.
        kinds: of `block_kinds`; results of short documents are left to other kernels.
    """
    key, value = (rows_contiguous(x) for x in (key, value))
    query, grad = (x.transpose(1, 2) for x in (rows.query, rows.grad))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.dkdv_tiles()
    splits = plan.head_splits(tiles)
    dtype = key.dtype if splits == 1 else torch.float32
    num_keys = key.shape[2]
    shape = (splits, plan.batch, num_keys, plan.kv_heads)
    grad_key = key.new_empty((*shape, plan.head_dim), dtype=dtype)
    grad_value = value.new_empty((*shape, plan.value_dim), dtype=dtype)
    local_block_m = max(16, tiles.block_m // 2)
    key_ctas = plan.batch * plan.kv_heads * cdiv(num_keys, tiles.block_n)
    fused_bwd_dkdv_kernel[(key_ctas * splits,)](
        query,
        key,
        value,
        grad,
        stats,
        descriptor(query, tiles.block_m),
        descriptor(key, tiles.block_n),
        descriptor(value, tiles.block_n),
        descriptor(grad, tiles.block_m),
        stats_descriptor(stats, tiles.block_m),
        descriptor(query, local_block_m),
        descriptor(grad, local_block_m),
        stats_descriptor(stats, local_block_m),
        document_start,
        kinds,
        None if document_start is None else last_queries(document_start, tiles.block_n),
        *((None, None) if selected_sums is None else selected_sums),
        grad_key,
        grad_value,
        strides(query),
        strides(key),
        strides(value),
        strides(grad),
        stats.stride(1),
        plan.tokens,
        num_keys,
        0 if selected_sums is None else selected_sums[0].shape[1],
        min(window_size, num_keys),
        plan.kv_heads,
        scale,
        base2_scale(scale),
        BLOCK_SIZE=initial_local.block_size,
        LOCAL=initial_local.num_local,
        LOCAL_BLOCK_M=local_block_m,
        SPLITS=splits,
        OFFSET=num_keys > plan.tokens,
        **plan.constants(tiles),
    )
    return Splits(grad_key, grad_value)


class GatedStats(NamedTuple):
    """`stats` of `query_gradients`, of one batch row, inside a kernel."""

    desc: Any  # a tensor descriptor for TMA, or None to load by `ptr`
    ptr: Any
    b: Any
    query_heads: Any
    stride_h: Any
    num_tokens: Any


@triton.jit
def load_gated_stats(stats, kind, head, first, BLOCK_M: tl.constexpr):
    """One of a head's four statistics [BLOCK_M] for the tokens from `first` on."""
    row = kind * stats.query_heads + head
    stride_b = 4 * stats.query_heads * stats.stride_h
    return load_stats(
        stats.desc, stats.ptr, stats.b, row, stride_b, stats.stride_h, first,
        stats.num_tokens, BLOCK_M,
    )  # fmt: skip


@triton.jit
def gated_probabilities(logits, lse, scale_log2):
    """gate * softmax [BLOCK_N, BLOCK_M] of transposed logits; the last bit of `lse` is the sign of
    the gate.
    """
    p = tl.exp2(logits * scale_log2 - lse[None, :])
    sign = lse.to(tl.int32, bitcast=True) << 31
    return (p.to(tl.int32, bitcast=True) ^ sign[None, :]).to(tl.float32, bitcast=True)


@triton.jit
def in_document(document_start_ptr, token, key, stop, num_tokens, ONE_DOCUMENT: tl.constexpr):
    """Whether keys are in the documents of the queries at `token`: [BLOCK_N or 1, BLOCK_M].

    ONE_DOCUMENT: all keys are in one, whose queries end before `stop`.
    """
    if ONE_DOCUMENT:
        same = (token < stop)[None, :]
    else:
        first_key = tl.load(
            document_start_ptr + token, mask=token < num_tokens, other=2147483647
        )  # [BLOCK_M]
        same = key[:, None] >= first_key[None, :]
    return same


@recordable
@triton.jit(do_not_specialize=["num_tokens", "num_keys", "sum_tokens", "window"])
def fused_bwd_dkdv_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, stats_ptr,
    query_desc, key_desc, value_desc, grad_out_desc, stats_desc,
    local_query_desc, local_grad_out_desc, local_stats_desc,
    document_start_ptr, kinds_ptr, last_query_ptr,
    sum_key_ptr, sum_value_ptr, grad_key_ptr, grad_value_ptr,
    query_strides, key_strides, value_strides, grad_out_strides,
    stats_stride_h, num_tokens, num_keys, sum_tokens, window, kv_heads, scale, scale_log2,
    BLOCK_SIZE: tl.constexpr, LOCAL: tl.constexpr, LOCAL_BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, STAGES: tl.constexpr, SPLITS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """dV_j = sum_c gate_c p_cj dO and dK_j = scale * sum_c gate_c p_cj (dO v_j - delta_c) q.

    Logits are transposed, [BLOCK_N, BLOCK_M]: probabilities then are the left factors of both
    products as they are in registers. Rows past the last token are read as 0: their probabilities
    are multiplied by zeros only. With documents, last_query is what `last_queries` finds.

    The query tiles with local blocks come first, of all heads, in a loop of their own: the second
    set of probabilities takes registers that the other loop does not have.

    The SPLITS CTAs of a key tile share the query heads; gradients are (SPLITS, B, Sk, Hkv, ·).
    OFFSET: whether there are more keys than tokens, of which the queries are the last. `key` and
    `start` count keys, `token` counts queries.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    HEADS: tl.constexpr = GROUP // SPLITS
    tiles = (num_keys + BLOCK_N - 1) // BLOCK_N
    cta = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    b = cta // tiles // kv_heads
    h = cta // tiles % kv_heads
    start = cta % tiles * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if kinds_ptr is not None and all_have_kind(
        kinds_ptr, b, key, num_tokens, SHORT_DOCUMENT, BLOCK_SIZE
    ):
        return
    keys = HeadRows(key_desc, key_ptr, b, h, key_strides, num_keys)
    values = HeadRows(value_desc, value_ptr, b, h, value_strides, num_keys)
    queries = HeadRows(query_desc, query_ptr, b, h, query_strides, num_tokens)
    grad_outs = HeadRows(grad_out_desc, grad_out_ptr, b, h, grad_out_strides, num_tokens)
    k, v = load_key_value(
        keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    query_heads = kv_heads * GROUP
    first_head = h * GROUP + split * HEADS
    begin, past = start, 0  # the first query that may see the tile, and keys before query 0
    stop = tl.minimum(start + BLOCK_N - 1 + window, num_keys)
    if OFFSET:
        past = num_keys - num_tokens
        begin = tl.maximum(start - past, 0) // 4 * 4  # TMA reads statistics by 16 bytes
        stop -= past
    DOCUMENTS: tl.constexpr = document_start_ptr is not None
    # Of a key tile in one block, and so in one document, all queries before `stop` are in it.
    ONE_DOCUMENT: tl.constexpr = BLOCK_SIZE % BLOCK_N == 0
    if DOCUMENTS:
        document_start_ptr += b.to(tl.int64) * num_keys + past
        last_query = tl.load(last_query_ptr + b.to(tl.int64) * tiles + cta % tiles)
        stop = tl.minimum(stop, last_query - past)
    tiles_per_head = (stop - begin + BLOCK_M - 1) // BLOCK_M
    if OFFSET:
        tiles_per_head = tl.maximum(tiles_per_head, 0)
    local_tiles = 0
    # The first iteration's loads are prepared even where there is none: dividing by 0 there would
    # let the compiler assume that there is one, and start them. Hence the divisors of both loops.
    if LOCAL > 0:
        # Queries from here on have none of the keys in a local block.
        local_stop = ((start + BLOCK_N - 1) // BLOCK_SIZE + LOCAL) * BLOCK_SIZE
        local_stop = tl.maximum(local_stop, start + BLOCK_N - 1)
        local_tiles = (local_stop - past - begin + BLOCK_M - 1) // BLOCK_M
        if OFFSET:
            local_tiles = tl.maximum(local_tiles, 0)
        local_tiles = tl.minimum(local_tiles, tiles_per_head)
        per_head = local_tiles * (BLOCK_M // LOCAL_BLOCK_M)
        local_queries = HeadRows(local_query_desc, query_ptr, b, h, query_strides, num_tokens)
        local_grad_outs = HeadRows(
            local_grad_out_desc, grad_out_ptr, b, h,
            grad_out_strides, num_tokens,
        )  # fmt: skip
        local_stats = GatedStats(
            local_stats_desc, stats_ptr, b, query_heads, stats_stride_h, num_tokens
        )
        divisor = tl.maximum(per_head, 1)
        for i in tl.range(0, per_head * HEADS, num_stages=STAGES):
            head = first_head + i // divisor
            first = begin + i % divisor * LOCAL_BLOCK_M
            q = load_head_tile(
                local_queries, head, first, LOCAL_BLOCK_M, HEAD_DIM, BLOCK_D
            )  # [LOCAL_BLOCK_M, BLOCK_D]
            grad_out = load_head_tile(
                local_grad_outs, head, first, LOCAL_BLOCK_M, VALUE_DIM, BLOCK_DV
            )  # [LOCAL_BLOCK_M, BLOCK_DV]
            # [BLOCK_N, LOCAL_BLOCK_M] each
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
            lse = load_gated_stats(local_stats, 0, head, first, LOCAL_BLOCK_M)
            delta = load_gated_stats(local_stats, 1, head, first, LOCAL_BLOCK_M)
            token = first + tl.arange(0, LOCAL_BLOCK_M)
            position = token + past
            p = gated_probabilities(logits, lse, scale_log2)
            visible = is_visible(position[None, :], key[:, None], window, None)
            if DOCUMENTS:
                same = in_document(document_start_ptr, token, key, stop, num_tokens, ONE_DOCUMENT)
                visible = visible & same
            p = tl.where(visible, p, 0.0)
            grad_logits = p * (grad_p - delta[None, :])
            if DOCUMENTS:  # another document may be large: 0 times inf is NaN
                grad_logits = tl.where(visible, grad_logits, 0.0)
            lse = load_gated_stats(local_stats, 2, head, first, LOCAL_BLOCK_M)
            delta = load_gated_stats(local_stats, 3, head, first, LOCAL_BLOCK_M)
            selected_p = gated_probabilities(logits, lse, scale_log2)
            first_key = tl.maximum(first_local_key(position, BLOCK_SIZE, LOCAL), 0)
            is_local = (key[:, None] >= first_key[None, :]) & (key[:, None] <= position[None, :])
            if DOCUMENTS:
                is_local = is_local & same
            selected_p = tl.where(is_local, selected_p, 0.0)
            selected_grad_logits = selected_p * (grad_p - delta[None, :])
            if DOCUMENTS:
                selected_grad_logits = tl.where(is_local, selected_grad_logits, 0.0)
            grad_logits += selected_grad_logits
            p += selected_p
            grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
            grad_k = tl.dot(grad_logits.to(q.dtype), q, grad_k, input_precision=PRECISION)

    stats = GatedStats(stats_desc, stats_ptr, b, query_heads, stats_stride_h, num_tokens)
    window_tiles = tiles_per_head - local_tiles
    divisor = tl.maximum(window_tiles, 1)
    for i in tl.range(0, window_tiles * HEADS, num_stages=STAGES):
        head = first_head + i // divisor
        first = begin + (local_tiles + i % divisor) * BLOCK_M
        q = load_head_tile(queries, head, first, BLOCK_M, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        grad_out = load_head_tile(
            grad_outs, head, first, BLOCK_M, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        # [BLOCK_N, BLOCK_M] each
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        lse = load_gated_stats(stats, 0, head, first, BLOCK_M)
        # Loaded before the MMAs below start: a wait while they run would serialise them.
        delta = load_gated_stats(stats, 1, head, first, BLOCK_M)
        p = gated_probabilities(logits, lse, scale_log2)
        masked = first + past < start + BLOCK_N - 1
        masked = masked | (first + past + BLOCK_M > start + window)
        if DOCUMENTS:
            masked = masked | (first + BLOCK_M > stop) | (not ONE_DOCUMENT)
            centered = grad_p - delta[None, :]
        if masked:
            token = first + tl.arange(0, BLOCK_M)
            visible = is_visible((token + past)[None, :], key[:, None], window, None)
            if DOCUMENTS:
                same = in_document(document_start_ptr, token, key, stop, num_tokens, ONE_DOCUMENT)
                visible = visible & same
                centered = tl.where(visible, centered, 0.0)
            p = tl.where(visible, p, 0.0)
        grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
        if not DOCUMENTS:
            centered = grad_p - delta[None, :]
        grad_logits = (p * centered).to(q.dtype)
        grad_k = tl.dot(grad_logits, q, grad_k, input_precision=PRECISION)

    key_mask = key < num_keys
    sum_row = (b.to(tl.int64) * sum_tokens + key) * kv_heads + h  # [BLOCK_N]
    first_row = (split * (tl.num_programs(0) // (SPLITS * tiles * kv_heads)) + b).to(tl.int64)
    row = (first_row * num_keys + key) * kv_heads + h  # [BLOCK_N]
    grad_k *= scale
    sum_mask = key_mask & (split == 0)
    if sum_key_ptr is not None:
        grad_k += load_rows_at(sum_key_ptr, sum_row * HEAD_DIM, sum_mask, HEAD_DIM, BLOCK_D)
    store_rows_at(grad_key_ptr, row * HEAD_DIM, key_mask, grad_k, HEAD_DIM, BLOCK_D)
    if sum_value_ptr is not None:
        grad_v += load_rows_at(sum_value_ptr, sum_row * VALUE_DIM, sum_mask, VALUE_DIM, BLOCK_DV)
    store_rows_at(grad_value_ptr, row * VALUE_DIM, key_mask, grad_v, VALUE_DIM, BLOCK_DV)
