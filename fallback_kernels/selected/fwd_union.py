"""Attention of the query tiles that have a union, initial and local blocks included."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LN2, base2_scale, online_softmax_update
from nsa_flex.fallback_kernels.common.strides import has_tma_strides, strides
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_masked_rows,
    precision_of,
    store_rows,
    tile_width,
    width_of,
)
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_combine import attend_initial_local, combine_tile_rows
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.selected.tiles import last_key, load_block, row_offset
from nsa_flex.reasons import explained


@recordable
@triton.jit(do_not_specialize=["base", "span", "query_offset", "num_queries", "num_keys"])
def selected_fwd_union_kernel(
    key_tiles, value_tiles, query_ptr, key_ptr, value_ptr, bitmask_ptr, offsets_ptr, sizes_ptr,
    union_ptr, masks_ptr, out_ptr, lse_ptr,
    key_strides, value_strides,
    base, span, query_offset, num_queries, num_keys, kv_heads, scale_log2,
    GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, INT64_OFFSETS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr, CAPACITY: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the tiles that have a union.

    key_tiles, value_tiles: descriptors of (B, Hkv, Sk, D), tiles of one block; None without TMA.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    size = tl.load(sizes_ptr + tile)
    if size < 0:
        return
    query_offset, base = row_offset(offsets_ptr, tl.program_id(1), query_offset, base, BLOCK_SIZE)
    num_keys = last_key(offsets_ptr, query_offset, num_queries, num_keys)
    batch, head, head_in_group, position, query, row_mask, _ = combine_tile_rows(
        0, base, span, query_offset, num_queries, kv_heads, GROUP, NUM_SLOTS, BLOCK_TOKENS, BLOCK_M
    )
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    out_ptr = group_rows(out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    lse_ptr = group_rows(lse_ptr, b, h, num_queries, kv_heads, GROUP, 1)
    query_row = query * (kv_heads * GROUP) + head_in_group
    bitmask_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    q = load_masked_rows(
        query_ptr, query_row, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    bitmask = tl.load(bitmask_ptr + query, mask=row_mask, other=0)  # [BLOCK_M]
    row_max, row_sum, out = attend_initial_local(
        q, bitmask & 1, position, (base + tl.program_id(0) * BLOCK_TOKENS) // BLOCK_SIZE, key_ptr,
        value_ptr, key_strides[2], value_strides[2], num_keys, scale_log2, BLOCK_SIZE, HEAD_DIM,
        BLOCK_D, VALUE_DIM, BLOCK_DV, PRECISION, 0, 1, BLOCK_M,
    )  # fmt: skip

    # The other blocks lie before the queries: rows are masked, never single keys.
    union_ptr += tile.to(tl.int64) * CAPACITY
    masks_ptr += tile.to(tl.int64) * CAPACITY * WORDS
    token = tl.arange(0, BLOCK_M) // GROUP
    for i in tl.range(0, size, num_stages=STAGES):
        block = tl.load(union_ptr + i)
        word = tl.load(masks_ptr + i * WORDS)
        bits = word >> (token % 32)  # [BLOCK_M]
        if WORDS == 2:
            bits = tl.where(token < 32, bits, tl.load(masks_ptr + i * WORDS + 1) >> (token % 32))
        selected = row_mask & ((bits & 1) != 0)
        if key_tiles is not None:
            k = key_tiles.load([batch, head, block * BLOCK_SIZE, 0])
            k = k.reshape(BLOCK_SIZE, BLOCK_D)  # [BLOCK_SIZE, BLOCK_D]
            v = value_tiles.load([batch, head, block * BLOCK_SIZE, 0])
            v = v.reshape(BLOCK_SIZE, BLOCK_DV)  # [BLOCK_SIZE, BLOCK_DV]
        else:
            k = load_block(
                key_ptr, key_strides[2], block, num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D, True
            )  # [BLOCK_SIZE, BLOCK_D]
            v = load_block(
                value_ptr, value_strides[2], block, num_keys, BLOCK_SIZE, VALUE_DIM, BLOCK_DV,
                True,
            )  # fmt: skip
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
        out, row_max, row_sum = online_softmax_update(
            out, row_max, row_sum, logits, v, scale_log2, selected, True, PRECISION
        )

    empty = row_sum == 0.0
    out *= tl.where(empty, 0.0, 1.0 / row_sum)[:, None]
    store_rows(out_ptr, query_row, out, row_mask, INT64_OFFSETS, VALUE_DIM, BLOCK_DV)
    lse = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum)) * LN2
    tl.store(lse_ptr + query_row, lse, mask=row_mask)


def attend_unions(selection: Selection, out: Tensor, lse: Tensor) -> None:
    """Write `out` and `lse` of the tiles that have a union, initial and local blocks included.

    Args:
        out: (B, Hq, Sq, Dv), memory (B, Sq, Hq, Dv).
        lse: float32 (B, Hq, Sq), memory (B, Sq, Hq).
    """
    plan, csr, unions, query, key, value, scale, offsets = selection
    use_tma = all(has_tma_strides(x) for x in (key, value))
    if sm90_unsupported_reason(plan, query, key, value) is None:
        # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
        from nsa_flex.fallback_kernels.selected.fwd_union_sm90 import launch

        launch(selection, out, lse)
        return
    selected_fwd_union_kernel[(plan.span // plan.combine_tokens, plan.batch * plan.kv_heads)](
        *(_tiles(plan, x) if use_tma else None for x in (key, value)),
        query,
        key,
        value,
        csr.bitmask,
        offsets,
        *unions,
        out,
        lse,
        strides(key),
        strides(value),
        plan.base,
        plan.span,
        plan.query_offset,
        plan.num_queries,
        plan.num_keys,
        plan.kv_heads,
        base2_scale(scale),
        **plan.constants(),
        NUM_SLOTS=plan.num_slots,
        BLOCK_TOKENS=plan.combine_tokens,
        BLOCK_M=plan.combine_rows,
        CAPACITY=plan.union_capacity,
        WORDS=unions.masks.shape[2],
        STAGES=plan.union_stages,
        num_warps=plan.num_warps,
        maxnreg=plan.union_registers,
    )


@explained
def sm90_unsupported_reason(
    plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor
) -> str | None:
    """Why the union forward in Triton takes the tiles, not that for Hopper; None if that does."""
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if not (has_tma_strides(key) and has_tma_strides(value)):
        return "TMA cannot copy keys or values: their strides are not multiples of 16 bytes"
    if plan.num_warps != 4 or plan.combine_rows != 64:
        return (
            f"tiles have {plan.combine_rows} rows and {plan.num_warps} warps; 64 and 4 are needed"
        )
    return None


def _tiles(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of keys or values (B, Hkv, Sk, D) by blocks."""
    return TensorDescriptor.from_tensor(x, [1, 1, plan.block_size, tile_width(x.shape[3])])
