"""Gradients of sliding attention: dQ by query tile, dK and dV by key tile.

Two kernels that share nothing: logits and probabilities are computed twice, and in return every
gradient is summed in the registers of one CTA, in a fixed order, without atomics. The query tile
is the forward's. A CTA of keys takes the heads of its group one after another, so that
neighbouring CTAs read the same queries at nearly the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E, base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, tile_width
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.sliding.config import (
    SlidingPlan,
    Tiles,
    empty_stats,
    last_queries,
    stats_descriptor,
)
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    is_visible,
    load_document_start,
    load_key_value,
    load_rows_at,
    load_stats,
    load_tile,
    query_rows,
    query_tile_of_cta,
    row_offsets,
    store_rows_at,
)

STATS_TOKENS = 64


@triton.jit
def add_dq_tile(
    q, grad_out, k, v, lse_log2, delta, token, document_start, start, window, scale_log2, acc,
    masked, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc` [BLOCK_M, BLOCK_D] plus one key tile's share of dQ, before the scale."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
    centered = grad_p - delta[:, None]
    if masked:
        key = start + tl.arange(0, k.shape[0])
        first_key = None if document_start is None else document_start[:, None]
        visible = is_visible(token[:, None], key[None, :], window, first_key)
        p = tl.where(visible, p, 0.0)
        if document_start is not None:  # another document may be large: 0 times inf is NaN
            centered = tl.where(visible, centered, 0.0)
    grad_logits = (p * centered).to(k.dtype)  # [BLOCK_M, BLOCK_N]
    return tl.dot(grad_logits, k, acc, input_precision=PRECISION)


@recordable
@triton.jit(do_not_specialize=["num_tokens", "window"])
def sliding_bwd_dq_kernel(
    query_ptr, key_ptr, value_ptr, key_desc, value_desc, document_start_ptr, grad_out_ptr,
    lse_ptr, delta_ptr, grad_query_ptr,
    query_strides, key_strides, value_strides, grad_out_strides, lse_strides, delta_strides,
    num_tokens, window, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE_BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sum_j p_j (dO v_j - delta) k_j, (B, S, Hq, D)."""
    b, h, first, first_head = query_tile_of_cta(num_tokens, kv_heads, GROUP, HEADS, BLOCK_TOKENS)
    token, head_in_group, row_mask = query_rows(
        first, first_head, num_tokens, GROUP, HEADS, BLOCK_TOKENS, BLOCK_M
    )  # [BLOCK_M] each
    batch = b.to(tl.int64)
    head = (h * GROUP).to(tl.int64)
    offset = row_offsets(token, head_in_group, query_strides[1], query_strides[2])
    q = load_rows_at(
        query_ptr + batch * query_strides[0] + head * query_strides[1],
        offset, row_mask, HEAD_DIM, BLOCK_D,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    offset = row_offsets(token, head_in_group, grad_out_strides[1], grad_out_strides[2])
    grad_out = load_rows_at(
        grad_out_ptr + batch * grad_out_strides[0] + head * grad_out_strides[1],
        offset, row_mask, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
    offset = row_offsets(token, head_in_group, lse_strides[1], lse_strides[2])
    lse_ptr = lse_ptr + batch * lse_strides[0] + head * lse_strides[1]
    lse_log2 = tl.load(lse_ptr + offset, mask=row_mask, other=float("inf")) * LOG2E  # [BLOCK_M]
    offset = row_offsets(token, head_in_group, delta_strides[1], delta_strides[2])
    delta_ptr = delta_ptr + batch * delta_strides[0] + head * delta_strides[1]
    delta = tl.load(delta_ptr + offset, mask=row_mask, other=0.0)  # [BLOCK_M]

    keys = HeadRows(key_desc, key_ptr, b, h, *key_strides, num_tokens)  # type: ignore[call-arg]
    values = HeadRows(value_desc, value_ptr, b, h, *value_strides, num_tokens)  # type: ignore[call-arg]
    if document_start_ptr is None:
        document_start, lowest, highest = None, 0, 0
    else:
        document_start, lowest, highest = load_document_start(
            document_start_ptr, b, token, num_tokens
        )
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = first + BLOCK_TOKENS
    diagonal_tiles: tl.constexpr = (BLOCK_TOKENS + BLOCK_N - 1) // BLOCK_N
    full_tiles = (end - tl.maximum(end - window, highest)) // BLOCK_N
    full_tiles = tl.maximum(full_tiles, diagonal_tiles)
    for i in tl.range(0, full_tiles, num_stages=STAGES):
        start = end - (i + 1) * BLOCK_N
        k, v = load_key_value(
            keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        acc = add_dq_tile(
            q, grad_out, k, v, lse_log2, delta, token, document_start, start, window,
            scale_log2, acc, i < diagonal_tiles, PRECISION,
        )  # fmt: skip
    end -= full_tiles * BLOCK_N

    rest = tl.maximum(end - tl.maximum(first - window + 1, lowest), 0)
    for i in tl.range(0, (rest + EDGE_BLOCK_N - 1) // EDGE_BLOCK_N, num_stages=1):
        start = end - (i + 1) * EDGE_BLOCK_N
        edge_k, edge_v = load_key_value(
            keys, values, start, EDGE_BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            BY_POINTERS=True,
        )  # fmt: skip  # [EDGE_BLOCK_N, BLOCK_D], [EDGE_BLOCK_N, BLOCK_DV]
        acc = add_dq_tile(
            q, grad_out, edge_k, edge_v, lse_log2, delta, token, document_start, start, window,
            scale_log2, acc, True, PRECISION,
        )  # fmt: skip

    query_heads = kv_heads * GROUP
    offset = row_offsets(token, head_in_group, HEAD_DIM, query_heads * HEAD_DIM)
    offset += (batch * num_tokens * query_heads + head) * HEAD_DIM
    store_rows_at(grad_query_ptr, offset, row_mask, acc * scale, HEAD_DIM, BLOCK_D)


@recordable
@triton.jit(do_not_specialize=["num_tokens", "window"])
def sliding_bwd_dkdv_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, delta_ptr,
    query_desc, key_desc, value_desc, grad_out_desc, lse_desc, delta_desc,
    document_start_ptr, last_query_ptr, grad_key_ptr, grad_value_ptr,
    query_strides, key_strides, value_strides, grad_out_strides, stats_strides,
    num_tokens, window, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dV_j = sum p_j dO and dK_j = scale * sum p_j (dO v_j - delta) q.

    Logits are transposed, [BLOCK_N, BLOCK_M]: probabilities then are the left factors of both
    products as they are in registers. The log-sum-exp is in base 2. Rows past the last token are
    read as 0, so that their probabilities are multiplied by zeros only. With documents,
    last_query is what `last_queries` finds.
    """
    tiles = (num_tokens + BLOCK_N - 1) // BLOCK_N
    cta = tl.program_id(0)
    b = cta // tiles // kv_heads
    h = cta // tiles % kv_heads
    start = cta % tiles * BLOCK_N
    key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    keys = HeadRows(key_desc, key_ptr, b, h, *key_strides, num_tokens)  # type: ignore[call-arg]
    values = HeadRows(value_desc, value_ptr, b, h, *value_strides, num_tokens)  # type: ignore[call-arg]
    k, v = load_key_value(
        keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    stop = tl.minimum(start + BLOCK_N - 1 + window, num_tokens)
    if document_start_ptr is not None:
        document_start_ptr += b.to(tl.int64) * num_tokens
        stop = tl.minimum(stop, tl.load(last_query_ptr + b.to(tl.int64) * tiles + cta % tiles))
    tiles_per_head = (stop - start + BLOCK_M - 1) // BLOCK_M
    divisor = tl.maximum(tiles_per_head, 1)  # loads are prepared even where there is no tile
    for i in tl.range(0, tiles_per_head * GROUP, num_stages=STAGES):
        head = h * GROUP + i // divisor
        first = start + i % divisor * BLOCK_M
        queries = HeadRows(query_desc, query_ptr, b, head, *query_strides, num_tokens)  # type: ignore[call-arg]
        grad_outs = HeadRows(grad_out_desc, grad_out_ptr, b, head, *grad_out_strides, num_tokens)  # type: ignore[call-arg]
        q = load_tile(queries, first, BLOCK_M, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        grad_out = load_tile(grad_outs, first, BLOCK_M, VALUE_DIM, BLOCK_DV)  # [BLOCK_M, BLOCK_DV]
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        lse = load_stats(
            lse_desc, lse_ptr, b, head, *stats_strides, first, num_tokens, BLOCK_M
        )  # [BLOCK_M]
        # Loaded before the MMAs below start: a wait while they run would serialise them.
        delta = load_stats(
            delta_desc, delta_ptr, b, head, *stats_strides, first, num_tokens,
            BLOCK_M,
        )  # fmt: skip  # [BLOCK_M]
        p = tl.exp2(logits * scale_log2 - lse[None, :])  # [BLOCK_N, BLOCK_M]
        centered = grad_p - delta[None, :]
        masked = (first < start + BLOCK_N - 1) | (first + BLOCK_M > start + window)
        if document_start_ptr is not None:  # of the tile's last query: they never go back
            last = tl.minimum(first + BLOCK_M, num_tokens) - 1
            masked = masked | (tl.load(document_start_ptr + last) > start)
        if masked:
            token = first + tl.arange(0, BLOCK_M)
            first_key = None
            if document_start_ptr is not None:
                first_key = tl.load(
                    document_start_ptr + token, mask=token < num_tokens, other=2147483647
                )[None, :]
            visible = is_visible(token[None, :], key[:, None], window, first_key)
            p = tl.where(visible, p, 0.0)
            if document_start_ptr is not None:  # as in `add_dq_tile`
                centered = tl.where(visible, centered, 0.0)
        grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_logits = (p * centered).to(q.dtype)  # [BLOCK_N, BLOCK_M]
        grad_k = tl.dot(grad_logits, q, grad_k, input_precision=PRECISION)

    key_mask = key < num_tokens
    row = (b.to(tl.int64) * num_tokens + key) * kv_heads + h  # [BLOCK_N]
    store_rows_at(grad_key_ptr, row * HEAD_DIM, key_mask, grad_k * scale, HEAD_DIM, BLOCK_D)
    store_rows_at(grad_value_ptr, row * VALUE_DIM, key_mask, grad_v, VALUE_DIM, BLOCK_DV)


@recordable
@triton.jit(do_not_specialize=["num_tokens"])
def sliding_softmax_stats_kernel(
    in_ptr, out_ptr, in_strides, out_strides,
    num_tokens, query_heads, factor,
    BLOCK_TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`factor` times a statistic (B, Hq, S), any strides, into memory contiguous along tokens."""
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    for first in range(0, query_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (token < num_tokens)[:, None] & (head < query_heads)[None, :]
        offset = row_offsets(token[:, None], head[None, :], in_strides[1], in_strides[2])
        stats = tl.load(
            in_ptr + b * in_strides[0] + offset, mask=mask, other=0.0
        )  # [BLOCK_TOKENS, HEADS]
        offset = row_offsets(token[:, None], head[None, :], out_strides[1], 1)
        stats = stats.to(tl.float32) * factor
        tl.store(out_ptr + b * out_strides[0] + offset, stats, mask=mask)


@dataclass(frozen=True)
class _Backward:
    """What both kernels read, and their launches; lse and delta are (B, Hq, S)."""

    plan: SlidingPlan
    query: Tensor
    key: Tensor
    value: Tensor
    grad_out: Tensor
    lse: Tensor
    delta: Tensor
    document_start: Tensor | None
    window: int
    scale: float

    def launch_dq(self, tiles: Tiles, grad_query: Tensor) -> None:
        plan = self.plan
        sliding_bwd_dq_kernel[(plan.query_ctas(tiles),)](
            self.query,
            self.key,
            self.value,
            descriptor(self.key, tiles.block_n),
            descriptor(self.value, tiles.block_n),
            self.document_start,
            self.grad_out,
            self.lse,
            self.delta,
            grad_query,
            strides(self.query),
            strides(self.key),
            strides(self.value),
            strides(self.grad_out),
            self.lse.stride(),
            self.delta.stride(),
            plan.tokens,
            self.window,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.query_tile_constants(tiles),
        )

    def launch_dkdv(self, tiles: Tiles, grad_key: Tensor, grad_value: Tensor) -> None:
        plan = self.plan
        lse = self.along_tokens(self.lse, LOG2E.value)
        delta = self.along_tokens(self.delta, 1.0)
        sliding_bwd_dkdv_kernel[(plan.key_ctas(tiles),)](
            self.query,
            self.key,
            self.value,
            self.grad_out,
            lse,
            delta,
            descriptor(self.query, tiles.block_m),
            descriptor(self.key, tiles.block_n),
            descriptor(self.value, tiles.block_n),
            descriptor(self.grad_out, tiles.block_m),
            stats_descriptor(lse, tiles.block_m),
            stats_descriptor(delta, tiles.block_m),
            self.document_start,
            None
            if self.document_start is None
            else last_queries(self.document_start, tiles.block_n),
            grad_key,
            grad_value,
            strides(self.query),
            strides(self.key),
            strides(self.value),
            strides(self.grad_out),
            lse.stride()[:2],
            plan.tokens,
            self.window,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(tiles),
        )

    def along_tokens(self, stats: Tensor, factor: float) -> Tensor:
        """`factor` times stats (B, Hq, S) in float32, contiguous along the tokens."""
        plan = self.plan
        out = empty_stats(plan.batch, plan.query_heads, plan.tokens, stats.device)
        grid = (cdiv(plan.tokens, STATS_TOKENS), plan.batch)
        sliding_softmax_stats_kernel[grid](
            stats,
            out,
            stats.stride(),
            out.stride()[:2],
            plan.tokens,
            plan.query_heads,
            factor,
            BLOCK_TOKENS=STATS_TOKENS,
            HEADS=min(32, tile_width(plan.query_heads)),
        )
        return out


def sliding_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    document_start: Tensor | None,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtype and (B, S, H, D) memory.

    Args:
        query, key, value: as in the forward.
        grad_out: (B, Hq, S, Dv).
        lse: float32 (B, Hq, S), natural.
        delta: float32 (B, Hq, S), sum over Dv of the branch's output times `grad_out`.
        document_start: int32 (B, S), contiguous, or None.
    """
    query, key, value, grad_out = (rows_contiguous(x) for x in (query, key, value, grad_out))
    plan = SlidingPlan.of(query, key, value)
    grad_query = empty_bshd(query, plan.query_heads, plan.tokens, plan.head_dim, query.dtype)
    grad_key = empty_bshd(key, plan.kv_heads, plan.tokens, plan.head_dim, key.dtype)
    grad_value = empty_bshd(value, plan.kv_heads, plan.tokens, plan.value_dim, value.dtype)
    launches = _Backward(
        plan,
        query,
        key,
        value,
        grad_out,
        lse,
        delta,
        document_start,
        plan.clamped_window(window_size),
        scale,
    )
    launches.launch_dkdv(plan.dkdv_tiles(), grad_key, grad_value)
    launches.launch_dq(plan.dq_tiles(), grad_query)
    return grad_query, grad_key, grad_value
