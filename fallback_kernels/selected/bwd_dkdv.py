"""dK and dV of selected attention: the kernels over lists and over dense candidates."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.tiles import group_rows, load_rows, store_rows
from nsa_flex.fallback_kernels.selected.tiles import first_entry, item_of, load_block

# How a program hands its dK and dV over.
STORE = tl.constexpr(0)
ATOMIC = tl.constexpr(1)
ADD = tl.constexpr(2)


@triton.jit
def hand_over(
    base_ptr,
    kv_heads,
    tile,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Put a block's gradient (BLOCK_SIZE, COLUMNS) into the float32 buffer at `base_ptr`."""
    position = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, COLUMNS)
    pointer = base_ptr + (position * (kv_heads * WIDTH))[:, None] + column[None, :]
    ok = tl.full([BLOCK_SIZE, COLUMNS], True, tl.int1)
    if WIDTH != COLUMNS:
        ok = ok & (column < WIDTH)[None, :]
    if MODE == STORE:
        tl.store(pointer, tile, mask=ok)
    elif MODE == ATOMIC:
        tl.atomic_add(pointer, tile, mask=ok, sem="relaxed")
    else:
        tl.store(pointer, tl.load(pointer, mask=ok, other=0.0) + tile, mask=ok)


@triton.jit(do_not_specialize=["first_item", "first_head", "first_list", "window_shift"])
def list_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    numbers_ptr,
    partial_ptr,
    grad_key_ptr,
    grad_value_ptr,
    entries_ptr,
    items_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    first_item,
    first_head,
    first_list,
    window_shift,
    window_tokens,
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
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    MODE: tl.constexpr,
):
    """Free choices: dK and dV of one chunk of one list, and its share of dQ.

    `numbers_ptr`: base-2 log-sum-exp and delta of every row, as `row_numbers_kernel` writes them.
    """
    start, stop, batch, head, within, block = item_of(
        items_ptr,
        first_item + tl.program_id(0),
        first_head,
        first_list,
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
    numbers_ptr = group_rows(numbers_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    first = first_entry(within, window_tokens, window_shift, NUM_SLOTS)

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([BLOCK_SIZE, VALUE_COLUMNS], tl.float32)
    for tile in tl.range(start, stop, TOKENS, num_stages=STAGES):
        # Rows past the end repeat the last entry with probability 0: no load needs a mask.
        entry = tl.load(entries_ptr + tl.minimum(tile + token, stop - 1))
        line = (entry // NUM_SLOTS) * query_heads + member
        q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_rows(grad_out_ptr, line, WIDE, VALUE_DIM, VALUE_COLUMNS)
        row_ok = (token < TOKENS) & (tile + token < stop)
        numbers = tl.load(numbers_ptr + line[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(numbers)
        lse_log2 = tl.where(row_ok, lse_log2, float("inf"))
        # Keys as rows: probabilities and their gradient are then operands of dV and dK as they
        # lie in registers, and only dQ needs a transposed copy.
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_log2[None, :])
        grad_v = tl.dot(p.to(grad_out.dtype), grad_out, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[None, :])).to(q.dtype)
        # Always so. Triton's pipeliner starts the next tile's loads after all that is no branch:
        # they are on their way while these two products run and dQ is stored.
        if tile < stop:
            grad_k = tl.dot(grad_scores, q, grad_k, input_precision=PRECISION)
            grad_q = tl.dot(tl.trans(grad_scores), k, input_precision=PRECISION)
            # Read once more: kept, it would take registers that spill.
            entry = tl.load(entries_ptr + tile + token, mask=row_ok, other=0)
            place = (first + entry) * GROUP + member
            store_rows(partial_ptr, place, grad_q, row_ok, WIDE, HEAD_DIM, HEAD_COLUMNS, True)

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    hand_over(grad_key_ptr, kv_heads, grad_k * scale, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, MODE)
    hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, MODE)


@triton.jit
def dense_gradient_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    grad_out_ptr,
    numbers_ptr,
    summary_ptr,
    grad_key_ptr,
    grad_value_ptr,
    key_stride_b,
    key_stride_h,
    key_stride_s,
    value_stride_b,
    value_stride_h,
    value_stride_s,
    query_offset,
    num_queries,
    num_keys,
    grad_tokens,
    kv_heads,
    scale,
    scale_log2,
    GROUP: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    CHUNK: tl.constexpr,
    LOCALS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Dense candidates: dK and dV of one block from consecutive queries.

    LOCALS: blocks in a chunk; 0 leaves local blocks out.

    A program takes a block as a local one, or a chunk of the later queries that have it as an
    initial one. Programs that read the same queries run at the same time, so that most of them
    find these in the cache: chunks stand beside the blocks they lie in, and every other block
    begins with its later queries, which are the next block's own.

    Every block of keys has a first sum by one program, which stores it: 0 where no query is near.
    Initial blocks have many; they start at 0 and are added to.
    """
    turn = tl.program_id(0) // (LOCALS + INITIAL)
    place = tl.program_id(0) % (LOCALS + INITIAL)
    batch_head = tl.program_id(1)
    b = (batch_head // kv_heads).to(tl.int64)
    h = (batch_head % kv_heads).to(tl.int64)
    is_local = place < LOCALS
    block = tl.where(is_local, turn * LOCALS + place, place - LOCALS)
    start = tl.where(is_local, block, block + LOCAL) * BLOCK_SIZE
    start += tl.where(is_local, 0, turn * CHUNK)
    stop = start + tl.where(is_local, LOCAL * BLOCK_SIZE, CHUNK)
    # As indices of queries; those before the first one or after the last do not exist.
    start = tl.maximum(start - query_offset, 0)
    stop = tl.minimum(stop - query_offset, num_queries)
    stores = is_local & (block >= INITIAL) & (block * BLOCK_SIZE < grad_tokens)
    if (start >= stop) & ~stores:
        return

    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, HEAD_DIM)
    grad_out_ptr = group_rows(grad_out_ptr, b, h, num_queries, kv_heads, GROUP, VALUE_DIM)
    numbers_ptr = group_rows(numbers_ptr, b, h, num_queries, kv_heads, GROUP, 2)
    summary_ptr += (b * kv_heads + h) * num_queries
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    k = load_block(key_ptr, key_stride_s, block, num_keys, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS)
    v = load_block(
        value_ptr, value_stride_s, block, num_keys, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS
    )
    key_index = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE) - query_offset

    TOKENS: tl.constexpr = ROWS // GROUP
    row = tl.arange(0, ROWS)
    token = row // GROUP
    member = row % GROUP
    grad_k = tl.zeros([BLOCK_SIZE, HEAD_COLUMNS], tl.float32)
    grad_v = tl.zeros([BLOCK_SIZE, VALUE_COLUMNS], tl.float32)
    tiles = tl.cdiv(tl.maximum(stop - start, 0), TOKENS)
    skipped = tl.where(is_local & (block % 2 == 1), tiles // 2, 0)
    for i in tl.range(0, tiles, num_stages=STAGES):
        tile = start + (i + skipped) % tiles * TOKENS
        query = tl.minimum(tile + token, stop - 1)
        line = query * query_heads + member
        q = load_rows(query_ptr, line, WIDE, HEAD_DIM, HEAD_COLUMNS)
        grad_out = load_rows(grad_out_ptr, line, WIDE, VALUE_DIM, VALUE_COLUMNS)
        row_ok = (token < TOKENS) & (tile + token < stop)
        numbers = tl.load(numbers_ptr + line[:, None] * 2 + tl.arange(0, 2)[None, :])
        lse_log2, delta = tl.split(numbers)
        lse_log2 = tl.where(row_ok, lse_log2, float("inf"))
        age = (query + query_offset) // BLOCK_SIZE - block
        candidate = tl.where(age < LOCAL, age, LOCAL + block)
        chosen = ((tl.load(summary_ptr + query) >> candidate) & 1) != 0
        # The last key that the row sees, none if it did not choose the block.
        limit = tl.where(chosen, query, -query_offset - 1)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        p = tl.exp2(scores * scale_log2 - lse_log2[:, None])
        p = tl.where(key_index[None, :] <= limit[:, None], p, 0.0)
        grad_v = tl.dot(
            tl.trans(p.to(grad_out.dtype)), grad_out, grad_v, input_precision=PRECISION
        )
        grad_p = tl.dot(grad_out, tl.trans(v), input_precision=PRECISION)
        grad_scores = (p * (grad_p - delta[:, None])).to(q.dtype)
        if i < tiles:  # always: see the lists
            grad_k = tl.dot(tl.trans(grad_scores), q, grad_k, input_precision=PRECISION)

    grad_line = (b * grad_tokens + block * BLOCK_SIZE) * kv_heads + h
    grad_key_ptr += grad_line * HEAD_DIM
    grad_value_ptr += grad_line * VALUE_DIM
    grad_k *= scale
    if stores:
        hand_over(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, STORE)
        hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, STORE)
    else:
        hand_over(grad_key_ptr, kv_heads, grad_k, BLOCK_SIZE, HEAD_DIM, HEAD_COLUMNS, ATOMIC)
        hand_over(grad_value_ptr, kv_heads, grad_v, BLOCK_SIZE, VALUE_DIM, VALUE_COLUMNS, ATOMIC)
