"""dQ of the core: the sliding branch, and with it what else is at hand.

A CTA holds a query tile and streams its window. The local blocks lie in there: where both branches
have the same keys, logits and `dO v^T` are the same, and so is the product with the keys. The
initial blocks are a tile more. dQ of the compressed branch is read where cuDNN left it, one part
of the fold after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, has_kind, span_has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E, base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of
from nsa_flex.fallback_kernels.fused.bwd_gates import log_abs
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import load_compressed
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, empty_stats
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    edge_block_n,
    heads_of_tile,
    load_document_start,
    load_key_value,
    load_rows_at,
    query_rows,
    query_tile_of_cta,
    row_offsets,
    store_rows_at,
)

ZEROS = tl.constexpr(1024)  # numbers that one CTA sets to zero at a time
ZEROS_BLOCKS = tl.constexpr(4)  # blocks of the tokens whose vectors a CTA sets to zero, at most


@dataclass(frozen=True)
class InitialLocal:
    """Initial and local blocks of the selected branch that the window's kernels take over."""

    block_size: int  # l'
    num_initial: int  # 0 with documents, each of which has initial blocks of its own
    num_local: int  # no more than the window holds

    @classmethod
    def none(cls, block_size: int) -> InitialLocal:
        return cls(block_size, 0, 0)


@dataclass(frozen=True)
class QueryRows:
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


class QueryGradients(NamedTuple):
    """What `query_gradients` returns."""

    query: Tensor  # (B, S, Hq, D)
    # Float32 (B, 4 * Hq, S), contiguous along the tokens, rows on boundaries of 16 bytes: gated
    # log-sum-exp and delta of the sliding branch, then of the selected one if there are local
    # blocks. The log-sum-exp is `lse - ln|gate|` in base 2, its last bit the sign of the gate.
    stats: Tensor


def query_gradients(
    rows: QueryRows,
    signed: Tensor,
    compressed_parts: list[Tensor],
    fold: Fold,
    key: Tensor,
    value: Tensor,
    gates: Tensor,
    document_start: Tensor | None,
    initial_local: InitialLocal,
    window_size: int,
    scale: float,
    zeroed: tuple[Tensor, ...] | None = None,
    kinds: Tensor | None = None,
    grad_query: Tensor | None = None,
) -> QueryGradients:
    """dQ of the compressed branch, the sliding branch, initial and local blocks.

    Args:
        signed: `rows.grad` with any signs by row, or that tensor itself: gets the sign of the
            selected branch's gate.
        compressed_parts: dQ of the compressed branch, by the parts of its fold.
        key, value: of the sliding branch, (B, Hkv, Sk, D) and (B, Hkv, Sk, Dv); the queries are
            the last tokens.
        gates: (B, Hq, S, 3), any strides, any real numbers.
        document_start: int32 (B, Sk), contiguous, first key of each query's document, never
            decreasing along a row; None for one document.
        initial_local: where it has any, the selected branch has the same keys and values.
        zeroed: one tensor or two (1 or 2, B, tokens, Hkv, ·), contiguous, that are set to 0.
        kinds: of `block_kinds`. Of short documents dQ stays as it is, and nothing else is written.
        grad_query: memory of dQ, contiguous; None for new memory.
    """
    first, second, *_ = (*(zeroed or ()), None, None)
    key, value = (rows_contiguous(x) for x in (key, value))
    plan = SlidingPlan.of(rows.query.transpose(1, 2), key, value)
    tiles = plan.dq_tiles()
    if grad_query is None:
        grad_query = torch.empty_like(rows.query)
    stats = empty_stats(plan.batch, 4 * plan.query_heads, plan.tokens, rows.query.device)
    fused_bwd_dq_kernel[(plan.query_ctas(tiles),)](
        *rows.all(),
        signed,
        gates,
        key,
        value,
        descriptor(key, tiles.block_n),
        descriptor(value, tiles.block_n),
        document_start,
        kinds,
        *compressed_parts,
        grad_query,
        stats,
        first,
        second,
        strides(key),
        strides(value),
        gates.stride(),
        stats.stride(1),
        plan.tokens,
        *(0 if x is None else x[..., 0, 0].numel() for x in (first, second)),
        *((0, 0) if first is None else first.shape[1:3]),
        key.shape[2],
        min(window_size, key.shape[2]),
        plan.kv_heads,
        scale,
        base2_scale(scale),
        *bounds_of(fold.ranges),
        fold.reach,
        OFFSET=key.shape[2] > plan.tokens,
        STRIDE=fold.stride,
        BLOCK_SIZE=initial_local.block_size,
        INITIAL=initial_local.num_initial,
        LOCAL=initial_local.num_local,
        **plan.constants(tiles),
    )
    return QueryGradients(grad_query, stats)


