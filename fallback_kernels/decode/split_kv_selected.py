"""Selected and sliding branch of a decode step, split over blocks and over the window.

A CTA attends its tokens for all query heads of a group, so that each key and value is read once
per KV head and branch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import precision_of, width_of
from nsa_flex.fallback_kernels.decode.tiles import (
    count_slots,
    load_query_group,
    load_tile,
    page_pointers,
    pdl_launch_dependents,
    pdl_wait,
    softmax_step,
    store_partial,
    tile_pointers,
)
from nsa_flex.fallback_kernels.decode.topk import best_of_chunks


@recordable
@triton.jit(
    do_not_specialize=[
        "num_compressed_splits",
        "num_splits",
        "window_splits",
        "initial_local_splits",
        "first_dependent_split",
        "initial_local_per_split",
        "topk_per_split",
        "tiles_per_split",
    ]
)
def decode_selected_sliding_kernel(
    query_ptr, key_ptr, value_ptr, sliding_key_ptr, sliding_value_ptr, new_key_ptr, new_value_ptr,
    lengths_ptr, candidate_ptr, block_ptr, partial_ptr, row_max_ptr, row_sum_ptr, rows_read_ptr,
    query_strides, key_strides, value_strides, sliding_key_strides, sliding_value_strides,
    new_key_strides, new_value_strides,
    capacity, kv_heads, num_compressed_splits, num_splits, window_splits, initial_local_splits,
    first_dependent_split, initial_local_per_split, topk_per_split, tiles_per_split, scale_log2,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    TILED: tl.constexpr, CHUNKS: tl.constexpr, PADDED_BLOCKS: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, HAS_NEW_TOKEN: tl.constexpr,
    COUNT_ROWS: tl.constexpr, PDL: tl.constexpr,
    PAGE: tl.constexpr = 0, table_ptr=None, table_stride=0,
):  # fmt: skip
    """CTA (KV head of a batch row, new token, split). Splits of the window come first, then those
    of the initial and local blocks, then those of the top-k blocks.

    Only splits from `first_dependent_split` on wait for the top-k kernel: of what the step's
    kernels write, the others need nothing but the new token's key and value, which HAS_NEW_TOKEN
    reads where the caller has them. The last split waits whatever the branches are: the combine
    kernel waits for this one alone, and reads what those before it wrote. With several CHUNKS of
    candidates a split of top-k blocks is one or two slots. With PAGE, tokens are in pages of so
    many: a row of the table, int (B, pages), lists those of a request, and strides of batch rows
    lead from page to page.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    BLOCK_M: tl.constexpr = width_of(GROUP)
    PADDED_SLOTS: tl.constexpr = triton.next_power_of_2(NUM_SLOTS)
    PRECISION: tl.constexpr = precision_of(query_ptr.dtype.element_ty)
    TILES_PER_BLOCK: tl.constexpr = (SELECT + BLOCK_N - 1) // BLOCK_N
    TOPK: tl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    pdl_launch_dependents(PDL)
    batch_head, token, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, head = (batch_head // kv_heads).to(tl.int64), (batch_head % kv_heads).to(tl.int64)
    unit = (batch_head * tl.num_programs(1) + token).to(tl.int64)
    query_ptr += (
        batch * query_strides[0] + head * GROUP * query_strides[1] + token * query_strides[2]
    )
    q = load_query_group(
        query_ptr, query_strides[1], GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )  # [BLOCK_M, BLOCK_D]
    position = tl.load(lengths_ptr + batch) + token
    if split >= first_dependent_split:
        pdl_wait(PDL)
    if position >= capacity:
        return
    is_selected = split >= window_splits
    is_topk = split >= window_splits + initial_local_splits
    window = tl.minimum(position + 1, WINDOW)
    first_tile = split * tiles_per_split
    tiles = tl.minimum(tl.cdiv(window, BLOCK_N) - first_tile, tiles_per_split)
    own_block = position // SELECT
    slots_are_full = own_block >= NUM_SLOTS
    num_initial_local, num_topk = count_slots(position, SELECT, NUM_SLOTS, TOPK, INITIAL, TILED)
    split_in_kind = split - window_splits - tl.where(is_topk, initial_local_splits, 0)
    per_split = tl.where(is_topk, topk_per_split, initial_local_per_split)
    first_slot = split_in_kind * per_split
    slots = tl.minimum(tl.where(is_topk, num_topk, num_initial_local) - first_slot, per_split)
    steps = tl.where(is_selected, slots * TILES_PER_BLOCK, tiles)
    block_ptr += unit * NUM_SLOTS
    if steps <= 0:
        return
    if PAGE:
        keys, values = key_ptr + head * key_strides[1], value_ptr + head * value_strides[1]
        key_stride, value_stride = key_strides[2], value_strides[2]
        table_ptr += batch * table_stride
    elif is_selected:
        keys = key_ptr + batch * key_strides[0] + head * key_strides[1]
        values = value_ptr + batch * value_strides[0] + head * value_strides[1]
        key_stride, value_stride = key_strides[2], value_strides[2]
    else:
        keys = sliding_key_ptr + batch * sliding_key_strides[0] + head * sliding_key_strides[1]
        values = sliding_value_ptr + batch * sliding_value_strides[0]
        values += head * sliding_value_strides[1]
        key_stride, value_stride = sliding_key_strides[2], sliding_value_strides[2]

    candidate_ptr += unit * (CHUNKS * PADDED_SLOTS)
    rank = first_slot.to(tl.int64) * 0
    first_rank, second_rank = rank, rank
    if CHUNKS > 1:  # noqa: SIM102
        if is_topk & slots_are_full:
            first_rank, second_rank = best_of_chunks(
                candidate_ptr, first_slot, CHUNKS, PADDED_SLOTS, TOPK
            )
    window_start = position + 1 - window + first_tile * BLOCK_N
    new_key = new_key_ptr + batch * new_key_strides[0] + head * new_key_strides[1]
    new_key += tl.arange(0, BLOCK_D)[None, :]
    new_value = new_value_ptr + batch * new_value_strides[0] + head * new_value_strides[1]
    new_value += tl.arange(0, BLOCK_DV)[None, :]
    row_max = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_DV), tl.float32)
    rows_read = split * 0
    for step in tl.range(0, steps, num_stages=STAGES):
        slot_in_kind = first_slot + step // TILES_PER_BLOCK
        # Initial blocks have the first slots, top-k blocks the next, local blocks the last.
        slot = tl.where(slot_in_kind < INITIAL, slot_in_kind, slot_in_kind + TOPK)
        slot = tl.where(is_topk, slot_in_kind + INITIAL, slot)
        block = tl.where(
            slots_are_full & (slot >= INITIAL), own_block - (NUM_SLOTS - 1 - slot), slot
        )
        if CHUNKS == 1:
            rank = tl.load(candidate_ptr + slot_in_kind, mask=is_topk & slots_are_full, other=0)
        else:
            rank = tl.where(slot_in_kind == first_slot, first_rank, second_rank)
        topk_block = PADDED_BLOCKS - 1 - (rank & 0xFFFFFFFF).to(tl.int32)
        block = tl.where(is_topk & slots_are_full, topk_block, block)
        start = tl.where(
            is_selected,
            block * SELECT + step % TILES_PER_BLOCK * BLOCK_N,
            window_start + step * BLOCK_N,
        )
        last = tl.where(is_selected, tl.minimum(position, (block + 1) * SELECT - 1), position)
        key = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key_mask = key <= last
        if PAGE:
            key_pointers = page_pointers(
                keys, table_ptr, key_strides[0], key_stride, start, key_mask,
                PAGE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            value_pointers = page_pointers(
                values, table_ptr, value_strides[0], value_stride, start, key_mask,
                PAGE, BLOCK_N, BLOCK_DV,
            )  # fmt: skip
        else:
            key_pointers = tile_pointers(keys, key_stride, start, BLOCK_N, BLOCK_D)
            value_pointers = tile_pointers(values, value_stride, start, BLOCK_N, BLOCK_DV)
        if HAS_NEW_TOKEN:
            is_new = (key == position)[:, None]  # [BLOCK_N, 1]
            key_pointers = tl.where(is_new, new_key, key_pointers)
            value_pointers = tl.where(is_new, new_value, value_pointers)
        k = load_tile(key_pointers, key_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_N, BLOCK_D]
        p, row_max, alpha = softmax_step(q, k, key_mask, row_max, scale_log2, PRECISION)
        v = load_tile(value_pointers, key_mask, VALUE_DIM, BLOCK_DV)  # [BLOCK_N, BLOCK_DV]
        row_sum = row_sum * alpha + tl.sum(p, 1)  # [BLOCK_M]
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)  # [BLOCK_M, BLOCK_DV]
        tl.store(block_ptr + slot, block, mask=is_selected)
        if COUNT_ROWS:
            rows_read += tl.sum(key_mask.to(tl.int32))
    store_partial(
        partial_ptr, row_max_ptr, row_sum_ptr, unit, num_compressed_splits + split, num_splits,
        acc, row_max, row_sum, GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV,
    )  # fmt: skip
    if COUNT_ROWS:
        tl.store(rows_read_ptr + unit * num_splits + num_compressed_splits + split, rows_read)
