"""Sliding attention forward: one program a tile of queries, its window from right to left.

Only the tiles of keys at the two ends of the window are masked. The tile at the left end is
narrow: with the heads of a group in one tile there are few keys that only some of its rows see.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, strides
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, Tiles, descriptor
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_keys,
    load_rows,
    place_of_queries,
    row_places,
    rows_of_queries,
    seen,
    store_rows,
)


@triton.jit
def attend(
    q, k, v, token, start, window, scale_log2, acc, top, total,
    masked, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys more: weighted values, running maximum in base 2, sum of weights."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if masked:
        key = start + tl.arange(0, k.shape[0])
        visible = seen(token[:, None], key[None, :], window)
        scores = tl.where(visible, scores, float("-inf"))
    return add_values(scores, v, scale_log2, acc, top, total, PRECISION)


@triton.jit
def add_values(scores, v, scale_log2, acc, top, total, PRECISION: tl.constexpr):
    """One tile of scores more, -inf where a key is not seen; `top` is finite."""
    higher = tl.maximum(top, tl.max(scores, 1) * scale_log2)
    p = tl.exp2(scores * scale_log2 - higher[:, None])
    shrink = tl.exp2(top - higher)
    total = total * shrink + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def attend_window(
    q, keys, values, first, token, window, scale_log2,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Weighted values of a tile of queries, their maximum in base 2 and the sum of weights."""
    acc = tl.zeros([ROWS, VALUE_COLUMNS], tl.float32)
    # Finite, so that a tile in which a row sees nothing changes nothing.
    top = tl.full([ROWS], -3.0e38, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    # From right to left: tiles on the diagonal, then those that every row sees; these start no
    # earlier than the last row's window.
    end = first + TOKENS
    on_diagonal: tl.constexpr = (TOKENS + KEYS - 1) // KEYS
    whole = (end - tl.maximum(end - window, 0)) // KEYS
    whole = tl.maximum(whole, on_diagonal)
    for i in tl.range(0, whole, num_stages=STAGES):
        start = end - (i + 1) * KEYS
        k, v = load_keys(
            keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc, top, total = attend(
            q, k, v, token, start, window, scale_log2, acc, top, total, i < on_diagonal, PRECISION,
        )  # fmt: skip
    end -= whole * KEYS

    rest = tl.maximum(end - tl.maximum(first - window + 1, 0), 0)
    for i in tl.range(0, (rest + EDGE_KEYS - 1) // EDGE_KEYS, num_stages=1):
        start = end - (i + 1) * EDGE_KEYS
        edge_k, edge_v = load_keys(
            keys, values, start, EDGE_KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            BY_ADDRESS=True,
        )  # fmt: skip
        acc, top, total = attend(
            q, edge_k, edge_v, token, start, window, scale_log2, acc, top, total, True, PRECISION
        )
    return acc, top, total


@triton.jit(do_not_specialize=["num_tokens", "window"])
def forward_kernel(
    query_ptr, key_ptr, value_ptr, key_tiles, value_tiles, out_ptr, lse_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    num_tokens, window, kv_heads, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    b, h, first, first_member = place_of_queries(num_tokens, kv_heads, GROUP, HEADS, TOKENS)
    token, member, there = rows_of_queries(
        first, first_member, num_tokens, GROUP, HEADS, TOKENS, ROWS
    )
    query_ptr += b.to(tl.int64) * query_stride_b + (h * GROUP).to(tl.int64) * query_stride_h
    place = row_places(token, member, query_stride_h, query_stride_s)
    q = load_rows(query_ptr, place, there, HEAD_DIM, HEAD_COLUMNS)
    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )
    acc, top, total = attend_window(
        q, keys, values, first, token, window, scale_log2,
        TOKENS, ROWS, KEYS, EDGE_KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
        PRECISION, STAGES,
    )  # fmt: skip
    query_heads = kv_heads * GROUP
    line = b.to(tl.int64) * num_tokens * query_heads + h * GROUP
    place = row_places(token, member, 1, query_heads) + line
    total = tl.where(there, total, 1.0)
    store_rows(out_ptr, place * VALUE_DIM, there, acc / total[:, None], VALUE_DIM, VALUE_COLUMNS)
    LN2: tl.constexpr = 0.6931471805599453
    tl.store(lse_ptr + place, (top + tl.log2(total)) * LN2, mask=there)


def sliding_forward(
    query: Tensor, key: Tensor, value: Tensor, window_size: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, S, Dv) and natural log-sum-exp (B, Hq, S) float32, memory (B, S, Hq, ...)."""
    query, key, value = (rows_contiguous(x) for x in (query, key, value))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.forward_tiles()
    out = empty_bshd(query, plan.query_heads, plan.tokens, plan.value_dim, query.dtype)
    lse = empty_bshd(query, plan.query_heads, plan.tokens, 1, torch.float32)[..., 0]
    launch_forward(plan, tiles, query, key, value, out, lse, window_size, scale)
    return out, lse


def launch_forward(
    plan: SlidingPlan,
    tiles: Tiles,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    window_size: int,
    scale: float,
) -> None:
    forward_kernel[(plan.query_programs(tiles),)](
        query,
        key,
        value,
        descriptor(key, tiles.keys),
        descriptor(value, tiles.keys),
        out,
        lse,
        *strides(query),
        *strides(key),
        *strides(value),
        plan.tokens,
        plan.reach(window_size),
        plan.kv_heads,
        base2_scale(scale),
        **plan.query_constants(tiles),
    )
