"""dK and dV of the core: the sliding branch, and with it the blocks that all queries chose.

A program holds a tile of keys; the queries whose window they lie in stream past, head by head. The
first of these queries have the tile's block as a local one of the selected branch: where both
branches have the same keys, scores and `dO v^T` are the same, and the sum of both weights is
multiplied once. What the selection has summed over its free choices is added at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.fused.bwd_dq import Forced, Rows, first_local_key
from nsa_flex.fallback_kernels.fused.bwd_gates import log_of_size
from nsa_flex.fallback_kernels.sliding.config import (
    SlidingPlan,
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
    row_places,
    seen,
    store_rows,
)

NUMBER_TOKENS = 64


def key_gradients(
    rows: Rows,
    totals: tuple[Tensor, Tensor] | None,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    forced: Forced,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dK and dV of the sliding branch and the local blocks, plus `totals`, (B, S, Hkv, D).

    Args:
        totals: float32 (B, tokens, Hkv, D) and (B, tokens, Hkv, Dv), contiguous; S tokens or more.
        key, value: of the sliding branch, (B, Hkv, S, D) and (B, Hkv, S, Dv).
        gates: (B, Hq, S, 3), any strides and numbers.
        forced: where it has any, the selected branch has the same keys and values.
    """
    key, value = (rows_contiguous(x) for x in (key, value))
    query, grad = (x.transpose(1, 2) for x in (rows.query, rows.grad))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.key_gradient_tiles()
    grad_key = empty_bshd(key, plan.kv_heads, plan.tokens, plan.head_dim, key.dtype)
    grad_value = empty_bshd(value, plan.kv_heads, plan.tokens, plan.value_dim, value.dtype)
    numbers = _numbers(rows, gates)
    near_rows = max(16, tiles.rows // 2)
    core_key_kernel[(plan.key_programs(tiles),)](
        query,
        key,
        value,
        grad,
        numbers,
        descriptor(query, tiles.rows),
        descriptor(key, tiles.keys),
        descriptor(value, tiles.keys),
        descriptor(grad, tiles.rows),
        number_descriptor(numbers, tiles.rows),
        descriptor(query, near_rows),
        descriptor(grad, near_rows),
        number_descriptor(numbers, near_rows),
        *((None, None) if totals is None else totals),
        grad_key,
        grad_value,
        *strides(query),
        *strides(key),
        *strides(value),
        *strides(grad),
        numbers.stride(1),
        plan.tokens,
        0 if totals is None else totals[0].shape[1],
        plan.reach(window_size),
        plan.kv_heads,
        scale,
        base2_scale(scale),
        BLOCK_SIZE=forced.block_size,
        LOCAL=forced.num_local,
        NEAR_ROWS=near_rows,
        **plan.constants(tiles),
    )
    return grad_key.transpose(1, 2), grad_value.transpose(1, 2)


def _numbers(rows: Rows, gates: Tensor) -> Tensor:
    """Gated log-sum-exp and delta of the sliding and then of the selected branch.

    Float32 (B, 4 * Hq, S), contiguous along the tokens, rows on boundaries of 16 bytes. Of
    `lse - ln|gate|`, in base 2, the last bit is the sign of the gate.
    """
    batch, tokens, heads = rows.sliding_lse.shape
    numbers = empty_numbers(batch, 4 * heads, tokens, gates.device)
    core_numbers_kernel[(triton.cdiv(tokens, NUMBER_TOKENS), batch)](
        rows.sliding_lse,
        rows.delta_sliding,
        rows.selected_lse,
        rows.delta_selected,
        gates,
        numbers,
        *gates.stride(),
        numbers.stride(1),
        tokens,
        heads,
        TOKENS=NUMBER_TOKENS,
        HEADS=min(32, tile_width(heads)),
    )
    return numbers


@triton.jit
def signed_lse(lse, gate):
    """Base-2 `lse - ln|gate|` with the sign of the gate for its last bit."""
    LOG2E_: tl.constexpr = 1.4426950408889634
    lse = (lse - log_of_size(gate)) * LOG2E_
    # Infinity has no bit to spare; from here on there is no weight either.
    bits = tl.where(lse > 1.0e30, 1.0e30, lse).to(tl.int32, bitcast=True)
    return ((bits & -2) | (gate < 0).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens"])
def core_numbers_kernel(
    sliding_lse_ptr, delta_sliding_ptr, selected_lse_ptr, delta_selected_ptr, gate_ptr, out_ptr,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c, out_stride_h,
    num_tokens, query_heads,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    for first in range(0, query_heads, HEADS):
        head = (first + tl.arange(0, HEADS))[None, :]
        there = (token < num_tokens) & (head < query_heads)
        line = (b * num_tokens + token) * query_heads + head
        gate = gate_ptr + b * gate_stride_b + row_places(token, head, gate_stride_h, gate_stride_s)
        sliding_gate = tl.load(gate + 2 * gate_stride_c, mask=there, other=0.0).to(tl.float32)
        selected_gate = tl.load(gate + gate_stride_c, mask=there, other=0.0).to(tl.float32)
        out = out_ptr + row_places(token, b * 4 * query_heads + head, out_stride_h, 1)
        step = query_heads * out_stride_h
        lse = tl.load(sliding_lse_ptr + line, mask=there, other=0.0)
        tl.store(out, signed_lse(lse, sliding_gate), mask=there)
        delta = tl.load(delta_sliding_ptr + line, mask=there, other=0.0)
        tl.store(out + step, delta, mask=there)
        lse = tl.load(selected_lse_ptr + line, mask=there, other=0.0)
        tl.store(out + 2 * step, signed_lse(lse, selected_gate), mask=there)
        delta = tl.load(delta_selected_ptr + line, mask=there, other=0.0)
        tl.store(out + 3 * step, delta, mask=there)


@triton.jit
def of_head(rows, head):
    """The same tensor's `HeadRows` of another head."""
    return HeadRows(
        rows.tiles, rows.ptr, rows.b, head,
        rows.stride_b, rows.stride_h, rows.stride_s, rows.num_tokens,
    )  # fmt: skip


@triton.jit
def with_tiles(rows, tiles):
    """The same tensor's `HeadRows` with another descriptor."""
    return HeadRows(
        tiles, rows.ptr, rows.b, rows.h,
        rows.stride_b, rows.stride_h, rows.stride_s, rows.num_tokens,
    )  # fmt: skip


class Numbers(NamedTuple):
    """What `_numbers` writes, of one batch row, inside a kernel."""

    tiles: Any  # a tensor descriptor, or None to go by `ptr`
    ptr: Any
    b: Any
    query_heads: Any
    stride_h: Any
    num_tokens: Any


@triton.jit
def load_kind(numbers, kind, head, first, ROWS: tl.constexpr):
    """A head's numbers of one of the four kinds, of tokens from `first` on."""
    row = kind * numbers.query_heads + head
    stride_b = 4 * numbers.query_heads * numbers.stride_h
    return load_numbers(
        numbers.tiles, numbers.ptr, numbers.b, row, stride_b, numbers.stride_h, first,
        numbers.num_tokens, ROWS,
    )  # fmt: skip


@triton.jit
def weights(scores, lse, scale_log2):
    """Gated weights; a `lse` with its last bit set is of a negative gate."""
    p = tl.exp2(scores * scale_log2 - lse[None, :])
    sign = lse.to(tl.int32, bitcast=True) << 31
    return (p.to(tl.int32, bitcast=True) ^ sign[None, :]).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_tokens", "total_tokens", "window"])
def core_key_kernel(
    query_ptr, key_ptr, value_ptr, grad_out_ptr, number_ptr,
    query_tiles, key_tiles, value_tiles, grad_out_tiles, number_tiles,
    near_query_tiles, near_grad_out_tiles, near_number_tiles,
    total_key_ptr, total_value_ptr, grad_key_ptr, grad_value_ptr,
    query_stride_b, query_stride_h, query_stride_s,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    grad_out_stride_b, grad_out_stride_h, grad_out_stride_s,
    number_stride_h, num_tokens, total_tokens, window, kv_heads, scale, scale_log2,
    BLOCK_SIZE: tl.constexpr, LOCAL: tl.constexpr, NEAR_ROWS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dV_j = sum_c gate_c p_cj dO and dK_j = scale * sum_c gate_c p_cj (dO v_j - delta_c) q.

    Scores are (KEYS, ROWS): weights then are the left factors of both products as they leave
    the registers. Rows past the last token are read as 0: their weights meet only zeros.

    The tiles of queries with local blocks come first, of all heads, in a loop of their own: the
    second set of weights takes registers that the other loop has not.
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
    queries = HeadRows(
        query_tiles, query_ptr, b, h, query_stride_b, query_stride_h, query_stride_s, num_tokens
    )
    grad_outs = HeadRows(
        grad_out_tiles, grad_out_ptr, b, h,
        grad_out_stride_b, grad_out_stride_h, grad_out_stride_s, num_tokens,
    )  # fmt: skip
    k, v = load_keys(keys, values, start, KEYS, HEAD_DIM, HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS)
    grad_k = tl.zeros([KEYS, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([KEYS, VALUE_COLUMNS], tl.float32)

    query_heads = kv_heads * GROUP
    stop = tl.minimum(start + KEYS - 1 + window, num_tokens)
    tiles_seen = (stop - start + ROWS - 1) // ROWS
    local = 0
    if LOCAL > 0:
        # Queries from here on have none of the keys in a local block.
        local_stop = ((start + KEYS - 1) // BLOCK_SIZE + LOCAL) * BLOCK_SIZE
        local_stop = tl.maximum(local_stop, start + KEYS - 1)
        local = tl.minimum((local_stop - start + ROWS - 1) // ROWS, tiles_seen)
        near = local * (ROWS // NEAR_ROWS)
        near_queries = with_tiles(queries, near_query_tiles)
        near_grad_outs = with_tiles(grad_outs, near_grad_out_tiles)
        near_numbers = Numbers(
            near_number_tiles, number_ptr, b, query_heads, number_stride_h, num_tokens
        )
        for i in tl.range(0, near * GROUP, num_stages=STAGES):
            head = h * GROUP + i // near
            first = start + i % near * NEAR_ROWS
            q = load_tile(of_head(near_queries, head), first, NEAR_ROWS, HEAD_DIM, HEAD_COLUMNS)
            grad_out = load_tile(
                of_head(near_grad_outs, head), first, NEAR_ROWS, VALUE_DIM, VALUE_COLUMNS
            )
            scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
            lse = load_kind(near_numbers, 0, head, first, NEAR_ROWS)
            delta = load_kind(near_numbers, 1, head, first, NEAR_ROWS)
            token = first + tl.arange(0, NEAR_ROWS)
            p = weights(scores, lse, scale_log2)
            p = tl.where(seen(token[None, :], key[:, None], window), p, 0.0)
            grad_scores = p * (grad_p - delta[None, :])
            lse = load_kind(near_numbers, 2, head, first, NEAR_ROWS)
            delta = load_kind(near_numbers, 3, head, first, NEAR_ROWS)
            other = weights(scores, lse, scale_log2)
            least = tl.maximum(first_local_key(token, BLOCK_SIZE, LOCAL), 0)
            local_keys = (key[:, None] >= least[None, :]) & (key[:, None] <= token[None, :])
            other = tl.where(local_keys, other, 0.0)
            grad_scores += other * (grad_p - delta[None, :])
            p += other
            grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
            grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=PRECISION)

    numbers = Numbers(number_tiles, number_ptr, b, query_heads, number_stride_h, num_tokens)
    others = tiles_seen - local
    for i in tl.range(0, others * GROUP, num_stages=STAGES):
        head = h * GROUP + i // others
        first = start + (local + i % others) * ROWS
        q = load_tile(of_head(queries, head), first, ROWS, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_tile(of_head(grad_outs, head), first, ROWS, VALUE_DIM, VALUE_COLUMNS)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        lse = load_kind(numbers, 0, head, first, ROWS)
        # Before the products below start: a wait while they run would serialise them.
        delta = load_kind(numbers, 1, head, first, ROWS)
        p = weights(scores, lse, scale_log2)
        if (first < start + KEYS - 1) | (first + ROWS > start + window):
            token = first + tl.arange(0, ROWS)
            p = tl.where(seen(token[None, :], key[:, None], window), p, 0.0)
        grad_v = tl.dot(p.to(q.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[None, :])).to(q.dtype)
        grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)

    there = key < num_tokens
    total = (b.to(tl.int64) * total_tokens + key) * kv_heads + h
    place = (b.to(tl.int64) * num_tokens + key) * kv_heads + h
    grad_k *= scale
    if total_key_ptr is not None:
        grad_k += load_rows(total_key_ptr, total * HEAD_DIM, there, HEAD_DIM, HEAD_COLUMNS)
    store_rows(grad_key_ptr, place * HEAD_DIM, there, grad_k, HEAD_DIM, HEAD_COLUMNS)
    if total_value_ptr is not None:
        grad_v += load_rows(total_value_ptr, total * VALUE_DIM, there, VALUE_DIM, VALUE_COLUMNS)
    store_rows(grad_value_ptr, place * VALUE_DIM, there, grad_v, VALUE_DIM, VALUE_COLUMNS)
