"""dQ of the core: the sliding branch, and with it what else is at hand.

A program holds a tile of queries and walks through its window. The blocks that all queries chose,
their own and those before it, lie in there: where both branches have the same keys, scores and
`dO v^T` are the same, and so is the product with the keys. The initial blocks are a tile more.
dQ of the compressed branch is read where cuDNN left it, part by part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of
from nsa_flex.fallback_kernels.fused.bwd_gates import log_of_size
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import load_compressed
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, descriptor
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_keys,
    load_rows,
    place_of_queries,
    row_places,
    rows_of_queries,
    store_rows,
)


@dataclass(frozen=True)
class Forced:
    """Blocks of the selected branch that all queries chose and the window's kernels take over."""

    block_size: int
    num_initial: int
    num_local: int  # no more than the window holds

    @classmethod
    def none(cls) -> Forced:
        return cls(64, 0, 0)


@dataclass(frozen=True)
class Rows:
    """What the backward of both branches needs of the queries; all contiguous.

    query: (B, S, Hq, D); grad: (B, S, Hq, Dv), before any gate; the others float32
    (B, S, Hq): natural log-sum-exps, and `sum(dO * o)` before the gate.
    """

    query: Tensor
    grad: Tensor
    selected_lse: Tensor
    delta_selected: Tensor
    sliding_lse: Tensor
    delta_sliding: Tensor

    def all(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.grad,
            self.selected_lse,
            self.delta_selected,
            self.sliding_lse,
            self.delta_sliding,
        )


def query_gradients(
    rows: Rows,
    parts: list[Tensor],
    fold: Fold,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    forced: Forced,
    window_size: int,
    scale: float,
) -> Tensor:
    """dQ of the compressed branch, the sliding branch and the forced blocks, (B, S, Hq, D).

    Args:
        parts: dQ of the parts of the compressed branch.
        key, value: of the sliding branch, (B, Hkv, S, D) and (B, Hkv, S, Dv).
        gates: (B, Hq, S, 3), any strides and numbers.
        forced: where it has any, the selected branch has the same keys and values.
    """
    key, value = (rows_contiguous(x) for x in (key, value))
    plan = SlidingPlan.of(rows.query.transpose(1, 2), key, value)
    tiles = plan.query_gradient_tiles()
    grad_query = torch.empty_like(rows.query)
    core_query_kernel[(plan.query_programs(tiles),)](
        *rows.all(),
        gates,
        key,
        value,
        descriptor(key, tiles.keys),
        descriptor(value, tiles.keys),
        *parts,
        grad_query,
        *strides(key),
        *strides(value),
        *gates.stride(),
        plan.tokens,
        plan.reach(window_size),
        plan.kv_heads,
        scale,
        base2_scale(scale),
        *bounds_of(fold.parts),
        fold.reach,
        STRIDE=fold.stride,
        BLOCK_SIZE=forced.block_size,
        INITIAL=forced.num_initial,
        LOCAL=forced.num_local,
        **plan.query_constants(tiles),
    )
    return grad_query


