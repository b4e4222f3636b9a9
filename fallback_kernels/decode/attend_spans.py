"""Attention of a decode step to listed spans of keys, for ranks that hold a part of the cache.

Where `split_kv_selected` derives from a position what a CTA attends, this kernel reads it: blocks
were chosen among those of all ranks, and a window may begin or end on another rank. Split outputs
are merged per branch, with their log-sum-exps, which other ranks need.
"""

from __future__ import annotations

from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.common.tiles import next_power_of_2, precision_of, width_of
from nsa_flex.fallback_kernels.decode.config import TARGET_CTAS, DecodePlan
from nsa_flex.fallback_kernels.decode.tiles import (
    load_query_group,
    load_tile,
    softmax_step,
    store_partial,
    tile_pointers,
)


@recordable
@triton.jit(do_not_specialize=["first_sliding_split", "num_splits", "spans_per_split"])
def decode_spans_kernel(
    query_ptr, key_ptr, value_ptr, sliding_key_ptr, sliding_value_ptr, span_ptr,
    partial_ptr, row_max_ptr, row_sum_ptr,
    query_strides, key_strides, value_strides, sliding_key_strides, sliding_value_strides,
    kv_heads, first_sliding_split, num_splits, spans_per_split, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SPAN: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """CTA (split, KV head of a batch row): some spans, of up to SPAN keys, for a group's heads.

    span_ptr int32 (units, splits · spans_per_split, 2): first key and the one behind the last,
    no later where there is none. Splits from `first_sliding_split` on read the sliding keys.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    BLOCK_M: tl.constexpr = width_of(GROUP)
    PRECISION: tl.constexpr = precision_of(query_ptr.dtype.element_ty)
    TILES: tl.constexpr = (SPAN + BLOCK_N - 1) // BLOCK_N
    split, unit = tl.program_id(0), tl.program_id(1).to(tl.int64)
    batch, head = unit // kv_heads, unit % kv_heads
    query_ptr += batch * query_strides[0] + head * GROUP * query_strides[1]
    q = load_query_group(
        query_ptr, query_strides[1], GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    if split >= first_sliding_split:
        keys = sliding_key_ptr + batch * sliding_key_strides[0] + head * sliding_key_strides[1]
        values = sliding_value_ptr + batch * sliding_value_strides[0]
        values += head * sliding_value_strides[1]
        key_stride, value_stride = sliding_key_strides[2], sliding_value_strides[2]
    else:
        keys = key_ptr + batch * key_strides[0] + head * key_strides[1]
        values = value_ptr + batch * value_strides[0] + head * value_strides[1]
        key_stride, value_stride = key_strides[2], value_strides[2]
    span_ptr += (unit * num_splits + split) * spans_per_split * 2
    # Finite: where a span is empty, exp2(-inf - row_max) is 0.
    row_max = tl.full((BLOCK_M,), -1e30, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    for step in tl.range(0, spans_per_split * TILES, num_stages=STAGES):
        span = span_ptr + step // TILES * 2
        first = tl.load(span) + step % TILES * BLOCK_N
        key_mask = first + tl.arange(0, BLOCK_N) < tl.load(span + 1)  # [BLOCK_N]
        pointers = tile_pointers(keys, key_stride, first, BLOCK_N, BLOCK_D)
        k = load_tile(pointers, key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        p, row_max, alpha = softmax_step(q, k, key_mask, row_max, scale_log2, PRECISION)
        pointers = tile_pointers(values, value_stride, first, BLOCK_N, BLOCK_DV)
        v = load_tile(pointers, key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        row_sum = row_sum * alpha + tl.sum(p, 1)  # [BLOCK_M]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
    store_partial(
        partial_ptr, row_max_ptr, row_sum_ptr, unit, split, num_splits,
        acc, row_max, row_sum, GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip


@recordable
@triton.jit(do_not_specialize=["num_splits", "first", "count"])
def decode_merge_kernel(
    partial_ptr, row_max_ptr, row_sum_ptr, out_ptr, lse_ptr, num_splits, first, count,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PADDED_SPLITS: tl.constexpr,
):  # fmt: skip
    """CTA (query head of a batch row): out (rows, Dv) and natural lse (rows,) of some splits.

    A split whose row_sum is 0 saw nothing, and may hold anything. Without any, 0 and -inf.
    """
    LN2: tl.constexpr = 0.6931471805599453
    row = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, BLOCK_DV)
    slot = row * num_splits + first + split
    row_sum = tl.load(row_sum_ptr + slot, mask=split < count, other=0.0)  # [PADDED_SPLITS]
    seen = row_sum > 0.0
    row_max = tl.load(row_max_ptr + slot, mask=seen, other=-1e30)  # [PADDED_SPLITS]
    highest = tl.max(row_max, 0)
    weight = tl.where(seen, tl.exp2(row_max - highest), 0.0)  # [PADDED_SPLITS]
    total = tl.sum(weight * row_sum, 0)
    mask = seen[:, None] & (dim < VALUE_DIM)[None, :]  # [PADDED_SPLITS, BLOCK_DV]
    partial = tl.load(
        partial_ptr + slot[:, None] * VALUE_DIM + dim[None, :], mask=mask, other=0.0
    )  # [PADDED_SPLITS, BLOCK_DV]
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_DIM + dim, out, mask=dim < VALUE_DIM)
    tl.store(lse_ptr + row, (highest + tl.log2(total)) * LN2)


def merge_splits(
    partial: Tensor, row_max: Tensor, row_sum: Tensor, first: int, count: int, heads: int
) -> tuple[Tensor, Tensor]:
    """Splits `first` ... of a branch: out (B, Hq, 1, Dv) and lse (B, Hq, 1), float32."""
    units, group, splits, value_dim = partial.shape
    batch = units * group // heads
    out = torch.empty((batch, heads, 1, value_dim), dtype=torch.float32, device=partial.device)
    lse = torch.empty((batch, heads, 1), dtype=torch.float32, device=partial.device)
    with torch.cuda.device_of(partial):
        decode_merge_kernel[(units * group,)](
            partial, row_max, row_sum, out, lse, splits, first, count,
            VALUE_DIM=value_dim,
            BLOCK_DV=next_power_of_2(value_dim),
            PADDED_SPLITS=next_power_of_2(count),
            num_warps=1,
        )  # fmt: skip
    return out, lse


def attend_spans(
    plan: DecodePlan,
    query: Tensor,
    cache: tuple[Tensor, Tensor],
    sliding: tuple[Tensor, Tensor],
    spans: Tensor,
    num_sliding: int,
    scale: float,
) -> list[tuple[Tensor, Tensor]]:
    """Out and lse, as of `merge_splits`, over the selected spans and over those of the window.

    Of either, if there are any.

    Args:
        plan: of one new token a row.
        query: (B, Hq, 1, D), last dimension contiguous.
        cache, sliding: key (B, Hkv, C, D) and value (B, Hkv, C, Dv) of the two branches.
        spans: int32 (B, Hkv, spans, 2), contiguous, each of at most l' keys: the first, and the
            one behind the last, no later than the first where there are none.
        num_sliding: how many of them, the last ones, are of the window.
    """
    counts = (spans.shape[2] - num_sliding, num_sliding)
    # A power of two that divides both, at most 4.
    most = max(1, min(4, plan.units * sum(counts) // TARGET_CTAS))
    each = gcd(1 << most.bit_length() - 1, *counts)
    splits = [count // each for count in counts]
    sizes = (plan.units, plan.group, sum(splits))
    partial = query.new_empty((*sizes, plan.value_dim), dtype=torch.float32)
    row_max, row_sum = (query.new_empty(sizes, dtype=torch.float32) for _ in range(2))
    with torch.cuda.device_of(query):
        decode_spans_kernel[(sum(splits), plan.units)](
            query, *cache, *sliding, spans, partial, row_max, row_sum,
            *map(strides, (query, *cache, *sliding)),
            plan.kv_heads, splits[0], sum(splits), each, base2_scale(scale),
            GROUP=plan.group, HEAD_DIM=plan.head_dim, VALUE_DIM=plan.value_dim,
            SPAN=plan.config.select_block_size, BLOCK_N=plan.block_n, STAGES=plan.stages,
            num_warps=plan.warps,
        )  # fmt: skip
    found = (partial, row_max, row_sum)
    return [
        merge_splits(*found, first, count, plan.query_heads)
        for first, count in zip((0, splits[0]), splits, strict=True)
        if count
    ]
