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
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale, load_lse_log2
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, round_up, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.ranges.tiles import key_bounds, load_tile, store_tile
from nsa_flex.fallback_kernels.short.config import plan_of
from nsa_flex.fallback_kernels.short.fwd import ShortResults
from nsa_flex.fallback_kernels.short.masks import has_block, selected_words, slots
from nsa_flex.fallback_kernels.short.spans import block_span, token_spans
from nsa_flex.fallback_kernels.sliding.config import empty_stats
from nsa_flex.fallback_kernels.sliding.tiles import HeadRows, load_key_value

NEAR, FAR, COMPRESSED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
UNSELECTED = tl.constexpr(3)  # near keys that the window alone has
NUM_STATS = 9  # L, a and b of near keys, far keys and compressed keys
WORDS = tl.constexpr(12)  # then the bits of the blocks that a query selected, two words
NUM_STATS_MASKED = 14


@triton.jit
def _delta(ptr, grad_out, query, row_stride, num_tokens, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """rowsum(out * grad_out) [BLOCK_M] of a branch's output: its gate's gradient, too."""
    out = load_tile(ptr, query, row_stride, num_tokens, True, DIM, BLOCK)  # [BLOCK_M, BLOCK_DV]
    return tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)


@triton.jit
def _factor(lse, larger):
    """2^(lse - larger): not NaN where a document is so large that it has no finite results, since
    p may be 0 there.
    """
    factor = tl.exp2(lse - larger)
    return tl.where(factor <= 1.0, factor, 1.0)


@triton.jit
def _store_stats(ptr, span: tl.constexpr, step, lse_log2, a, b, row_mask):
    """The three numbers of a row that `short_bwd_dkdv_kernel` reads of a span."""
    ptr += 3 * span * step
    tl.store(ptr, lse_log2, mask=row_mask)
    tl.store(ptr + step, a, mask=row_mask)
    tl.store(ptr + 2 * step, b, mask=row_mask)


