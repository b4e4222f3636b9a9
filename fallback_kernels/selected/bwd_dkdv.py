"""dK and dV of selected attention: of top-k blocks, and of initial and local blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import (
    group_rows,
    load_rows,
    precision_of,
    store_rows,
    width_of,
)
from nsa_flex.fallback_kernels.selected.tiles import (
    first_partial,
    last_key,
    load_block,
    load_work_tile,
    row_offset,
    row_shift,
)

# How a CTA writes its dK and dV.
STORE = tl.constexpr(0)
ATOMIC = tl.constexpr(1)
ADD = tl.constexpr(2)


@triton.jit
def write_gradient(
    base_ptr,
    kv_heads,
    tile,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MODE: tl.constexpr,
):
    """Write a block's gradient [BLOCK_SIZE, BLOCK_D] into the float32 buffer at `base_ptr`."""
    position = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, BLOCK_D)
    pointer = base_ptr + (position * (kv_heads * DIM))[:, None] + column[None, :]
    mask = tl.full([BLOCK_SIZE, BLOCK_D], True, tl.int1)
    if DIM != BLOCK_D:
        mask = mask & (column < DIM)[None, :]
    if MODE == STORE:
        tl.store(pointer, tile, mask=mask)
    elif MODE == ATOMIC:
        tl.atomic_add(pointer, tile, mask=mask, sem="relaxed")
    else:
        tl.store(pointer, tl.load(pointer, mask=mask, other=0.0) + tile, mask=mask)


