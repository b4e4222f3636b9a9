"""Forward of short documents: one CTA a tile of queries of one head, all branches and their sum.

The window's keys come first. Where the selected branch has the same keys, its softmax goes on
from there with the rest of the document: a score is computed once for both. So it is where
queries selected blocks; the window's keys go into two softmaxes then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_QUERIES, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import (
    LN2,
    base2_scale,
    finite,
    online_softmax_update,
)
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.ranges.tiles import key_bounds, load_tile, store_tile
from nsa_flex.fallback_kernels.short.config import masked_tiles, plan_of
from nsa_flex.fallback_kernels.short.masks import has_block, selected_words, slots
from nsa_flex.fallback_kernels.short.spans import block_span, token_spans
from nsa_flex.fallback_kernels.sliding.tiles import HeadRows, load_head_tile


@triton.jit
def _tile_logits(
    q, keys, start, is_edge, first_key, end_key,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Logits of a tile of queries and the keys from `start` on; is_edge: not all rows see all."""
    k = load_head_tile(keys, keys.h, start, BLOCK_N, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if is_edge:
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        seen = (column[None, :] >= first_key[:, None]) & (column[None, :] < end_key[:, None])
        logits = tl.where(seen, logits, float("-inf"))
    return logits


@triton.jit
def _attend_span(
    acc, row_max, row_sum, q, keys, values, first_key, end_key, row_mask, scale_log2,
    low, high, own_first,
    SELECT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The keys [first_key, end_key) of each row into the softmax sums of a tile of queries.

    keys, values: `HeadRows`. low, high, own_first: of `selected_words`, where a row sees the
    keys of the blocks alone that it selected.
    """
    begin, full_begin, full_end, end = key_bounds(first_key, end_key, row_mask, BLOCK_N)
    for tile in tl.range(0, (end - begin) // BLOCK_N, num_stages=STAGES):
        start = begin + tile * BLOCK_N
        is_edge = (start < full_begin) | (start >= full_end)
        logits = _tile_logits(
            q, keys, start, is_edge, first_key, end_key, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION
        )  # [BLOCK_M, BLOCK_N]
        if low is not None:
            has_keys = has_block(low, high, own_first, start // SELECT)  # [BLOCK_M]
            logits = tl.where(has_keys[:, None], logits, float("-inf"))
        v = load_head_tile(
            values, values.h, start, BLOCK_N, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        acc, row_max, row_sum = online_softmax_update(
            acc, row_max, row_sum, logits, v, scale_log2, None, True, PRECISION
        )
    return acc, row_max, row_sum


@triton.jit
def _add_part(acc, row_max, row_sum, part, part_max, part_sum):
    """Softmax sums of two sets of keys together; each refers to its own highest logit."""
    new_max = tl.maximum(row_max, part_max)  # [BLOCK_M]
    shift = finite(new_max)
    alpha, beta = tl.exp2(row_max - shift), tl.exp2(part_max - shift)
    return acc * alpha[:, None] + part * beta[:, None], new_max, row_sum * alpha + part_sum * beta


@triton.jit
def _attend_twice(
    acc, row_max, row_sum, selected_acc, selected_max, selected_sum,
    q, keys, values, first_key, end_key, row_mask, scale_log2, low, high, own_first,
    SELECT: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attend_span`, into two sets of sums: of all keys, and of blocks that a row selected.

    A tile of keys lies in one block, so that a row adds its product to the second set or does not.
    Weights refer to the tile's highest logit: by the highest of all, selected keys might vanish.
    """
    begin, full_begin, full_end, end = key_bounds(first_key, end_key, row_mask, BLOCK_N)
    for tile in tl.range(0, (end - begin) // BLOCK_N, num_stages=STAGES):
        start = begin + tile * BLOCK_N
        is_edge = (start < full_begin) | (start >= full_end)
        logits = _tile_logits(
            q, keys, start, is_edge, first_key, end_key, HEAD_DIM, BLOCK_D, BLOCK_N, PRECISION
        )  # [BLOCK_M, BLOCK_N]
        part_max = tl.max(logits, 1) * scale_log2  # [BLOCK_M]
        p = tl.exp2(logits * scale_log2 - finite(part_max)[:, None])  # [BLOCK_M, BLOCK_N]
        part_sum = tl.sum(p, 1)
        v = load_head_tile(
            values, values.h, start, BLOCK_N, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_DV]
        part = tl.dot(p.to(v.dtype), v, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
        acc, row_max, row_sum = _add_part(acc, row_max, row_sum, part, part_max, part_sum)
        has_keys = has_block(low, high, own_first, start // SELECT)  # [BLOCK_M]
        part_max = tl.where(has_keys, part_max, float("-inf"))
        selected_acc, selected_max, selected_sum = _add_part(
            selected_acc, selected_max, selected_sum, part, part_max, part_sum
        )
    return acc, row_max, row_sum, selected_acc, selected_max, selected_sum


@triton.jit
def _normalise(acc, row_max, row_sum):
    """Output and natural log-sum-exp of a branch; 0 and -inf for rows without keys."""
    empty = row_sum == 0.0
    row_sum = tl.where(empty, 1.0, row_sum)
    lse = (finite(row_max) + tl.log2(row_sum)) * LN2
    return acc / row_sum[:, None], tl.where(empty, float("-inf"), lse)


@triton.jit
def _gates(gate_ptr, query, num_tokens):
    """A branch's gates in float32 [BLOCK_M, 1]; 0 past the queries."""
    return tl.load(gate_ptr, mask=query < num_tokens, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _add_gated(
    out_ptr, branch, gate_ptr, query, row_stride, num_tokens,
    FIRST: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds a branch times its gate to the output, FIRST: to nothing.

    The sum waits in memory: in registers, a second accumulator would spill in the loops. Branches
    that are saved wait there themselves, and are summed at the end.
    """
    total = branch * _gates(gate_ptr, query, num_tokens)  # [BLOCK_M, BLOCK_DV]
    if not FIRST:
        tl.debug_barrier()  # other threads of the CTA may have stored what this one loads
        total += load_tile(out_ptr, query, row_stride, num_tokens, True, DIM, BLOCK).to(tl.float32)
    store_tile(out_ptr, query, row_stride, num_tokens, total, DIM, BLOCK)


@recordable
@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "longest", "window"])
def short_fwd_kernel(
    q_ptr, k_ptr, v_ptr, window_k_ptr, window_v_ptr, ck_ptr, cv_ptr,
    key_desc, value_desc, window_key_desc, window_value_desc, gate_ptr,
    document_start_ptr, kinds_ptr, blocks_ptr, out_ptr, compressed_ptr, selected_ptr, sliding_ptr,
    compressed_lse_ptr, selected_lse_ptr, sliding_lse_ptr,
    q_strides, k_strides, v_strides, window_k_strides, window_v_strides, ck_strides, cv_strides,
    gate_strides, lse_strides,
    num_tokens, num_blocks, query_heads, group, longest, window, scale_log2,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SHARED: tl.constexpr, SAVE: tl.constexpr,
    SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Gated sum and log-sum-exps of one tile of queries and one head; SAVE: the branches too.

    SHARED: the window has the selected branch's keys and values. With `blocks_ptr`, int32
    (B, Hkv, S, n), the selected branch sees those blocks alone, and the compressed branch, from
    which they were selected, is read. With `kinds_ptr`, only rows of short queries are written, or
    with both, only the other rows.
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
        is_short = has_kind(kinds_ptr, b, row, num_tokens, SHORT_QUERIES, SELECT)
        row_mask &= is_short == (blocks_ptr is None)
        if tl.max(row_mask.to(tl.int32), 0) == 0:
            return
        query = tl.where(row_mask, query, num_tokens)  # as if it were not there
    first_key, window_first, end_key = token_spans(
        document_start_ptr, row, num_tokens, longest, window
    )

    kv_head = head // group
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
    wide_head = head.to(tl.int64)
    q_ptr += b * q_strides[0] + wide_head * q_strides[1]
    gate_ptr += b * gate_strides[0] + wide_head * gate_strides[1] + query * gate_strides[2]
    first_row = b * num_tokens * query_heads + head
    row_stride = query_heads * VALUE_DIM
    stats = first_row + query * query_heads  # [BLOCK_M]
    q = load_tile(q_ptr, query, q_strides[2], num_tokens, True, HEAD_DIM, BLOCK_D)

    out_ptr += first_row * VALUE_DIM
    low, high, own_first = None, None, None
    if blocks_ptr is not None:
        if document_start_ptr is not None:
            own_first = first_key // SELECT
        unit = b * (query_heads // group) + kv_head
        low, high = selected_words(
            blocks_ptr + unit * num_tokens * NUM_SLOTS, query, row_mask, own_first,
            NUM_SLOTS, PADDED_SLOTS,
        )  # fmt: skip  # [BLOCK_M] each
        branch = load_tile(
            compressed_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, True,
            VALUE_DIM, BLOCK_DV,
        ).to(tl.float32)  # fmt: skip  # [BLOCK_M, BLOCK_DV]
    else:
        first_block, end_block = block_span(
            first_key, row, num_tokens, num_blocks, COMPRESS, STRIDE
        )  # [BLOCK_M] each
        acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc, row_max, row_sum = _attend_span(
            acc, row_max, row_sum, q, blocks, block_values,
            first_block, end_block, row_mask, scale_log2, None, None, None, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
        )  # fmt: skip
        branch, lse = _normalise(acc, row_max, row_sum)  # [BLOCK_M, BLOCK_DV], [BLOCK_M]
        lse_row = b * lse_strides[0] + wide_head * lse_strides[1] + query * lse_strides[2]
        tl.store(compressed_lse_ptr + lse_row, lse, mask=row_mask)
        if SAVE:
            store_tile(
                compressed_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, branch,
                VALUE_DIM, BLOCK_DV,
            )  # fmt: skip
    if not SAVE:
        _add_gated(
            out_ptr, branch, gate_ptr, query, row_stride, num_tokens, True, VALUE_DIM, BLOCK_DV
        )

    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    selected_acc, selected_max, selected_sum = acc, row_max, row_sum
    if SHARED and blocks_ptr is not None:
        acc, row_max, row_sum, selected_acc, selected_max, selected_sum = _attend_twice(
            acc, row_max, row_sum, selected_acc, selected_max, selected_sum, q, keys, values,
            window_first, end_key, row_mask, scale_log2, low, high, own_first, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend_span(
            acc, row_max, row_sum, q, window_keys, window_values,
            window_first, end_key, row_mask, scale_log2, None, None, None, SELECT,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
    branch, lse = _normalise(acc, row_max, row_sum)
    tl.store(sliding_lse_ptr + stats, lse, mask=row_mask)
    if SAVE:
        store_tile(
            sliding_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, branch,
            VALUE_DIM, BLOCK_DV,
        )  # fmt: skip
    else:
        _add_gated(
            out_ptr, branch, gate_ptr + 2 * gate_strides[3], query, row_stride, num_tokens,
            False, VALUE_DIM, BLOCK_DV,
        )  # fmt: skip

    far_end = window_first if SHARED else end_key
    if not SHARED or blocks_ptr is not None:
        acc, row_max, row_sum = selected_acc, selected_max, selected_sum
    acc, row_max, row_sum = _attend_span(
        acc, row_max, row_sum, q, keys, values,
        first_key, far_end, row_mask, scale_log2, low, high, own_first, SELECT,
        HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
    )  # fmt: skip
    branch, lse = _normalise(acc, row_max, row_sum)
    tl.store(selected_lse_ptr + stats, lse, mask=row_mask)
    if SAVE:
        store_tile(
            selected_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, branch,
            VALUE_DIM, BLOCK_DV,
        )  # fmt: skip
        total = branch * _gates(gate_ptr + gate_strides[3], query, num_tokens)
        tl.debug_barrier()  # other threads of the CTA may have stored what this one loads
        branch = load_tile(
            compressed_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, True,
            VALUE_DIM, BLOCK_DV,
        )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
        total += branch.to(tl.float32) * _gates(gate_ptr, query, num_tokens)
        branch = load_tile(
            sliding_ptr + first_row * VALUE_DIM, query, row_stride, num_tokens, True,
            VALUE_DIM, BLOCK_DV,
        )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
        total += branch.to(tl.float32) * _gates(gate_ptr + 2 * gate_strides[3], query, num_tokens)
        store_tile(out_ptr, query, row_stride, num_tokens, total, VALUE_DIM, BLOCK_DV)
    else:
        _add_gated(
            out_ptr, branch, gate_ptr + gate_strides[3], query, row_stride, num_tokens,
            False, VALUE_DIM, BLOCK_DV,
        )  # fmt: skip


class Selected(NamedTuple):
    """Blocks that queries selected, and the compressed branch by which they did."""

    blocks: Tensor | None  # int32 (B, Hkv, S, n), contiguous; None: all that are visible
    compressed: Tensor  # (B, S, H, Dv), contiguous
    compressed_lse: Tensor  # float32 (B, H, S)


class ShortResults(NamedTuple):
    """What `short_forward` returns: outputs (B, S, H, Dv), log-sum-exps float32 (B, S, H)."""

    out: Tensor
    compressed: Tensor  # the branches are empty unless they are to be saved
    compressed_lse: Tensor  # (B, H, S), memory (B, S, H) with documents
    selected: Tensor
    selected_lse: Tensor
    sliding: Tensor
    sliding_lse: Tensor


def short_forward(
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    longest: int,
    *,
    save: bool,
    selection: Selected | None = None,
    kinds: Tensor | None = None,
    results: ShortResults | None = None,
) -> ShortResults:
    """All branches of queries that select every block of their documents, and the gated sum.

    Or, with blocks in `selection`, of queries that select these, where the route is "masked".

    Args:
        tensors: query (B, Hq, S, D), key, value, compressed_key, compressed_value and gates.
        own: key and value of the sliding branch, if others.
        document_start: int32 (B, S), contiguous, or None.
        longest: tokens of the longest document, at most n * l', or what the route "masked" takes.
        save: whether the branches' own outputs are wanted, for the backward.
        selection: what is there already.
        kinds: of `block_kinds`: only rows of short queries are written, or, with blocks in
            `selection`, only the other rows.
        results: memory of results; None for new memory.
    """
    query, key, value, compressed_key, compressed_value, gates = tensors
    plan = plan_of(query, key, value)
    tiles = plan.fwd if selection is None else masked_tiles(query, key, value)
    q, k, v, wk, wv, ck, cv = (
        rows_contiguous(x)
        for x in (query, key, value, *(own or (key, value)), compressed_key, compressed_value)
    )
    batch, heads, tokens, _ = q.shape
    if results is None:
        results = empty_results(q, v, document_start is not None, save, selection)
    descs = [descriptor(x, tiles.block_n) for x in (k, v, wk, wv)]
    if any(x is None for x in descs):
        descs = [None] * len(descs)
    short_fwd_kernel[(heads, cdiv(tokens, tiles.block_m), batch)](
        q, k, v, wk, wv, ck, cv, *descs, gates, document_start, kinds,
        None if selection is None else selection.blocks,
        results.out, results.compressed, results.selected, results.sliding,
        results.compressed_lse, results.selected_lse, results.sliding_lse,
        *(strides(x) for x in (q, k, v, wk, wv, ck, cv)), gates.stride(),
        results.compressed_lse.stride(),
        tokens, ck.shape[2], heads, heads // k.shape[1], longest, min(config.window_size, tokens),
        base2_scale(scale),
        COMPRESS=config.compress_block_size, STRIDE=config.compress_stride,
        SHARED=own is None, SAVE=save, **slots(config), **plan.constants(), **tiles.constants(),
    )  # fmt: skip
    return results


def empty_results(
    query: Tensor, value: Tensor, has_documents: bool, save: bool, selection: Selected | None
) -> ShortResults:
    """Memory of results, and what `selection` has; arguments as of `short_forward`."""
    batch, heads, tokens, _ = query.shape
    shape = (batch, tokens, heads, value.shape[3])
    out = torch.empty(shape, dtype=query.dtype, device=query.device)
    stats: dict = {"dtype": torch.float32, "device": query.device}
    if selection is None:
        lse = torch.empty(shape[:3], **stats)
        lse = lse.transpose(1, 2) if has_documents else lse.view(batch, heads, tokens)
        selection = Selected(None, out.new_empty(shape if save else 0), lse)
    selected, sliding = (out.new_empty(shape if save else 0) for _ in range(2))
    lses = [torch.empty(shape[:3], **stats) for _ in range(2)]
    return ShortResults(
        out, selection.compressed, selection.compressed_lse, selected, lses[0], sliding, lses[1]
    )