@triton.jit
def _store_zeros(
    ptr, count, rows, tokens, width, kinds_ptr, num_tokens,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sets this CTA's share of `count` vectors of `width` numbers to 0, (1 or 2, rows, tokens).

    Shares of short documents' tokens alone stay as they are.
    """
    share = (count + tl.num_programs(0) - 1) // tl.num_programs(0)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, count)
    if kinds_ptr is not None:
        row = begin // tokens
        short = span_has_kind(
            kinds_ptr, row % rows, begin - row * tokens, end - 1 - row * tokens, num_tokens,
            SHORT_DOCUMENT, BLOCK_SIZE, ZEROS_BLOCKS,
        )  # fmt: skip
        if short & (end <= (row + 1) * tokens):
            end = begin
    ptr += begin.to(tl.int64) * width
    size = (end - begin).to(tl.int64) * width
    for start in range(0, size, BLOCK):
        offset = start + tl.arange(0, BLOCK)  # [BLOCK]
        tl.store(ptr + offset, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=offset < size)


@triton.jit
def signed_lse(lse, gate):
    """Base-2 `lse - ln|gate|` with the sign of the gate for its last bit."""
    lse = (lse - log_abs(gate)) * LOG2E
    # Infinity has no bit to spare; from 1e30 on the probability is 0 as well.
    bits = tl.where(lse > 1.0e30, 1.0e30, lse).to(tl.int32, bitcast=True)
    return ((bits & -2) | (gate < 0).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def first_local_key(token, BLOCK_SIZE: tl.constexpr, LOCAL: tl.constexpr):
    """The first key of the local blocks of the query at `token`; may be negative."""
    return (token // BLOCK_SIZE - LOCAL + 1) * BLOCK_SIZE


@triton.jit
def add_dq_tile(
    q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta, selected_gate,
    token, first_key, start, window, scale_log2, acc, in_window,
    BLOCK_SIZE: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    MASKED: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`acc` [BLOCK_M, BLOCK_D] plus one key tile's share of dQ, before the scale.

    Unless MASKED, all rows see all keys through the window, and through nothing else. A tile
    `in_window` has keys of the window and of local blocks, another one those of initial blocks.
    `first_key` is the first of the rows' document: 0, one for all rows, or [BLOCK_M].
    """
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    p = tl.exp2(logits * scale_log2 - sliding_lse[:, None])
    key = tl.arange(0, k.shape[0])[None, :]
    last = token - start  # [BLOCK_M], as first
    if MASKED:
        first = tl.maximum(last - window + 1, first_key - start)
        window_last = tl.where(in_window, last, -1)
        visible = (key >= first[:, None]) & (key <= window_last[:, None])
        p = tl.where(visible, p, 0.0)
    grad_logits = p * (grad_p - sliding_delta[:, None])  # [BLOCK_M, BLOCK_N]
    if MASKED and DOCUMENTS:  # another document may be large: 0 times inf is NaN
        grad_logits = tl.where(visible, grad_logits, 0.0)
    if MASKED and LOCAL > 0:
        local = first_local_key(token, BLOCK_SIZE, LOCAL)
        first = tl.where(in_window, tl.maximum(local, first_key), 0) - start
        last_initial = tl.minimum(local, INITIAL * BLOCK_SIZE) - 1 - start
        last = tl.where(in_window, last, last_initial)
        p = tl.exp2(logits * scale_log2 - selected_lse[:, None]) * selected_gate[:, None]
        visible = (key >= first[:, None]) & (key <= last[:, None])
        p = tl.where(visible, p, 0.0)
        selected_grad_logits = p * (grad_p - selected_delta[:, None])
        if DOCUMENTS:
            selected_grad_logits = tl.where(visible, selected_grad_logits, 0.0)
        grad_logits += selected_grad_logits
    return tl.dot(grad_logits.to(k.dtype), k, acc, input_precision=PRECISION)


@recordable
@triton.jit(
    do_not_specialize=[
        "num_tokens", "zeros_rows", "zeros_tokens", "num_keys", "window", "rows",
        "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def fused_bwd_dq_kernel(
    query_ptr, grad_out_ptr,
    selected_lse_ptr, delta_selected_ptr, sliding_lse_ptr, delta_sliding_ptr, signed_ptr, gate_ptr,
    key_ptr, value_ptr, key_desc, value_desc, document_start_ptr, kinds_ptr,
    part0, part1, part2, part3, grad_query_ptr, stats_ptr,
    first_zeros_ptr, second_zeros_ptr,
    key_strides, value_strides, gate_strides, stats_stride_h,
    num_tokens, first_zeros, second_zeros, zeros_rows, zeros_tokens, num_keys, window, kv_heads,
    scale, scale_log2,
    rows, first1, first2, first3, reach,
    OFFSET: tl.constexpr, STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, INITIAL: tl.constexpr,
    LOCAL: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ = scale * sum_c gate_c sum_j p_cj (dO v_j - delta_c) k_j, all three branches.

    Besides, the statistics of its rows as the kernel of dK and dV reads them, and dO with the sign
    of the selected gate where that may not be the sign it has; and a share of zeros for the sums
    that start there.

    With `kinds_ptr`, none of it is written for short documents. OFFSET: whether there are more
    keys than tokens, of which the queries are the last.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    HEADS: tl.constexpr = heads_of_tile(GROUP, BLOCK_M)
    BLOCK_TOKENS: tl.constexpr = BLOCK_M // HEADS
    EDGE_BLOCK_N: tl.constexpr = edge_block_n(BLOCK_TOKENS, BLOCK_N)
    b, h, first, first_head = query_tile_of_cta(num_tokens, kv_heads, GROUP, HEADS, BLOCK_TOKENS)
    token, head_in_group, row_mask = query_rows(
        first, first_head, num_tokens, GROUP, HEADS, BLOCK_TOKENS, BLOCK_M
    )  # [BLOCK_M] each
    if first_zeros_ptr is not None:
        _store_zeros(
            first_zeros_ptr, first_zeros, zeros_rows, zeros_tokens, kv_heads * HEAD_DIM,
            kinds_ptr, num_tokens, BLOCK_SIZE, ZEROS,
        )  # fmt: skip
    if second_zeros_ptr is not None:
        _store_zeros(
            second_zeros_ptr, second_zeros, zeros_rows, zeros_tokens, kv_heads * VALUE_DIM,
            kinds_ptr, num_tokens, BLOCK_SIZE, ZEROS,
        )  # fmt: skip
    if kinds_ptr is not None:
        row_mask &= ~has_kind(kinds_ptr, b, token, num_tokens, SHORT_DOCUMENT, BLOCK_SIZE)
        if tl.max(row_mask.to(tl.int32), 0) == 0:
            return
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_heads = kv_heads * GROUP
    row = row_offsets(token, head_in_group, 1, query_heads)
    row = row + batch * num_tokens * query_heads + head  # [BLOCK_M]
    q = load_rows_at(query_ptr, row * HEAD_DIM, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    grad_out = load_rows_at(
        grad_out_ptr, row * VALUE_DIM, row_mask, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    gate_ptr += batch * gate_strides[0] + head * gate_strides[1]
    gate_ptr += row_offsets(token, head_in_group, gate_strides[1], gate_strides[2])
    compressed_gate = tl.load(gate_ptr, mask=row_mask, other=0.0)  # [BLOCK_M]
    selected_gate = tl.load(gate_ptr + gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    store_rows_at(
        signed_ptr, row * VALUE_DIM, row_mask & ((compressed_gate < 0.0) | (selected_gate < 0.0)),
        tl.where((selected_gate < 0.0)[:, None], -grad_out, grad_out), VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    # The window's gate: its size goes into the log-sum-exp, its sign into dO and the deltas.
    gate = tl.load(gate_ptr + 2 * gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    negative = gate < 0.0  # [BLOCK_M], as all stats below
    grad_out = tl.where(negative[:, None], -grad_out, grad_out)
    stats_ptr += batch * 4 * query_heads * stats_stride_h
    stats_ptr += row_offsets(token, h * GROUP + head_in_group, stats_stride_h, 1)
    stats_step = query_heads.to(tl.int64) * stats_stride_h
    sliding_lse = tl.load(sliding_lse_ptr + row, mask=row_mask, other=float("inf"))
    tl.store(stats_ptr, signed_lse(sliding_lse, gate), mask=row_mask)
    sliding_lse = (sliding_lse - log_abs(gate)) * LOG2E
    sliding_delta = tl.load(delta_sliding_ptr + row, mask=row_mask, other=0.0)
    tl.store(stats_ptr + stats_step, sliding_delta, mask=row_mask)
    sliding_delta = tl.where(negative, -sliding_delta, sliding_delta)
    selected_lse = sliding_lse
    selected_delta = sliding_delta
    if LOCAL > 0:
        selected_lse = tl.load(selected_lse_ptr + row, mask=row_mask, other=float("inf"))
        tl.store(
            stats_ptr + 2 * stats_step, signed_lse(selected_lse, selected_gate), mask=row_mask
        )
        selected_lse *= LOG2E
        selected_delta = tl.load(delta_selected_ptr + row, mask=row_mask, other=0.0)
        tl.store(stats_ptr + 3 * stats_step, selected_delta, mask=row_mask)
        selected_delta = tl.where(negative, -selected_delta, selected_delta)
        selected_gate = tl.where(negative, -selected_gate, selected_gate)

    keys = HeadRows(key_desc, key_ptr, b, h, key_strides, num_keys)
    values = HeadRows(value_desc, value_ptr, b, h, value_strides, num_keys)
    position, first_position = token, first
    if OFFSET:
        position += num_keys - num_tokens
        first_position += num_keys - num_tokens
    DOCUMENTS: tl.constexpr = document_start_ptr is not None
    if not DOCUMENTS:
        first_key, lowest, highest = 0, 0, 0
    elif BLOCK_SIZE % BLOCK_TOKENS == 0 and not OFFSET:  # a tile lies in one document's block
        first_key = tl.load(document_start_ptr + batch * num_keys + first_position)
        lowest, highest = first_key, first_key
    else:
        first_key, lowest, highest = load_document_start(document_start_ptr, b, position, num_keys)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = first_position + BLOCK_TOKENS
    # Tiles of the window with a mask, or with local blocks.
    near_tiles = (BLOCK_TOKENS + BLOCK_N - 1) // BLOCK_N
    full_tiles = tl.maximum((end - tl.maximum(end - window, highest)) // BLOCK_N, near_tiles)
    if LOCAL > 0:
        local = end - first_local_key(first_position, BLOCK_SIZE, LOCAL)
        local_tiles = (local + BLOCK_N - 1) // BLOCK_N
        near_tiles = tl.minimum(tl.maximum(local_tiles, near_tiles), full_tiles)
    masked_tiles = near_tiles
    if INITIAL > 0:
        initial_tiles: tl.constexpr = (INITIAL * BLOCK_SIZE + BLOCK_N - 1) // BLOCK_N
        has_initial = first_local_key(end - 1, BLOCK_SIZE, LOCAL) > 0
        masked_tiles += tl.where(has_initial, initial_tiles, 0)
    for i in tl.range(0, masked_tiles, num_stages=STAGES):
        start = tl.where(i < near_tiles, end - (i + 1) * BLOCK_N, (i - near_tiles) * BLOCK_N)
        k, v = load_key_value(
            keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        acc = add_dq_tile(
            q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta,
            selected_gate, position, first_key, start, window, scale_log2, acc, i < near_tiles,
            BLOCK_SIZE, INITIAL, LOCAL, True, DOCUMENTS, PRECISION,
        )  # fmt: skip
    for i in tl.range(near_tiles, full_tiles, num_stages=STAGES):
        start = end - (i + 1) * BLOCK_N
        k, v = load_key_value(
            keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        acc = add_dq_tile(
            q, grad_out, k, v, sliding_lse, sliding_delta, selected_lse, selected_delta,
            selected_gate, position, first_key, start, window, scale_log2, acc, i < full_tiles,
            BLOCK_SIZE, INITIAL, LOCAL, False, DOCUMENTS, PRECISION,
        )  # fmt: skip
    end -= full_tiles * BLOCK_N

    edge_keys = tl.maximum(end - tl.maximum(first_position - window + 1, lowest), 0)
    for i in tl.range(0, (edge_keys + EDGE_BLOCK_N - 1) // EDGE_BLOCK_N, num_stages=1):
        start = end - (i + 1) * EDGE_BLOCK_N
        edge_k, edge_v = load_key_value(
            keys, values, start, EDGE_BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            BY_POINTERS=True,
        )  # fmt: skip  # [EDGE_BLOCK_N, BLOCK_D], [EDGE_BLOCK_N, BLOCK_DV]
        acc = add_dq_tile(
            q, grad_out, edge_k, edge_v, sliding_lse, sliding_delta, selected_lse, selected_delta,
            selected_gate, position, first_key, start, window, scale_log2, acc, i >= 0,
            BLOCK_SIZE, INITIAL, LOCAL, True, DOCUMENTS, PRECISION,
        )  # fmt: skip

    acc *= scale
    compressed = load_compressed(
        part0, part1, part2, part3, batch, token, head + head_in_group, row_mask, query_heads,
        rows, first1, first2, first3, reach, STRIDE, HEAD_DIM, BLOCK_D,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    acc += compressed.to(tl.float32)
    store_rows_at(grad_query_ptr, row * HEAD_DIM, row_mask, acc, HEAD_DIM, BLOCK_D)