@triton.jit
def first_local_key(token, BLOCK_SIZE: tl.constexpr, LOCAL: tl.constexpr):
    """The first key of the local blocks of the query at `token`; may be negative."""
    return (token // BLOCK_SIZE - LOCAL + 1) * BLOCK_SIZE


@triton.jit
def _tile(
    q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta, factor,
    token, start, window, scale_log2, acc, near,
    BLOCK_SIZE: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys more in dQ, before the scale.

    Unless MASKED, all keys are seen through the window, and through nothing else. `near`: the
    tile is of the window, and has its keys and the local blocks'; else it has the initial ones'.
    """
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
    p = tl.exp2(scores * scale_log2 - sliding_lse[:, None])
    key = tl.arange(0, k.shape[0])[None, :]
    last = token - start
    if MASKED:
        least = tl.maximum(last - window + 1, -start)
        most = tl.where(near, last, -1)
        p = tl.where((key >= least[:, None]) & (key <= most[:, None]), p, 0.0)
    grad_scores = p * (grad_p - sliding_delta[:, None])
    if MASKED and LOCAL > 0:
        local = first_local_key(token, BLOCK_SIZE, LOCAL)
        least = tl.where(near, tl.maximum(local, 0), 0) - start
        most = tl.where(near, last, tl.minimum(local, INITIAL * BLOCK_SIZE) - 1 - start)
        p = tl.exp2(scores * scale_log2 - selected_lse[:, None]) * factor[:, None]
        p = tl.where((key >= least[:, None]) & (key <= most[:, None]), p, 0.0)
        grad_scores += p * (grad_p - selected_delta[:, None])
    return tl.dot(grad_scores.to(k.dtype), k, acc, input_precision=PRECISION)


@triton.jit(
    do_not_specialize=["num_tokens", "window", "rows", "first1", "first2", "first3", "reach"]
)
def core_query_kernel(
    query_ptr, grad_out_ptr,
    selected_lse_ptr, delta_selected_ptr, sliding_lse_ptr, delta_sliding_ptr, gate_ptr,
    key_ptr, value_ptr, key_tiles, value_tiles, x0, x1, x2, x3, grad_query_ptr,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    num_tokens, window, kv_heads, scale, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, EDGE_KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sum_c gate_c sum_j p_cj (dO v_j - delta_c) k_j, and what is in the parts."""
    b, h, first, first_member = place_of_queries(num_tokens, kv_heads, GROUP, HEADS, TOKENS)
    token, member, there = rows_of_queries(
        first, first_member, num_tokens, GROUP, HEADS, TOKENS, ROWS
    )
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_heads = kv_heads * GROUP
    line = row_places(token, member, 1, query_heads) + batch * num_tokens * query_heads + head
    q = load_rows(query_ptr, line * HEAD_DIM, there, HEAD_DIM, HEAD_COLUMNS)
    grad_out = load_rows(grad_out_ptr, line * VALUE_DIM, there, VALUE_DIM, VALUE_COLUMNS)
    gate_ptr += batch * gate_stride_b + head * gate_stride_h
    gate_ptr += row_places(token, member, gate_stride_h, gate_stride_s)
    # The gate of the window: its size goes into the log-sum-exp, its sign into dO and deltas.
    gate = tl.load(gate_ptr + 2 * gate_stride_c, mask=there, other=0.0).to(tl.float32)
    negative = gate < 0.0
    grad_out = tl.where(negative[:, None], -grad_out, grad_out)
    LOG2E_: tl.constexpr = 1.4426950408889634
    sliding_lse = tl.load(sliding_lse_ptr + line, mask=there, other=float("inf"))
    sliding_lse = (sliding_lse - log_of_size(gate)) * LOG2E_
    sliding_delta = tl.load(delta_sliding_ptr + line, mask=there, other=0.0)
    sliding_delta = tl.where(negative, -sliding_delta, sliding_delta)
    selected_lse = sliding_lse
    selected_delta = sliding_delta
    factor = gate
    if LOCAL > 0:
        selected_lse = tl.load(selected_lse_ptr + line, mask=there, other=float("inf")) * LOG2E_
        selected_delta = tl.load(delta_selected_ptr + line, mask=there, other=0.0)
        selected_delta = tl.where(negative, -selected_delta, selected_delta)
        factor = tl.load(gate_ptr + gate_stride_c, mask=there, other=0.0).to(tl.float32)
        factor = tl.where(negative, -factor, factor)

    keys = HeadRows(key_tiles, key_ptr, b, h, key_stride_b, key_stride_h, key_stride_s, num_tokens)
    values = HeadRows(
        value_tiles, value_ptr, b, h, value_stride_b, value_stride_h, value_stride_s, num_tokens
    )
    acc = tl.zeros([ROWS, HEAD_COLUMNS], tl.float32)
    end = first + TOKENS
    near = (TOKENS + KEYS - 1) // KEYS  # tiles of the window with a mask, or with local blocks
    whole = tl.maximum((end - tl.maximum(end - window, 0)) // KEYS, near)
    if LOCAL > 0:
        local = end - first_local_key(first, BLOCK_SIZE, LOCAL)
        near = tl.minimum(tl.maximum((local + KEYS - 1) // KEYS, near), whole)
    masked = near
    if INITIAL > 0:
        initial: tl.constexpr = (INITIAL * BLOCK_SIZE + KEYS - 1) // KEYS
        masked += tl.where(first_local_key(end - 1, BLOCK_SIZE, LOCAL) > 0, initial, 0)
    for i in tl.range(0, masked, num_stages=STAGES):
        start = tl.where(i < near, end - (i + 1) * KEYS, (i - near) * KEYS)
        k, v = load_keys(
            keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc = _tile(
            q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta, factor,
            token, start, window, scale_log2, acc, i < near,
            BLOCK_SIZE, INITIAL, LOCAL, True, PRECISION,
        )  # fmt: skip
    for i in tl.range(near, whole, num_stages=STAGES):
        start = end - (i + 1) * KEYS
        k, v = load_keys(
            keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS
        )
        acc = _tile(
            q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta, factor,
            token, start, window, scale_log2, acc, i < whole,
            BLOCK_SIZE, INITIAL, LOCAL, False, PRECISION,
        )  # fmt: skip
    end -= whole * KEYS

    rest = tl.maximum(end - tl.maximum(first - window + 1, 0), 0)
    for i in tl.range(0, (rest + EDGE_KEYS - 1) // EDGE_KEYS, num_stages=1):
        start = end - (i + 1) * EDGE_KEYS
        edge_k, edge_v = load_keys(
            keys, values, start, EDGE_KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS,
            BY_ADDRESS=True,
        )  # fmt: skip
        acc = _tile(
            q, grad_out, edge_k, edge_v, sliding_lse, sliding_delta, selected_lse,
            selected_delta, factor, token, start, window, scale_log2, acc, i >= 0,
            BLOCK_SIZE, INITIAL, LOCAL, True, PRECISION,
        )  # fmt: skip

    acc *= scale
    part = load_compressed(
        x0, x1, x2, x3, batch, token, head + member, there, query_heads,
        rows, first1, first2, first3, reach, STRIDE, HEAD_DIM, HEAD_COLUMNS,
    )  # fmt: skip
    acc += part.to(tl.float32)
    store_rows(grad_query_ptr, line * HEAD_DIM, there, acc, HEAD_DIM, HEAD_COLUMNS)
