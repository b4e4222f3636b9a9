"""Gradients of sliding attention: dQ by tile of queries, dK and dV by tile of keys.

Two kernels that share nothing: scores and weights are computed twice, and in return every
gradient is summed in the registers of one program, in a fixed order, without atomics. The tile
of queries is the forward's. A program of keys goes through the heads of its group one after
another, so that neighbouring programs read the same queries at nearly the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.softmax import LOG2E, base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.sliding.config import (
    SlidingPlan,
    Tiles,
    descriptor,
    empty_numbers,
    number_descriptor,
)
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_keys,
    load_numbers,
    load_rows,
    load_tile,
    place_of_queries,
    row_places,
    rows_of_queries,
    seen,
    store_rows,
)

NUMBER_TOKENS = 64


@triton.jit
def query_gradient_tile(
    q, grad_out, k, v, lse_log2, delta, token, start, window, scale_log2, acc,
    masked, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys more in dQ, before scale and gate."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
    p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
    if masked:
        key = start + tl.arange(0, k.shape[0])
        p = tl.where(seen(token[:, None], key[None, :], window), p, 0.0)
    grad_scores = (p * (grad_p - delta[:, None])).to(k.dtype)
    return tl.dot(grad_scores, k, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_tokens", "window"])
def sliding_query_kernel(
    query_ptr, key_ptr, value_ptr, key_tiles, value_tiles, grad_out_ptr,
    lse_ptr, delta_ptr, grad_query_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
    lse_stride_b, lse_stride_h, lse_stride_s,
    delta_stride_b, delta_stride_h, delta_stride_s,
    num_tokens, window, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sum_j p_j (dO v_j - delta) k_j, (B, S, Hq, D)."""
    b, h, first, first_member = place_of_queries(num_tokens, kv_heads, GROUP, HEADS, TOKENS)
    token, member, there = rows_of_queries(
        first, first_member, num_tokens, GROUP, HEADS, TOKENS, ROWS
    )
    row = b.to(tl.int64)
    head = (h * GROUP).to(tl.int64)
    place = row_places(token, member, query_stride_h, query_stride_s)
    q = load_rows(
        query_ptr + row * query_stride_b + head * query_stride_h,
        place, there, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    place = row_places(token, member, grad_out_stride_h, grad_out_stride_s)
    grad_out = load_rows(
        grad_out_ptr + row * grad_out_stride_b + head * grad_out_stride_h,
        place, there, VALUE_DIM, VALUE_COLUMNS,
    )  # fmt: skip
    LOG2E_: tl.constexpr = 1.4426950408889634
    place = row_places(token, member, lse_stride_h, lse_stride_s)
    lse = tl.load(
        lse_ptr + row * lse_stride_b + head * lse_stride_h + place, mask=there, other=float("inf")
    )
    lse_log2 = lse * LOG2E_
    place = row_places(token, member, delta_stride_h, delta_stride_s)
    delta = tl.load(
        delta_ptr + row * delta_stride_b + head * delta_stride_h + place, mask=there, other=0.0
    )

    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )
    acc = tl.zeros([ROWS, HEAD_COLUMNS], tl.float32)
    end = first + TOKENS
    on_diagonal: tl.constexpr = (TOKENS + KEYS - 1) // KEYS
    whole = tl.maximum((end - tl.maximum(end - window, 0)) // KEYS, on_diagonal)
    for i in tl.range(0, whole, num_stages=STAGES):
        start = end - (i + 1) * KEYS
        k, v = load_keys(
            keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc = query_gradient_tile(
            q, grad_out, k, v, lse_log2, delta, token, start, window, scale_log2, acc,
            i < on_diagonal, PRECISION,
        )  # fmt: skip
    end -= whole * KEYS

    rest = tl.maximum(end - tl.maximum(first - window + 1, 0), 0)
    for i in tl.range(0, (rest + EDGE_KEYS - 1) // EDGE_KEYS, num_stages=1):
        start = end - (i + 1) * EDGE_KEYS
        edge_k, edge_v = load_keys(
            keys, values, start, EDGE_KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            BY_ADDRESS=True,
        )  # fmt: skip
        acc = query_gradient_tile(
            q, grad_out, edge_k, edge_v, lse_log2, delta, token, start, window, scale_log2, acc,
            True, PRECISION,
        )  # fmt: skip

    query_heads = kv_heads * GROUP
    place = row_places(token, member, HEAD_DIM, query_heads * HEAD_DIM)
    place += (row * num_tokens * query_heads + head) * HEAD_DIM
    store_rows(grad_query_ptr, place, there, acc * scale, HEAD_DIM, HEAD_COLUMNS)


@triton.jit(do_not_specialize=["num_tokens", "window"])
def sliding_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, lse_ptr, delta_ptr,
    query_tiles, key_tiles, value_tiles, grad_out_tiles, lse_tiles, delta_tiles,
    grad_key_ptr, grad_value_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
    row_stride_b, row_stride_h,
    num_tokens, window, kv_heads, scale, scale_log2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dV_j = sum p_j dO and dK_j = scale * sum p_j (dO v_j - delta) q.

    Scores are (KEYS, ROWS): weights then are the left factors of both products as they leave
    the registers. The log-sum-exp is in base 2. Rows past the last token are read as 0, which
    gives weights that meet only zeros.
    """
    tiles = (num_tokens + KEYS - 1) // KEYS
    program = tl.program_id(0)
    b = program // tiles // kv_heads
    h = program // tiles % kv_heads
    start = program % tiles * KEYS
    key = start + tl.arange(0, KEYS)
    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )
    k, v = load_keys(keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS)
    grad_k = tl.zeros([KEYS, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([KEYS, VALUE_COLUMNS], tl.float32)

    stop = tl.minimum(start + KEYS - 1 + window, num_tokens)
    per_head = (stop - start + ROWS - 1) // ROWS
    for i in tl.range(0, per_head * GROUP, num_stages=STAGES):
        head = h * GROUP + i // per_head
        first = start + i % per_head * ROWS
        queries = HeadRows(
            query_tiles, query_ptr, b, head, query_stride_b, query_stride_h, query_stride_s,
            num_tokens,
        )  # fmt: skip
        grad_outs = HeadRows(
            grad_out_tiles, grad_out_ptr, b, head,
            grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
            num_tokens,
        )  # fmt: skip
        q = load_tile(queries, first, ROWS, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_tile(grad_outs, first, ROWS, VALUE_DIM, VALUE_COLUMNS)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        lse = load_numbers(
            lse_tiles, lse_ptr, b, head, row_stride_b, row_stride_h, first, num_tokens, ROWS
        )
        # Before the products below start: a wait while they run would serialise them.
        delta = load_numbers(
            delta_tiles, delta_ptr, b, head, row_stride_b, row_stride_h, first, num_tokens, ROWS
        )
        p = tl.exp2(scores * scale_log2 - lse[None, :])
        if (first < start + KEYS - 1) | (first + ROWS > start + window):
            token = first + tl.arange(0, ROWS)
            p = tl.where(seen(token[None, :], key[:, None], window), p, 0.0)
        grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[None, :])).to(q.dtype)
        grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)

    there = key < num_tokens
    place = (b.to(tl.int64) * num_tokens + key) * kv_heads + h
    store_rows(grad_key_ptr, place * HEAD_DIM, there, grad_k * scale, HEAD_DIM, HEAD_COLUMNS)
    store_rows(grad_value_ptr, place * VALUE_DIM, there, grad_v, VALUE_DIM, VALUE_COLUMNS)


@triton.jit(do_not_specialize=["num_tokens"])
def sliding_numbers_kernel(
    number_ptr, out_ptr,
    number_stride_b, number_stride_h, number_stride_s, out_stride_b, out_stride_h,
    num_tokens, query_heads, factor,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`factor` times one number a query (B, Hq, S), any strides, into rows along the tokens."""
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    for first in range(0, query_heads, HEADS):
        head = first + tl.arange(0, HEADS)
        there = (token < num_tokens)[:, None] & (head < query_heads)[None, :]
        place = row_places(token[:, None], head[None, :], number_stride_h, number_stride_s)
        number = tl.load(number_ptr + b * number_stride_b + place, mask=there, other=0.0)
        place = row_places(token[:, None], head[None, :], out_stride_h, 1)
        number = number.to(tl.float32) * factor
        tl.store(out_ptr + b * out_stride_b + place, number, mask=there)


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
    window: int
    scale: float

    def queries(self, tiles: Tiles, grad_query: Tensor) -> None:
        plan = self.plan
        sliding_query_kernel[(plan.query_programs(tiles),)](
            self.query,
            self.key,
            self.value,
            descriptor(self.key, tiles.keys),
            descriptor(self.value, tiles.keys),
            self.grad_out,
            self.lse,
            self.delta,
            grad_query,
            *strides(self.query),
            *strides(self.key),
            *strides(self.value),
            *strides(self.grad_out),
            *self.lse.stride(),
            *self.delta.stride(),
            plan.tokens,
            self.window,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.query_constants(tiles),
        )

    def keys(self, tiles: Tiles, grad_key: Tensor, grad_value: Tensor) -> None:
        plan = self.plan
        lse = self.along_tokens(self.lse, LOG2E.value)
        delta = self.along_tokens(self.delta, 1.0)
        sliding_key_kernel[(plan.key_programs(tiles),)](
            self.query,
            self.key,
            self.value,
            self.grad_out,
            lse,
            delta,
            descriptor(self.query, tiles.rows),
            descriptor(self.key, tiles.keys),
            descriptor(self.value, tiles.keys),
            descriptor(self.grad_out, tiles.rows),
            number_descriptor(lse, tiles.rows),
            number_descriptor(delta, tiles.rows),
            grad_key,
            grad_value,
            *strides(self.query),
            *strides(self.key),
            *strides(self.value),
            *strides(self.grad_out),
            *lse.stride()[:2],
            plan.tokens,
            self.window,
            plan.kv_heads,
            self.scale,
            base2_scale(self.scale),
            **plan.constants(tiles),
        )

    def along_tokens(self, numbers: Tensor, factor: float) -> Tensor:
        """`factor` times (B, Hq, S) numbers in float32, contiguous along the tokens."""
        plan = self.plan
        rows = empty_numbers(plan.batch, plan.query_heads, plan.tokens, numbers.device)
        grid = (triton.cdiv(plan.tokens, NUMBER_TOKENS), plan.batch)
        sliding_numbers_kernel[grid](
            numbers,
            rows,
            *numbers.stride(),
            *rows.stride()[:2],
            plan.tokens,
            plan.query_heads,
            factor,
            TOKENS=NUMBER_TOKENS,
            HEADS=min(32, tile_width(plan.query_heads)),
        )
        return rows


def sliding_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their dtype and (B, S, H, D) memory.

    Args:
        query, key, value: as in the forward.
        grad_out: (B, Hq, S, Dv).
        lse: float32 (B, Hq, S), natural.
        delta: float32 (B, Hq, S), sum over Dv of the branch's output times `grad_out`.
    """
    query, key, value, grad_out = (rows_contiguous(x) for x in (query, key, value, grad_out))
    plan = SlidingPlan.of(query, key, value)
    grad_query = empty_bshd(query, plan.query_heads, plan.tokens, plan.head_dim, query.dtype)
    grad_key = empty_bshd(key, plan.kv_heads, plan.tokens, plan.head_dim, key.dtype)
    grad_value = empty_bshd(value, plan.kv_heads, plan.tokens, plan.value_dim, value.dtype)
    run = _Backward(
        plan,
        query,
        key,
        value,
        grad_out,
        lse,
        delta,
        plan.reach(window_size),
        scale,
    )
    run.keys(plan.key_gradient_tiles(), grad_key, grad_value)
    run.queries(plan.query_gradient_tiles(), grad_query)
    return grad_query, grad_key, grad_value