@recordable
@triton.jit(do_not_specialize=["first_work_tile", "first_head", "first_csr_row", "chunk_shift"])
def selected_bwd_dkdv_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    stats_ptr,
    partial_ptr,
    grad_key_ptr,
    grad_value_ptr,
    entries_ptr,
    work_tiles_ptr,
    offsets_ptr,
    key_strides,
    value_strides,
    first_work_tile,
    first_head,
    first_csr_row,
    chunk_shift,
    chunk_tokens,
    num_queries,
    num_keys,
    grad_tokens,
    num_blocks,
    kv_heads,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    MODE: tl.constexpr,
):
    """Top-k blocks: dK and dV of one work tile, and its partial dQ.

    `stats_ptr`: base-2 log-sum-exp and delta of every row, as `softmax_stats_kernel` writes them.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    start, stop, batch, head, head_in_chunk, block = load_work_tile(
        work_tiles_ptr,
        first_work_tile + tl.program_id(0),
        first_head,
        first_csr_row,
        kv_heads,
        num_blocks,
        False,
    )
    if start >= stop:
        return
    b, h = batch.to(tl.int64), head.to(tl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    grad_out_ptr = group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    stats_ptr = group_rows(stats_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    k = load_block(
        key_ptr, key_strides[2], block, num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D
    )  # [BLOCK_SIZE, BLOCK_D]
    v = load_block(
        value_ptr, value_strides[2], block, num_keys, BLOCK_SIZE, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_SIZE, BLOCK_DV]
    chunk_shift = row_shift(offsets_ptr, batch * kv_heads + head, chunk_shift, BLOCK_SIZE)
    first = first_partial(head_in_chunk, chunk_tokens, chunk_shift, NUM_SLOTS)

    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    head_in_group = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, BLOCK_D], tl.float32)  # [BLOCK_SIZE, BLOCK_D]
    grad_v = tl.zeros([BLOCK_SIZE, BLOCK_DV], tl.float32)  # [BLOCK_SIZE, BLOCK_DV]
    for tile in tl.range(start, stop, BLOCK_TOKENS, num_stages=STAGES):
        # Rows past the end repeat the last entry with probability 0: no load needs a mask.
        entry = tl.load(entries_ptr + tl.minimum(tile + token, stop - 1))  # [BLOCK_M]
        query_row = (entry // NUM_SLOTS) * query_heads + head_in_group
        q = load_rows(query_ptr, query_row, INT64_OFFSETS, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        grad_out = load_rows(
            grad_out_ptr, query_row, INT64_OFFSETS, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        row_mask = (token < BLOCK_TOKENS) & (tile + token < stop)
        stats = tl.load(stats_ptr + query_row[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(stats)  # [BLOCK_M] each
        lse_log2 = tl.where(row_mask, lse_log2, float("inf"))
        # Keys as rows: probabilities and their gradient are then operands of dV and dK as they
        # lie in registers, and only dQ needs a transposed copy.
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_SIZE, BLOCK_M]
        p = tl.exp2(logits * scale_log2 - lse_log2[None, :])
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)  # [BLOCK_SIZE, BLOCK_M]
        grad_scores = (p * (grad_p - delta[None, :])).to(q.dtype)
        # Always so. Triton's pipeliner starts the next tile's loads after all that is no branch:
        # they are on their way while these two products run and dQ is stored.
        if tile < stop:
            grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)
            grad_q = tl.dot(
                tl.trans(grad_scores), k, input_precision=PRECISION
            )  # [BLOCK_M, BLOCK_D]
            # Read once more: kept, it would take registers that spill.
            entry = tl.load(entries_ptr + tile + token, mask=row_mask, other=0)  # [BLOCK_M]
            offset = (first + entry) * GROUP + head_in_group
            store_rows(
                partial_ptr, offset, grad_q, row_mask, INT64_OFFSETS, HEAD_DIM, BLOCK_D, True
            )

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    write_gradient(grad_key_ptr, kv_heads, grad_k * scale, BLOCK_SIZE, HEAD_DIM, BLOCK_D, MODE)
    write_gradient(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, BLOCK_DV, MODE)


@recordable
@triton.jit
def selected_bwd_dkdv_initial_local_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    stats_ptr,
    bitmask_ptr,
    offsets_ptr,
    grad_key_ptr,
    grad_value_ptr,
    key_strides,
    value_strides,
    query_offset,
    num_queries,
    num_keys,
    grad_tokens,
    kv_heads,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    INT64_OFFSETS: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    SEGMENT_TOKENS: tl.constexpr,
    LOCAL_PER_SEGMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Initial and local blocks: dK and dV of one block from consecutive queries.

    LOCAL_PER_SEGMENT: blocks in a segment of SEGMENT_TOKENS positions; 0 leaves local blocks out.

    A CTA takes a block as a local one, or a segment of the later queries that have it as an
    initial one. CTAs that read the same queries run at the same time, so that most reads hit the
    L2 cache: a segment is numbered beside its blocks, and every other block begins with its later
    queries, which are the next block's own.

    A block of keys that is local has one CTA, which stores its sum: 0 where no query is near. The
    gradients of initial blocks start at 0; their CTAs add by atomics.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    segment = tl.program_id(0) // (LOCAL_PER_SEGMENT + INITIAL)
    number = tl.program_id(0) % (LOCAL_PER_SEGMENT + INITIAL)
    batch_head = tl.program_id(1)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    is_local = number < LOCAL_PER_SEGMENT
    block = tl.where(is_local, segment * LOCAL_PER_SEGMENT + number, number - LOCAL_PER_SEGMENT)
    start = tl.where(is_local, block, block + LOCAL) * BLOCK_SIZE
    start += tl.where(is_local, 0, segment * SEGMENT_TOKENS)
    stop = start + tl.where(is_local, LOCAL * BLOCK_SIZE, SEGMENT_TOKENS)
    query_offset, _ = row_offset(offsets_ptr, batch_head, query_offset, 0, BLOCK_SIZE)
    num_keys = last_key(offsets_ptr, query_offset, num_queries, num_keys)
    # As indices of queries; those before the first one or after the last do not exist.
    start = tl.maximum(start - query_offset, 0)
    stop = tl.minimum(stop - query_offset, num_queries)
    stores = is_local & (block >= INITIAL) & (block * BLOCK_SIZE < grad_tokens)
    if (start >= stop) & ~stores:
        return

    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    grad_out_ptr = group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    stats_ptr = group_rows(stats_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    bitmask_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    k = load_block(
        key_ptr, key_strides[2], block, num_keys, BLOCK_SIZE, HEAD_DIM, BLOCK_D
    )  # [BLOCK_SIZE, BLOCK_D]
    v = load_block(
        value_ptr, value_strides[2], block, num_keys, BLOCK_SIZE, VALUE_DIM, BLOCK_DV
    )  # [BLOCK_SIZE, BLOCK_DV]
    key_index = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) - query_offset

    BLOCK_TOKENS: tl.constexpr = BLOCK_M // GROUP
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    head_in_group = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, BLOCK_D], tl.float32)  # [BLOCK_SIZE, BLOCK_D]
    grad_v = tl.zeros([BLOCK_SIZE, BLOCK_DV], tl.float32)  # [BLOCK_SIZE, BLOCK_DV]
    tiles = tl.cdiv(tl.maximum(stop - start, 0), BLOCK_TOKENS)
    skipped = tl.where(is_local & (block % 2 == 1), tiles // 2, 0)
    divisor = tl.maximum(tiles, 1)  # loads are prepared even where there is no tile
    for i in tl.range(0, tiles, num_stages=STAGES):
        tile = start + (i + skipped) % divisor * BLOCK_TOKENS
        query = tl.minimum(tile + token, stop - 1)
        query_row = query * query_heads + head_in_group
        q = load_rows(query_ptr, query_row, INT64_OFFSETS, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        grad_out = load_rows(
            grad_out_ptr, query_row, INT64_OFFSETS, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        row_mask = (token < BLOCK_TOKENS) & (tile + token < stop)
        stats = tl.load(stats_ptr + query_row[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(stats)  # [BLOCK_M] each
        lse_log2 = tl.where(row_mask, lse_log2, float("inf"))
        age = (query + query_offset) // BLOCK_SIZE - block
        bit = tl.where(age < LOCAL, age, LOCAL + block)
        selected = ((tl.load(bitmask_ptr + query) >> bit) & 1) != 0
        # The last key that the row sees, none if it did not choose the block.
        limit = tl.where(selected, query, -query_offset - 1)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
        p = tl.exp2(logits * scale_log2 - lse_log2[:, None])
        p = tl.where(key_index[None, :] <= limit[:, None], p, 0.0)
        grad_v = tl.dot(
            tl.trans(p.to(grad_out.dtype)), grad_out, grad_v, input_precision=PRECISION
        )
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)  # [BLOCK_M, BLOCK_SIZE]
        grad_scores = (p * (grad_p - delta[:, None])).to(q.dtype)
        if i < tiles:  # always: see the top-k kernel
            grad_k = tl.dot(tl.trans(grad_scores), q, grad_k, input_precision=PRECISION)

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    grad_k *= scale
    if stores:
        write_gradient(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, BLOCK_D, STORE)
        write_gradient(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, BLOCK_DV, STORE)
    else:
        write_gradient(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, BLOCK_D, ATOMIC)
        write_gradient(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, BLOCK_DV, ATOMIC)
