"""Sliding branch with a fused epilogue: the gated sum of the three branches.

The compressed branch comes in the parts of its fold. The sliding branch's arithmetic hides the
memory traffic that the sum needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LN2, base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of, fold_position, of_range
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan
from nsa_flex.fallback_kernels.sliding.fwd import attend_window
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    edge_block_n,
    heads_of_tile,
    load_rows_at,
    query_rows,
    query_tile_of_cta,
    row_offsets,
    store_rows_at,
)

LSE_TOKENS = tl.constexpr(256)


def unfold_lse(lse: tuple[Tensor, ...], fold: Fold, heads: int, num_tokens: int) -> Tensor:
    """Log-sum-exps by the parts of the fold as float32 (B, H, S), -inf for the first l - 1."""
    batch = lse[0].shape[0]
    out = torch.empty((batch, heads, num_tokens), dtype=torch.float32, device=lse[0].device)
    unfold_lse_kernel[(cdiv(num_tokens, LSE_TOKENS.value), batch * heads)](
        *lse,
        out,
        heads,
        num_tokens,
        *bounds_of(fold.ranges),
        fold.reach,
        STRIDE=fold.stride,
    )
    return out


class SlidingEpilogue(NamedTuple):
    """What `sliding_epilogue` returns."""

    out: Tensor  # (B, S, H, D), the gated sum
    sliding_lse: Tensor  # float32 (B, S, H)
    sliding: Tensor  # (B, S, H, D), the sliding branch; empty unless it is to be saved
    compressed: Tensor  # the compressed branch, likewise


def sliding_epilogue(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    window_size: int,
    scale: float,
    compressed_parts: tuple[Tensor, ...],
    fold: Fold,
    selected: Tensor,
    gates: Tensor,
    *,
    save: bool,
    save_compressed: bool,
    offsets: Tensor | None = None,
) -> SlidingEpilogue:
    """The sliding branch, and in its registers `sum_c gates[..., c] * branch_c` in float32.

    Args:
        query: (B, Hq, S, D); key: (B, Hkv, S, D); value: (B, Hkv, S, Dv).
        document_start: int32 (B, S), contiguous, first key of each query's document, never
            decreasing along a row; None for one document.
        compressed_parts: outputs of the compressed branch, by the parts of its fold.
        selected: (B, S, Hq, Dv), contiguous.
        gates: (B, Hq, S, 3), any strides.
        save: whether the sliding branch's own output is wanted, for the backward.
        save_compressed: whether that of the compressed branch is, in the order of tokens.
        offsets: int32 (B, Hkv), position of query 0; None where that is key 0.
    """
    key, value = (rows_contiguous(x) for x in (key, value))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.forward_tiles()
    out = torch.empty_like(selected)
    sliding, compressed = (
        torch.empty_like(selected) if is_saved else selected.new_empty(0)
        for is_saved in (save, save_compressed)
    )
    lse = torch.empty(selected.shape[:3], dtype=torch.float32, device=query.device)
    fused_sliding_epilogue_kernel[(plan.query_ctas(tiles),)](
        query,
        key,
        value,
        descriptor(key, tiles.block_n),
        descriptor(value, tiles.block_n),
        document_start,
        offsets,
        *compressed_parts,
        selected,
        gates,
        out,
        lse,
        sliding,
        compressed,
        strides(query),
        strides(key),
        strides(value),
        gates.stride(),
        plan.tokens,
        min(window_size, key.shape[2]),
        plan.kv_heads,
        base2_scale(scale),
        *bounds_of(fold.ranges),
        fold.reach,
        STRIDE=fold.stride,
        SAVE=save,
        SAVE_COMPRESSED=save_compressed,
        **plan.constants(tiles),
    )
    return SlidingEpilogue(out, lse, sliding, compressed)


@recordable
@triton.jit(do_not_specialize=["num_tokens", "rows", "first1", "first2", "first3", "reach"])
def unfold_lse_kernel(
    lse0, lse1, lse2, lse3, out_ptr,
    heads, num_tokens, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr,
):  # fmt: skip
    """CTA (tile of tokens, head of a batch row)."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    token = tl.program_id(0) * LSE_TOKENS + tl.arange(0, LSE_TOKENS)
    mask = token < num_tokens  # [LSE_TOKENS], as all below
    part, residue, width, part_rows, row = fold_position(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    offset = ((b * width + residue) * heads + h) * part_rows + row
    sees_blocks = mask & (token >= reach)
    lse_ptr = of_range(part, lse0, lse1, lse2, lse3)
    lse = tl.load(lse_ptr + offset, mask=sees_blocks, other=float("-inf"))
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * num_tokens + token, lse, mask=mask)


