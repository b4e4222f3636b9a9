"""Fused epilogue of the forward where both branches have the same keys: one kernel, not two.

Local blocks are always selected and lie in the window: their share of both softmaxes is the same.
A CTA attends them once, keeps the result, goes on through the window, and then adds the initial
and the top-k blocks to the kept result. Without gradients neither the selected nor the sliding
branch is ever in memory.

Saving the branches for a backward takes more registers than the Triton kernel has, and its tiles
have no rows to spare; the `_sm90` kernel has enough, and pads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason, supports_tma
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import (
    LN2,
    MIN_LOGIT,
    base2_scale,
    online_softmax_update,
)
from nsa_flex.fallback_kernels.common.strides import strides
from nsa_flex.fallback_kernels.common.tiles import precision_of, tile_width, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import load_compressed
from nsa_flex.fallback_kernels.selected.block_union import OTHERS
from nsa_flex.fallback_kernels.selected.config import QueryChunk, SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_combine import add_partials, combine_lse
from nsa_flex.fallback_kernels.selected.fwd_partial import for_each_chunk
from nsa_flex.fallback_kernels.selected.fwd_union import attend_unions
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.selected.tiles import row_offset
from nsa_flex.fallback_kernels.sliding.config import SPARE_BYTES
from nsa_flex.fallback_kernels.sliding.fwd import attend_tile
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    load_key_value,
    load_rows_at,
    query_rows,
    row_offsets,
    store_rows_at,
)
from nsa_flex.reasons import explained

BLOCK_SIZES = (64,)  # blocks are the key tiles: smaller ones leave the tensor cores half empty
STAGES = tl.constexpr(3)  # blocks in shared memory at once


class Epilogue(NamedTuple):
    """What `fwd_epilogue` returns."""

    out: Tensor  # (B, S, H, Dv), the gated sum
    selected_lse: Tensor  # float32 (B, S, H)
    sliding_lse: Tensor
    compressed: Tensor  # (B, S, H, Dv), as the next two; those not to be saved are empty
    selected: Tensor
    sliding: Tensor


@explained
def unsupported_reason(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int,
    *,
    save: bool,
    own_window_keys: bool,
) -> str | None:
    """Why `fwd_epilogue` does not take a call, by shapes, memory and device; None if it does.

    Args:
        key, value: of the selected branch.
        window: of the sliding branch, in keys.
        save: whether the branches' own outputs are wanted.
        own_window_keys: whether the sliding branch has keys and values of its own.
    """
    if own_window_keys:
        return "the sliding branch has keys and values of its own"
    block_d, block_dv = tile_width(plan.head_dim), tile_width(plan.value_dim)
    elements = plan.combine_rows * block_d + STAGES * plan.block_size * (block_d + block_dv)
    needed = elements * plan.element_size + SPARE_BYTES
    if plan.block_size not in BLOCK_SIZES:
        return f"select_block_size is {plan.block_size}; the fused epilogue takes {BLOCK_SIZES}"
    if plan.num_local * plan.block_size > window:
        return f"{plan.num_local} local blocks do not fit a window of {window} keys"
    if needed > plan.shared_memory:
        return f"{needed} bytes of shared memory are needed; the device has {plan.shared_memory}"
    if not supports_tma(key.device):
        return f"{key.device} has no TMA"
    reason = _sm90_unsupported_reason(plan, query, key, value)
    if plan.combine_tokens * plan.group != plan.tile_rows and reason is not None:
        return (
            f"groups of {plan.group} query heads do not fill tiles of {plan.tile_rows} rows, and "
            f"{reason}"
        )
    return reason if save else None


@explained
def _sm90_unsupported_reason(
    plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor
) -> str | None:
    reason = gluon_unsupported_reason(query.device)
    if reason is not None:
        return reason
    # Imported here: Gluon has no interpreter, and other versions of it may lack the names.
    from nsa_flex.fallback_kernels.fused import fwd_epilogue_sm90 as sm90

    return sm90.unsupported_reason(plan, query, key, value)


def fwd_epilogue(
    selection: Selection,
    document_start: Tensor | None,
    window: int,
    compressed_parts: tuple[Tensor, ...],
    fold: Fold,
    gates: Tensor,
    *,
    save: bool,
    save_compressed: bool,
) -> Epilogue:
    """`sum_c gates[..., c] * branch_c` in float32, selected and sliding branch computed here.

    Args:
        selection: of a supported call, with all initial and local blocks; query memory
            (B, S, H, D). With offsets nothing is saved.
        document_start: int32 (B, S), contiguous, or None; with it, `selection` counts no initial
            blocks and has no offsets.
        window: of the sliding branch, in keys.
        compressed_parts: outputs of the compressed branch, by the parts of its fold.
        gates: (B, Hq, S, 3), any strides.
        save: whether the outputs of selected and sliding branch are wanted, for the backward.
        save_compressed: whether that of the compressed branch is, in the order of tokens.
    """
    plan, query = selection.plan, selection.query
    shape = (plan.batch, plan.num_queries, plan.query_heads)

    branch = (*shape, plan.value_dim)
    out = query.new_empty(branch)
    selected_lse, sliding_lse = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    are_saved = (save_compressed, save, save)
    branches = tuple(query.new_empty(branch if is_saved else 0) for is_saved in are_saved)
    # Without memory of its own, the selected branch of tiles with a block union waits in `out`.
    selected = branches[1] if save else out
    attend_unions(selection, selected.transpose(1, 2), selected_lse.transpose(1, 2))
    launch = _launch
    if _sm90_unsupported_reason(plan, query, selection.key, selection.value) is None:
        from nsa_flex.fallback_kernels.fused import fwd_epilogue_sm90 as sm90

        descs = sm90.descriptors(selection, out, branches)
        launch = partial(sm90.launch, descs, selected)

    def run_chunk(chunk: QueryChunk, partials: Tensor, partial_lse: Tensor) -> None:
        tensors = (
            partial_lse, selection.csr.bitmask, selection.unions.sizes, document_start,
            selection.offsets, *compressed_parts, gates, out, selected_lse, sliding_lse,
        )  # fmt: skip
        scalars = (
            gates.stride(),
            chunk.first_head,
            chunk.start,
            plan.chunk_tokens,
            plan.span // plan.combine_tokens,
            plan.num_queries,
            min(window, plan.num_keys),
            plan.kv_heads,
            base2_scale(selection.scale),
            *bounds_of(fold.ranges),
            fold.reach,
        )
        grid = (plan.chunk_tokens // plan.combine_tokens, chunk.num_heads)
        launch(grid, selection, partials, tensors, scalars, fold.stride)

    for_each_chunk(selection, run_chunk)
    return Epilogue(out, selected_lse, sliding_lse, *branches)


def _launch(
    grid: tuple[int, int],
    selection: Selection,
    partials: Tensor,
    tensors: tuple[Tensor | None, ...],
    scalars: tuple[Any, ...],
    stride: int,
) -> None:
    """The Triton kernel; `tensors` and `scalars` are what the `_sm90` kernel takes as well."""
    plan, query, key, value = selection.plan, selection.query, selection.key, selection.value
    fused_fwd_epilogue_kernel[grid](
        query,
        key,
        value,
        descriptor(key, plan.block_size),
        descriptor(value, plan.block_size),
        partials,
        *tensors,
        strides(key),
        strides(value),
        *scalars,
        STRIDE=stride,
        GROUP=plan.group,
        NUM_SLOTS=plan.num_slots,
        BLOCK_SIZE=plan.block_size,
        HEAD_DIM=plan.head_dim,
        VALUE_DIM=plan.value_dim,
        INT64_OFFSETS=plan.int64_offsets,
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        BLOCK_TOKENS=plan.combine_tokens,
        BLOCK_M=plan.combine_rows,
        PARTIAL_STAGES=plan.combine_stages(plan.value_dim),
        num_warps=plan.num_warps,
    )


@triton.jit
def attend_initial_blocks(
    q, keys, values, bitmask, scale_log2, zero, acc, row_max, row_sum,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """`online_softmax_update` with the initial blocks, each for the rows whose bit is set."""
    for block in range(INITIAL):
        is_selected = ((bitmask >> (LOCAL + block)) & 1) != 0  # [BLOCK_M]
        if tl.max(is_selected.to(tl.int32), 0) > 0:
            start = zero + block * BLOCK_SIZE
            k, v = load_key_value(
                keys, values, start, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
            )  # [BLOCK_SIZE, BLOCK_D], [BLOCK_SIZE, BLOCK_DV]
            logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
            logits = tl.where(is_selected[:, None], logits, float("-inf"))
            acc, row_max, row_sum = online_softmax_update(
                acc, row_max, row_sum, logits, v, scale_log2, None, False, PRECISION
            )
    return acc, row_max, row_sum


@recordable
@triton.jit(
    do_not_specialize=[
        "first_head", "chunk_start", "tiles_per_head", "num_tokens", "window",
        "rows", "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def fused_fwd_epilogue_kernel(
    query_ptr, key_ptr, value_ptr, key_desc, value_desc,
    partial_ptr, partial_lse_ptr, bitmask_ptr, union_size_ptr, document_start_ptr, offsets_ptr,
    part0, part1, part2, part3, gate_ptr, out_ptr, selected_lse_ptr, sliding_lse_ptr,
    key_strides, value_strides, gate_strides,
    first_head, chunk_start, chunk_tokens, tiles_per_head,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, GROUP: tl.constexpr, NUM_SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, INT64_OFFSETS: tl.constexpr,
    INITIAL: tl.constexpr, LOCAL: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    PARTIAL_STAGES: tl.constexpr,
):  # fmt: skip
    """CTA (query tile of the chunk, KV head of the chunk); all of a tile lies in one block.

    offsets_ptr: as `row_offset` takes it; None where query 0 is key 0. Keys after the last query
    may hold anything: the own block's tile then ends with the last query.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PADDED_SLOTS: tl.constexpr = width_of(NUM_SLOTS)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    head_in_chunk = tl.program_id(1)
    b = (first_head + head_in_chunk) // kv_heads
    h = (first_head + head_in_chunk) % kv_heads
    first_tile = (first_head + head_in_chunk) * tiles_per_head + chunk_start // BLOCK_TOKENS
    tile = first_tile + tl.program_id(0)
    size = tl.load(union_size_ptr + tile)
    if size == OTHERS:
        return
    has_union = size >= 0
    query_offset, chunk_start = row_offset(
        offsets_ptr, first_head + head_in_chunk, 0, chunk_start, BLOCK_SIZE
    )
    first_position = chunk_start + tl.program_id(0) * BLOCK_TOKENS
    first = first_position - query_offset
    token, head_in_group, row_mask = query_rows(
        first, 0, num_tokens, GROUP, GROUP, BLOCK_TOKENS, BLOCK_M
    )  # [BLOCK_M] each
    position = token + query_offset  # [BLOCK_M]
    if offsets_ptr is not None:
        row_mask = row_mask & (token >= 0)
    batch, head = b.to(tl.int64), (h * GROUP).to(tl.int64)
    query_heads = kv_heads * GROUP
    row = row_offsets(token, head_in_group, 1, query_heads)
    row = row + batch * num_tokens * query_heads + head  # [BLOCK_M]
    q = load_rows_at(query_ptr, row * HEAD_DIM, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    num_keys = query_offset + num_tokens
    keys = HeadRows(key_desc, key_ptr, b, h, key_strides, num_keys)
    values = HeadRows(value_desc, value_ptr, b, h, value_strides, num_keys)

    # From the own block to the left: the local blocks, then on to the end of the window. Only the
    # own block and those at that end have keys that some row does not see.
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], MIN_LOGIT, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    own_block = first_position // BLOCK_SIZE
    own_start = None
    if offsets_ptr is not None:
        own_start = tl.zeros([BLOCK_M], tl.int32) + own_block * BLOCK_SIZE
    first_key = 0  # of the document, which starts with a block
    if document_start_ptr is not None:
        document_start_ptr += batch * num_tokens + first
        first_key = tl.load(document_start_ptr, mask=first < num_tokens, other=0)
    window_blocks = own_block - tl.maximum(first_position - window + 1, first_key) // BLOCK_SIZE
    local_blocks = tl.minimum(LOCAL, own_block + 1 - first_key // BLOCK_SIZE)
    for i in tl.range(0, local_blocks, num_stages=STAGES):
        start = (own_block - i) * BLOCK_SIZE
        if offsets_ptr is not None:
            start = tl.minimum(start, num_keys - BLOCK_SIZE)
        k, v = load_key_value(
            keys, values, start, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_SIZE, BLOCK_D], [BLOCK_SIZE, BLOCK_DV]
        acc, row_max, row_sum = attend_tile(
            q, k, v, position, own_start, start, window, scale_log2, acc, row_max, row_sum,
            i == 0, PRECISION,
        )  # fmt: skip
    kept = (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty)  # [BLOCK_M, BLOCK_DV]
    kept_lse = row_max + tl.log2(row_sum)  # [BLOCK_M]
    for i in tl.range(local_blocks, window_blocks + 1, num_stages=STAGES):
        start = (own_block - i) * BLOCK_SIZE
        k, v = load_key_value(
            keys, values, start, BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_SIZE, BLOCK_D], [BLOCK_SIZE, BLOCK_DV]
        acc, row_max, row_sum = attend_tile(
            q, k, v, position, None, start, window, scale_log2, acc, row_max, row_sum,
            start + window < first_position + BLOCK_TOKENS, PRECISION,
        )  # fmt: skip

    tl.store(sliding_lse_ptr + row, (row_max + tl.log2(row_sum)) * LN2, mask=row_mask)
    gate_ptr += batch * gate_strides[0] + head * gate_strides[1]
    gate_ptr += row_offsets(token, head_in_group, gate_strides[1], gate_strides[2])
    gate = tl.load(gate_ptr + 2 * gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)
    acc *= (gate / row_sum)[:, None]
    branch = load_compressed(
        part0, part1, part2, part3, batch, token, head + head_in_group, row_mask, query_heads,
        rows, first1, first2, first3, reach, STRIDE, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
    gate = tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)
    acc += branch.to(tl.float32) * gate[:, None]
    gate = tl.load(gate_ptr + gate_strides[3], mask=row_mask, other=0.0).to(tl.float32)

    if has_union:
        branch = load_rows_at(
            out_ptr, row * VALUE_DIM, row_mask, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        acc += branch.to(tl.float32) * gate[:, None]
    else:
        bitmask_ptr += (batch * kv_heads + h) * num_tokens
        bitmask = tl.load(bitmask_ptr + token, mask=row_mask, other=0)  # [BLOCK_M]
        selected, row_max, row_sum = attend_initial_blocks(
            q, keys, values, bitmask, scale_log2, own_block * 0,
            kept.to(tl.float32), kept_lse, tl.full([BLOCK_M], 1.0, tl.float32),
            BLOCK_SIZE, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            PRECISION, INITIAL, LOCAL,
        )  # fmt: skip  # [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M]
        num_topk = bitmask >> 24
        partial_row = head_in_chunk * chunk_tokens + position - chunk_start
        partial_row = partial_row * NUM_SLOTS * GROUP + head_in_group  # [BLOCK_M]
        lse_log2, alpha = combine_lse(
            row_max, row_sum, partial_lse_ptr, partial_row, num_topk, GROUP, PADDED_SLOTS
        )
        tl.store(selected_lse_ptr + row, lse_log2 * LN2, mask=row_mask)
        acc = add_partials(
            acc + selected * (gate * alpha)[:, None], gate, lse_log2, partial_ptr, partial_lse_ptr,
            partial_row, num_topk, GROUP, INT64_OFFSETS, VALUE_DIM, BLOCK_DV, PARTIAL_STAGES,
        )  # fmt: skip
    store_rows_at(out_ptr, row * VALUE_DIM, row_mask, acc, VALUE_DIM, BLOCK_DV)