@triton.jit
def _add_span(
    grad_q, q, grad_out, keys, values, first_key, end_key, row_mask, lse_log2, a, b, scale_log2,
    low, high, own_first, other_lse, other_a, other_b, SELECT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ / scale [BLOCK_M, BLOCK_D] with what the keys [first_key, end_key) of each row add.

    low, high, own_first: of `selected_words`, or None; for keys of blocks that a row did not
    choose, `other_lse` and the like take the place of `lse_log2` and the like.
    """
    begin, full_begin, full_end, end = key_bounds(first_key, end_key, row_mask, BLOCK_N)
    for tile in tl.range(0, (end - begin) // BLOCK_N, num_stages=STAGES):
        start = begin + tile * BLOCK_N
        k, v = load_key_value(
            keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if low is None:
            p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
            grad_logits = p * (a[:, None] * grad_p - b[:, None])
        else:
            has_keys = has_block(low, high, own_first, start // SELECT)  # [BLOCK_M]
            tile_lse = tl.where(has_keys, lse_log2, other_lse)
            tile_a = tl.where(has_keys, a, other_a)
            tile_b = tl.where(has_keys, b, other_b)
            p = tl.exp2(logits * scale_log2 - tile_lse[:, None])
            grad_logits = p * (tile_a[:, None] * grad_p - tile_b[:, None])
        if (start < full_begin) | (start >= full_end):
            column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            seen = (column[None, :] >= first_key[:, None]) & (column[None, :] < end_key[:, None])
            grad_logits = tl.where(seen, grad_logits, 0.0)
        grad_q = tl.dot(grad_logits.to(k.dtype), k, grad_q, input_precision=PRECISION)
    return grad_q


@recordable
@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "longest", "window"])
def short_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, window_k_ptr, window_v_ptr, ck_ptr, cv_ptr,
    key_desc, value_desc, window_key_desc, window_value_desc, gate_ptr,
    document_start_ptr, kinds_ptr, grad_out_ptr, compressed_ptr, selected_ptr, sliding_ptr,
    compressed_lse_ptr, selected_lse_ptr, sliding_lse_ptr, blocks_ptr,
    grad_q_ptr, grad_gate_ptr, stats_ptr,
    q_strides, k_strides, v_strides, window_k_strides, window_v_strides, ck_strides, cv_strides,
    do_strides, gate_strides, lse_strides, stats_strides, stats_step,
    num_tokens, num_blocks, query_heads, group, longest, window, selected_tokens,
    scale, scale_log2,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SHARED: tl.constexpr, SELECT: tl.constexpr,
    NUM_SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dQ (B, S, Hq, D), gradients of the gates and softmax stats of a tile of one head's queries.

    stats: float32 (B, 9 or 14 * Hq, S), three of each span of keys. key_desc and the like: of
    tiles of BLOCK_N keys, or None. With `blocks_ptr`, int32 (B, Hkv, S, n), the selected branch
    sees those blocks alone, `selected_tokens` tokens, and the last two numbers have a bit each.
    stats_step: from one of a head's numbers to the next.

    With `kinds_ptr`, only rows of short documents are written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    PRECISION: tl.constexpr = precision_of(k_ptr.dtype.element_ty)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late queries see more: they start first
    row_of_batch = tl.program_id(2)
    b = row_of_batch.to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = row.to(tl.int64)
    row_mask = row < num_tokens
    if document_start_ptr is not None:
        document_start_ptr += b * num_tokens
    if kinds_ptr is not None:
        row_mask = has_kind(kinds_ptr, b, row, num_tokens, SHORT_DOCUMENT, SELECT)
        if tl.max(row_mask.to(tl.int32), 0) == 0:
            return
        query = tl.where(row_mask, query, num_tokens)  # as if it were not there
    first_key, window_first, end_key = token_spans(
        document_start_ptr, row, num_tokens, longest, window
    )

    kv_head = head // group
    wide_head = head.to(tl.int64)
    q_ptr += b * q_strides[0] + wide_head * q_strides[1]
    grad_out_ptr += b * do_strides[0] + wide_head * do_strides[1]
    keys = HeadRows(key_desc, k_ptr, row_of_batch, kv_head, k_strides, num_tokens)
    values = HeadRows(value_desc, v_ptr, row_of_batch, kv_head, v_strides, num_tokens)
    window_keys = HeadRows(
        window_key_desc, window_k_ptr, row_of_batch, kv_head,
        window_k_strides, num_tokens,
    )  # fmt: skip
    window_values = HeadRows(
        window_value_desc, window_v_ptr, row_of_batch, kv_head,
        window_v_strides, num_tokens,
    )  # fmt: skip
    blocks = HeadRows(None, ck_ptr, row_of_batch, kv_head, ck_strides, num_blocks)
    block_values = HeadRows(None, cv_ptr, row_of_batch, kv_head, cv_strides, num_blocks)
    first_row = b * num_tokens * query_heads + head
    row_stride = query_heads * VALUE_DIM
    stats = first_row + query * query_heads  # [BLOCK_M]
    grad_out = load_tile(
        grad_out_ptr, query, do_strides[2], num_tokens, True, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    gate_ptr += b * gate_strides[0] + wide_head * gate_strides[1] + query * gate_strides[2]
    gate = tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)  # [BLOCK_M]
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

    selected_gate = tl.load(gate_ptr + gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    near_a = tl.load(gate_ptr + 2 * gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    lse_row = b * lse_strides[0] + wide_head * lse_strides[1] + query * lse_strides[2]
    compressed_lse = load_lse_log2(compressed_lse_ptr, lse_row, row_mask)
    selected_lse = load_lse_log2(selected_lse_ptr, stats, row_mask)
    sliding_lse = load_lse_log2(sliding_lse_ptr, stats, row_mask)
    near_b = near_a * delta_sliding
    far_b = selected_gate * delta_selected
    near_lse = sliding_lse
    window_a, window_b = near_a, near_b
    far_end = end_key
    if SHARED:
        far_end = window_first
        # Of a key that both have, the smaller log-sum-exp gives the larger of two weights, which
        # is 1 at most. If all blocks are selected, it is the window's.
        near_lse = tl.minimum(sliding_lse, selected_lse)
        if blocks_ptr is not None:
            factor = _factor(near_lse, sliding_lse)
            near_a, near_b = factor * near_a, factor * near_b
        factor = _factor(near_lse, selected_lse)
        near_a += factor * selected_gate
        near_b += factor * far_b
    stats_ptr += b * stats_strides[0] + wide_head * stats_strides[1] + query
    step = stats_step.to(tl.int64)
    _store_stats(stats_ptr, NEAR, step, near_lse, near_a, near_b, row_mask)
    _store_stats(stats_ptr, FAR, step, selected_lse, selected_gate, far_b, row_mask)
    compressed_b = gate * delta_compressed
    _store_stats(stats_ptr, COMPRESSED, step, compressed_lse, gate, compressed_b, row_mask)
    low, high, near_low, own_first = None, None, None, None
    if blocks_ptr is not None:
        if document_start_ptr is not None:
            own_first = first_key // SELECT
        unit = b * (query_heads // group) + kv_head
        low, high = selected_words(
            blocks_ptr + unit * num_tokens * NUM_SLOTS, query, row_mask, own_first,
            NUM_SLOTS, PADDED_SLOTS,
        )  # fmt: skip  # [BLOCK_M] each
        words = stats_ptr + step * WORDS
        tl.store(words, low.to(tl.float32, bitcast=True), mask=row_mask)
        tl.store(words + step, high.to(tl.float32, bitcast=True), mask=row_mask)
        if SHARED:
            near_low = low
            _store_stats(stats_ptr, UNSELECTED, step, sliding_lse, window_a, window_b, row_mask)

    q = load_tile(q_ptr, query, q_strides[2], num_tokens, True, HEAD_DIM, BLOCK_D)
    grad_q = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_block, end_block = block_span(
        first_key, row, num_tokens, num_blocks, COMPRESS, STRIDE
    )  # [BLOCK_M] each
    # At the end where there are two ways for tokens: else registers do not suffice.
    if blocks_ptr is None:
        grad_q = _add_span(
            grad_q, q, grad_out, blocks, block_values, first_block, end_block, row_mask,
            compressed_lse, gate, compressed_b, scale_log2,
            None, None, None, None, None, None, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
        )  # fmt: skip
    if blocks_ptr is None:
        all_selected: tl.constexpr = True
    else:
        # The first queries of a document do: they see no more blocks than they take.
        all_selected = tl.max(tl.where(row_mask, row - first_key, 0), 0) < selected_tokens
    if all_selected:
        grad_q = _add_span(
            grad_q, q, grad_out, keys, values, first_key, far_end, row_mask,
            selected_lse, selected_gate, far_b, scale_log2,
            None, None, None, float("inf"), 0.0, 0.0, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
        grad_q = _add_span(
            grad_q, q, grad_out, window_keys, window_values, window_first, end_key, row_mask,
            near_lse, near_a, near_b, scale_log2,
            None, None, None, sliding_lse, window_a, window_b, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
    else:
        grad_q = _add_span(
            grad_q, q, grad_out, keys, values, first_key, far_end, row_mask,
            selected_lse, selected_gate, far_b, scale_log2,
            low, high, own_first, float("inf"), 0.0, 0.0, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
        grad_q = _add_span(
            grad_q, q, grad_out, window_keys, window_values, window_first, end_key, row_mask,
            near_lse, near_a, near_b, scale_log2,
            near_low, high, own_first, sliding_lse, window_a, window_b, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
        # The branches must not end alike: their ends would be merged, and the memory of both
        # loops' tiles be kept to there.
        tl.debug_barrier()
    if blocks_ptr is not None:
        grad_q = _add_span(
            grad_q, q, grad_out, blocks, block_values, first_block, end_block, row_mask,
            compressed_lse, gate, compressed_b, scale_log2,
            None, None, None, None, None, None, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
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
    stats: Tensor  # float32 (B, 9 or 14 * Hq, S), for the gradients of keys and values


def stats_shape(batch: int, heads: int, tokens: int, *, masked: bool) -> tuple[int, int, int]:
    """Of `QueryGradients.stats`, with what follows the last token; masked: blocks were given."""
    return batch, (NUM_STATS_MASKED if masked else NUM_STATS) * heads, round_up(tokens, 4)


def empty_masked_stats(batch: int, heads: int, tokens: int, device: torch.device) -> Tensor:
    """Memory of `QueryGradients.stats` of queries that selected blocks."""
    return empty_stats(batch, NUM_STATS_MASKED * heads, tokens, device)


def with_padding(stats: Tensor) -> Tensor:
    """`stats` as operators return them: contiguous, with what follows the last token in a row."""
    shape = (*stats.shape[:2], stats.stride(1))
    return stats.as_strided(shape, (stats.stride(0), stats.stride(1), 1))


def query_gradients(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    longest: int,
    blocks: Tensor | None = None,
    kinds: Tensor | None = None,
    grads: tuple[Tensor, Tensor] | None = None,
) -> QueryGradients:
    """Gradients of queries and gates; `grad` (B, Hq, S, Dv), the others as of `short_forward`.

    Args:
        blocks: int32 (B, Hkv, S, n), contiguous, what queries selected; None if every block.
        kinds: of `block_kinds`; only rows of short documents are written, into `grads`.
        grads: gradients of queries (B, S, Hq, D) and gates (B, S, Hq, 3), contiguous; None
            for new memory.
    """
    query, key, value, compressed_key, compressed_value, gates = tensors
    plan = plan_of(query, key, value)
    q, k, v, wk, wv, ck, cv, do = (
        rows_contiguous(x)
        for x in (
            *(query, key, value, *(own or (key, value)), compressed_key, compressed_value, grad),
        )
    )
    batch, heads, tokens, dim = q.shape
    if grads is None:
        grad_q = torch.empty((batch, tokens, heads, dim), dtype=q.dtype, device=q.device)
        grad_gates = gates.new_empty((batch, tokens, heads, 3))
    else:
        grad_q, grad_gates = grads
    if blocks is None:
        stats = empty_stats(batch, NUM_STATS * heads, tokens, q.device)
    else:
        stats = empty_masked_stats(batch, heads, tokens, q.device)
    descs = [descriptor(x, plan.bwd_dq.block_n) for x in (k, v, wk, wv)]
    if any(x is None for x in descs):
        descs = [None] * len(descs)
    short_bwd_dq_kernel[(heads, cdiv(tokens, plan.bwd_dq.block_m), batch)](
        q, k, v, wk, wv, ck, cv, *descs, gates, document_start, kinds, do,
        results.compressed, results.selected, results.sliding,
        results.compressed_lse, results.selected_lse, results.sliding_lse, blocks,
        grad_q, grad_gates, stats,
        *(strides(x) for x in (q, k, v, wk, wv, ck, cv, do)),
        gates.stride(), results.compressed_lse.stride(),
        stats.stride()[:2], heads * stats.stride(1),
        tokens, ck.shape[2], heads, heads // k.shape[1], longest, min(config.window_size, tokens),
        config.num_selected_tokens, scale, base2_scale(scale),
        COMPRESS=config.compress_block_size, STRIDE=config.compress_stride, SHARED=own is None,
        **slots(config), **plan.constants(), **plan.bwd_dq.constants(),
    )  # fmt: skip
    return QueryGradients(grad_q, grad_gates, stats)
