"""Attention of the tiles that have a union, forced candidates included."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.common.softmax import LN2, base2_scale, online_softmax_update
from nsa_flex.fallback_kernels.common.strides import has_tma_strides, strides
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_masked_rows,
    store_rows,
    tile_width,
)
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_combine import attend_candidates, merge_rows_of
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.selected.tiles import load_block


@triton.jit(do_not_specialize=["base"])
def union_kernel(
    key_tiles, value_tiles, query_ptr, key_ptr, value_ptr, summary_ptr, sizes_ptr, union_ptr,
    masks_ptr, out_ptr, lse_ptr,
    key_stride_b, key_stride_h, key_stride_s,
    value_stride_b, value_stride_h, value_stride_s,
    base, span, query_offset, num_queries, num_keys, kv_heads, scale_log2,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    CAPACITY: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the tiles that have a union.

    TMA: `key_tiles` and `value_tiles` are descriptors of (B, Hkv, Sk, D), tiles of one block.
    """
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    size = tl.load(sizes_ptr + tile)
    if size < 0:
        return
    batch, head, member, position, query, row_ok, _ = merge_rows_of(
        0, base, span, query_offset, num_queries, kv_heads, GROUP, NUM_SLOTS, TOKENS, ROWS
    )
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    out_ptr = group_rows(out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    lse_ptr = group_rows(lse_ptr, b, h, num_queries, kv_heads, GROUP, 1)
    line = query * (kv_heads * GROUP) + member
    summary_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    q = load_masked_rows(query_ptr, line, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS)
    summary = tl.load(summary_ptr + query, mask=row_ok, other=0)
    top, total, out = attend_candidates(
        q, summary & 1, position, (base + tl.program_id(0) * TOKENS) // BLOCK_SIZE, key_ptr,
        value_ptr, key_stride_s, value_stride_s, num_keys, scale_log2, BLOCK_SIZE, HEAD_DIM,
        HEAD_COLUMNS, VALUE_DIM, VALUE_COLUMNS, PRECISION, 0, 1, ROWS,
    )  # fmt: skip

    # The other blocks lie before the queries: rows are masked, never single keys.
    union_ptr += tile.to(tl.int64) * CAPACITY
    masks_ptr += tile.to(tl.int64) * CAPACITY * WORDS
    token = tl.arange(0, ROWS) // GROUP
    for i in tl.range(0, size, num_stages=STAGES):
        block = tl.load(union_ptr + i)
        word = tl.load(masks_ptr + i * WORDS)
        bits = word >> (token % 32)
        if WORDS == 2:
            bits = tl.where(token < 32, bits, tl.load(masks_ptr + i * WORDS + 1) >> (token % 32))
        chosen = row_ok & ((bits & 1) != 0)
        if TMA:
            k = key_tiles.load([batch, head, block * BLOCK_SIZE, 0])
            k = k.reshape(BLOCK_SIZE, HEAD_COLUMNS)
            v = value_tiles.load([batch, head, block * BLOCK_SIZE, 0])
            v = v.reshape(BLOCK_SIZE, VALUE_COLUMNS)
        else:
            k = load_block(
                key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, True
            )
            v = load_block(
                value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS,
                True,
            )  # fmt: skip
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        out, top, total = online_softmax_update(
            out, top, total, logits, v, scale_log2, chosen, True, PRECISION
        )

    empty = total == 0.0
    out *= tl.where(empty, 0.0, 1.0 / total)[:, None]
    store_rows(out_ptr, line, out, row_ok, WIDE, VALUE_DIM, VALUE_COLUMNS)
    lse = tl.where(empty, float("-inf"), top + tl.log2(total)) * LN2
    tl.store(lse_ptr + line, lse, mask=row_ok)


def attend_unions(selection: Selection, out: Tensor, lse: Tensor) -> None:
    """Write `out` and `lse` of the tiles that have a union, forced candidates included.

    Args:
        out: (B, Hq, Sq, Dv), memory (B, Sq, Hq, Dv).
        lse: float32 (B, Hq, Sq), memory (B, Sq, Hq).
    """
    plan, lists, unions, query, key, value, scale = selection
    copied = all(has_tma_strides(x) for x in (key, value))
    if sm90_unsupported_reason(plan, query, key, value) is None:
        # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
        from nsa_flex.fallback_kernels.selected.fwd_union_sm90 import walk

        walk(selection, out, lse)
        return
    union_kernel[(plan.span // plan.merge_tokens, plan.batch * plan.kv_heads)](
        *(_tiles(plan, x) if copied else None for x in (key, value)),
        query,
        key,
        value,
        lists.summary,
        *unions,
        out,
        lse,
        *strides(key),
        *strides(value),
        plan.base,
        plan.span,
        plan.query_offset,
        plan.num_queries,
        plan.num_keys,
        plan.kv_heads,
        base2_scale(scale),
        **plan.constants(),
        TOKENS=plan.merge_tokens,
        ROWS=plan.merge_rows,
        CAPACITY=plan.union_capacity,
        WORDS=unions.masks.shape[2],
        STAGES=plan.union_stages,
        TMA=copied,
        num_warps=plan.num_warps,
        maxnreg=plan.union_registers,
    )


def sm90_unsupported_reason(
    plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor
) -> str | None:
    """Why `union_kernel` takes the tiles and not the one for Hopper; None if that does."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if not (has_tma_strides(key) and has_tma_strides(value)):
        return "TMA cannot copy keys or values: their strides are not multiples of 16 bytes"
    if plan.num_warps != 4 or plan.merge_rows != 64:
        return f"tiles have {plan.merge_rows} rows and {plan.num_warps} warps; 64 and 4 are needed"
    return None


def _tiles(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of keys or values (B, Hkv, Sk, D) by blocks."""
    return TensorDescriptor.from_tensor(x, [1, 1, plan.block_size, tile_width(x.shape[3])])