@triton.jit
def load_compressed(
    part0, part1, part2, part3, batch, token, head, row_mask, query_heads,
    rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows (token, head) of the compressed branch [BLOCK_M, BLOCK_D], from the parts of its fold.

    0 for tokens that see no compressed block.
    """
    part, residue, width, part_rows, row = fold_position(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    offset = ((batch * part_rows + row) * width + residue) * query_heads + head
    column = tl.arange(0, BLOCK_D)
    part_ptr = of_range(part, part0, part1, part2, part3)
    pointer = (part_ptr + offset * DIM)[:, None] + column[None, :]
    # Selecting a pointer hides from the compiler that rows start at multiples of 16 bytes.
    pointer = tl.multiple_of(pointer, (1, 16))
    mask = (row_mask & (token >= reach))[:, None] & (column < DIM)[None, :]
    return tl.load(pointer, mask=mask, other=0.0)


@recordable
@triton.jit(
    do_not_specialize=["num_tokens", "window", "rows", "first1", "first2", "first3", "reach"]
)
def fused_sliding_epilogue_kernel(
    query_ptr, key_ptr, value_ptr, key_desc, value_desc, document_start_ptr, offsets_ptr,
    part0, part1, part2, part3, selected_ptr, gate_ptr,
    out_ptr, lse_ptr, sliding_ptr, compressed_ptr,
    query_strides, key_strides, value_strides, gate_strides,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, SAVE: tl.constexpr, SAVE_COMPRESSED: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One query tile, and the gated sum of its branches."""
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
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_ptr += batch * query_strides[0] + head * query_strides[1]
    q = load_rows_at(
        query_ptr, row_offsets(token, head_in_group, query_strides[1], query_strides[2]),
        row_mask, HEAD_DIM, BLOCK_D,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    query_offset, end_key, num_keys = 0, None, num_tokens
    if offsets_ptr is not None:
        query_offset = tl.load(offsets_ptr + b * kv_heads + h)
        num_keys += query_offset
        end_key = num_keys
    keys = HeadRows(key_desc, key_ptr, b, h, key_strides, num_keys)
    values = HeadRows(value_desc, value_ptr, b, h, value_strides, num_keys)
    acc, row_max, row_sum = attend_window(
        q, keys, values, document_start_ptr, first + query_offset, token + query_offset, window,
        scale_log2, BLOCK_TOKENS, BLOCK_M, BLOCK_N, EDGE_BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM,
        BLOCK_DV, PRECISION, STAGES, end_key,
    )  # fmt: skip  # [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M]
    query_heads = kv_heads * GROUP
    row = row_offsets(token, head_in_group, 1, query_heads)
    row = row + batch * num_tokens * query_heads + head  # [BLOCK_M]
    row_sum = tl.where(row_mask, row_sum, 1.0)
    acc = acc / row_sum[:, None]
    tl.store(lse_ptr + row, (row_max + tl.log2(row_sum)) * LN2, mask=row_mask)
    if SAVE:
        store_rows_at(sliding_ptr, row * VALUE_DIM, row_mask, acc, VALUE_DIM, BLOCK_DV)

    gate_ptr += batch * gate_strides[0] + head * gate_strides[1]
    gate_ptr += row_offsets(token, head_in_group, gate_strides[1], gate_strides[2])
    gate = tl.load(gate_ptr + 2 * gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    acc *= gate[:, None]
    gate = tl.load(gate_ptr + gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    branch = load_rows_at(
        selected_ptr, row * VALUE_DIM, row_mask, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_M, BLOCK_DV]
    acc += branch.to(tl.float32) * gate[:, None]

    branch = load_compressed(
        part0, part1, part2, part3, batch, token, head + head_in_group, row_mask, query_heads,
        rows, first1, first2, first3, reach, STRIDE, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
    if SAVE_COMPRESSED:
        store_rows_at(compressed_ptr, row * VALUE_DIM, row_mask, branch, VALUE_DIM, BLOCK_DV)
    gate = tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)
    acc += branch.to(tl.float32) * gate[:, None]
    store_rows_at(out_ptr, row * VALUE_DIM, row_mask, acc, VALUE_DIM, BLOCK_DV)
