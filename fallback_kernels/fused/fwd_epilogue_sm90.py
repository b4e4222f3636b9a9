"""Fused epilogue of the forward on Hopper: three CTAs an SM.

What `fwd_epilogue` computes, at head dim 128 in 64 KiB of shared memory and 168 registers a
thread, where the Triton kernel has two CTAs of 255. The result of the local blocks waits in
shared memory until the normaliser of the selected branch is known. Every copy overlaps with
arithmetic: keys and values first, then partial outputs and rows of the compressed branch, into
buffers that are free by then, and last the results, out of the same buffers. For a backward the
branches are written as well.

Tiles are powers of two wide and have a power of two of heads a token. Where a call has fewer, the
copy engine reads zeros behind them, and writes nothing there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa_flex.fallback_kernels.common.gluon import (
    async_load,
    thread_barrier,
    tma_load,
    tma_store,
    to_float32,
)
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LN2, MIN_LOGIT
from nsa_flex.fallback_kernels.common.strides import has_tma_strides
from nsa_flex.fallback_kernels.common.tiles import tile_width, width_of
from nsa_flex.fallback_kernels.compressed import fold as fold_parts
from nsa_flex.fallback_kernels.selected.block_union import OTHERS
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_union_sm90 import (
    add_sums,
    add_values,
    kv_descriptor,
    qk_product,
    row_offset,
    scale_rows,
    sums_by_lane,
)
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.sliding import tiles as sliding_tiles

fold_position = gluon.jit(fold_parts.fold_position.fn)
of_range = gluon.jit(fold_parts.of_range.fn)
row_offsets = gluon.jit(sliding_tiles.row_offsets.fn)

BLOCK_M = gl.constexpr(64)  # (token, head in group) rows of a query tile
BLOCK_N = gl.constexpr(64)  # keys of a block
BUFFERS = gl.constexpr(4)  # tiles in shared memory: queries, keys, the kept result, and values
REGISTERS = 168  # of a thread: three CTAs an SM; at head dim 64 a fourth would make it spill
WIDTHS = (64, 128)  # of a tile: head dims of queries, keys and values, padded; D below


@gluon.jit
def block_of_step(step, own_block, window_blocks):
    """Block of a step: the window's from right to left, then the first of all."""
    return gl.where(step < window_blocks, own_block - step, 0)


@gluon.jit
def tile_start(block, last_start):
    """First key of the tile that is loaded for a block; `last_start` is the last there may be."""
    start = block * BLOCK_N
    if last_start is not None:
        start = gl.minimum(start, last_start)
    return start


@gluon.jit
def fetch(desc, at, start, barrier, buffer, is_needed):
    """Starts the TMA load of keys or values from `start` on, of (batch row, KV head) `at`."""
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=is_needed)
    tma_load(
        desc,
        [at[0], at[1], start, 0],
        barrier,
        buffer.reshape(desc.block_type.shape),
        is_needed,
    )


@gluon.jit
def fetch_partials(partials, slot, barrier, buffer):
    """Starts the TMA load of a tile's partial outputs of one slot, if any row has that slot.

    partials: their descriptor, the tile's first row, and the number of slots that any row has.
    """
    desc, first_row, num_slots = partials
    mbarrier.expect(barrier, desc.block_type.nbytes, pred=slot < num_slots)
    shape: gl.constexpr = desc.block_type.shape
    tma_load(desc, [first_row, slot, 0, 0], barrier, buffer.reshape(shape), slot < num_slots)


@gluon.jit
def load_partial_lse(rows, slot):
    """Log-sum-exps of the partial outputs of a slot [BLOCK_M]; -inf where there are none.

    rows: pointers to those of slot 0, the stride from slot to slot, and how many a row has.
    """
    lse_ptr, stride, num_topk = rows
    return gl.load(lse_ptr + slot * stride, mask=slot < num_topk, other=float("-inf"))


@gluon.jit
def add_partials(
    acc, partial_lse, partials, slot, rows, branch, buffers, barriers,
    BUFFER: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """`acc` [BLOCK_M, D] plus a slot's weighted partial outputs, in buffer BUFFER, and the
    next slot's log-sum-exps.

    partials: as `fetch_partials` has them. rows: as `load_partial_lse` has them. branch:
    log-sum-exps of the branch's rows, and their factors. SOME: not all rows have an output here;
    in place of those of the others the buffer may hold anything.
    """
    weight = gl.exp2(partial_lse - branch[0]) * branch[1]  # [BLOCK_M]
    partial_lse = load_partial_lse(rows, slot + 1)
    mbarrier.wait(barriers[BUFFER], slot // len(buffers) & 1)
    partial = to_float32(buffers[BUFFER].load(acc.type.layout))  # [BLOCK_M, D]
    fetch_partials(partials, slot + len(buffers), barriers[BUFFER], buffers[BUFFER])
    if SOME:
        row_mask = gl.convert_layout(slot < rows[2], gl.SliceLayout(1, acc.type.layout))
        partial = gl.where(gl.expand_dims(row_mask, 1), partial, 0.0)
    return acc + scale_rows(partial, weight), partial_lse


@gluon.jit
def write_tile(desc, at, first, buffer, tile):
    """Starts the TMA store of a query tile out of a buffer, which gets `tile` if it is given.

    at: batch row and KV head. first: the tile's first token.
    """
    if tile is not None:
        buffer.store(tile.to(buffer.dtype))
    fence_async_shared()
    thread_barrier()
    shape: gl.constexpr = desc.block_type.shape
    tma_store(desc, [at[0], first, at[1], 0, 0], buffer.reshape(shape))


@gluon.jit
def attend_window(
    begin, end, descs, at, blocks, position, q, keys, values, barriers, sums, scale_log2,
    last_start, TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """`sums` with the blocks of the window from step `begin` to before step `end`.

    descs: of keys and values. at: batch row and KV head. blocks: the own block, how many lie in
    the window, how many are needed in all, the tile's first position, and the window. position:
    of each row. sums: acc [BLOCK_M, D], row_max [BLOCK_M], and row sums by lane
    [BLOCK_M, 4]. last_start: as `tile_start` takes it.
    """
    own_block, window_blocks, steps, first, window = blocks
    acc, row_max, row_sum = sums
    zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, SCORES))
    for step in range(begin, end):
        phase = step & 1
        next_start = tile_start(block_of_step(step + 1, own_block, window_blocks), last_start)
        has_next = step + 1 < steps
        mbarrier.wait(barriers[0], phase)
        logits = qk_product(q, keys.permute((1, 0)), zero)  # [BLOCK_M, BLOCK_N]
        fetch(descs[0], at, next_start, barriers[0], keys, has_next)
        start = (own_block - step) * BLOCK_N
        if (step == 0) | (start + window < first + TOKENS):
            key = gl.expand_dims(tile_start(own_block - step, last_start) + column, 0)
            query = gl.expand_dims(position, 1)
            seen = (key <= query) & (key > query - window)
            if last_start is not None:  # keys of the block before come once more
                seen = seen & (key >= start)
            logits = gl.where(seen, logits, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(logits, 1) * scale_log2)  # [BLOCK_M]
        p = gl.exp2(logits * scale_log2 - gl.expand_dims(new_max, 1))  # [BLOCK_M, BLOCK_N]
        alpha = gl.exp2(row_max - new_max)
        row_sum = add_sums(row_sum, alpha, p)
        row_max = new_max
        mbarrier.wait(barriers[1], phase)
        acc = add_values(p, values, scale_rows(acc, alpha))
        fetch(descs[1], at, next_start, barriers[1], values, has_next)
    return acc, row_max, row_sum


@gluon.jit
def query_rows(
    first, num_tokens, GROUP: gl.constexpr, HEADS: gl.constexpr, EARLY: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Token and head in group of every row, the mask of rows whose token exists, and that of rows
    that exist: [BLOCK_M] each. A token has HEADS rows; those beyond GROUP repeat the last head.

    EARLY: a tile may begin before token 0.
    """
    row = gl.arange(0, BLOCK_M, layout)
    token = first + row // HEADS
    token_mask = token < num_tokens
    if EARLY:
        token_mask = token_mask & (token >= 0)
    head_in_group, row_mask = row % HEADS, token_mask
    if GROUP < HEADS:
        row_mask = row_mask & (head_in_group < GROUP)
        head_in_group = gl.minimum(head_in_group, GROUP - 1)
    return token, head_in_group, token_mask, row_mask


@gluon.jit
def start_rows(pointer, row, row_mask, buffer, HEAD_DIM: gl.constexpr):
    """Starts the copy of rows of HEAD_DIM elements to a buffer; masked rows become 0."""
    D: gl.constexpr = buffer.shape[1]
    column = gl.arange(0, D, gl.SliceLayout(0, row.type.layout.parent))
    pointer = gl.expand_dims(pointer + row * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row_mask, 1)
    if HEAD_DIM < D:
        mask = mask & gl.expand_dims(column < HEAD_DIM, 0)
    # Selecting a pointer hides from the compiler that rows start at multiples of 16 bytes.
    pointer = gl.multiple_of(pointer, (1, 16))
    async_load(buffer, pointer, mask)
    async_copy.commit_group()


@gluon.jit
def start_compressed(
    parts, fold, tile, buffer, GROUP: gl.constexpr, HEADS: gl.constexpr, EARLY: gl.constexpr,
    STRIDE: gl.constexpr, HEAD_DIM: gl.constexpr, MEMORY: gl.constexpr,
):  # fmt: skip
    """Starts the copy of a tile's rows of the compressed branch; 0 where they see no block.

    parts: those of the fold. fold: its rows, where parts begin, and its reach. tile: batch row,
    first token and first query head, and how many tokens and query heads there are.
    """
    batch, first, head, num_tokens, query_heads = tile
    token, head_in_group, _, row_mask = query_rows(
        first, num_tokens, GROUP, HEADS, EARLY, gl.SliceLayout(1, MEMORY)
    )
    rows, first1, first2, first3, reach = fold
    part, residue, width, part_rows, row = fold_position(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    row = ((batch * part_rows + row) * width + residue) * query_heads + head + head_in_group
    pointer = of_range(part, parts[0], parts[1], parts[2], parts[3])
    start_rows(pointer, row, row_mask & (token >= reach), buffer, HEAD_DIM)


@gluon.jit
def add_rows(acc, buffer, factor):
    """`acc` [BLOCK_M, D] plus the rows in a buffer, each times its factor [BLOCK_M]."""
    return acc + scale_rows(to_float32(buffer.load(acc.type.layout)), factor)


@gluon.jit
def write_early_tile(
    pointer, group, of_tile, buffer, tile, GROUP: gl.constexpr, HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr, MEMORY: gl.constexpr,
):  # fmt: skip
    """Writes the rows of a query tile that begins before query 0, which no TMA store takes.

    group: the first row of its heads. of_tile: as `start_compressed` takes it.
    """
    _, first, _, num_tokens, query_heads = of_tile
    buffer.store(tile.to(buffer.dtype))
    thread_barrier()
    token, head_in_group, _, row_mask = query_rows(
        first, num_tokens, GROUP, HEADS, True, gl.SliceLayout(1, MEMORY)
    )
    row = group + row_offsets(token, head_in_group, 1, query_heads)  # [BLOCK_M]
    column = gl.arange(0, buffer.shape[1], gl.SliceLayout(0, MEMORY))
    pointer = gl.expand_dims(pointer + row * HEAD_DIM, 1) + gl.expand_dims(column, 0)
    mask = gl.expand_dims(row_mask, 1) & gl.expand_dims(column < HEAD_DIM, 0)
    gl.store(pointer, buffer.load(MEMORY), mask=mask)


@recordable
@gluon.jit(
    do_not_specialize=[
        "first_head", "chunk_start", "tiles_per_head", "num_tokens", "window",
        "rows", "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def fused_fwd_epilogue_sm90_kernel(
    key_desc, value_desc, query_desc, out_desc,
    compressed_desc, selected_desc, sliding_desc, selected_ptr,
    partial_desc, partial_lse_ptr, bitmask_ptr, union_size_ptr, document_start_ptr, offsets_ptr,
    part0, part1, part2, part3, gate_ptr, selected_lse_ptr, sliding_lse_ptr,
    gate_strides,
    first_head, chunk_start, chunk_tokens, tiles_per_head,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, NUM_SLOTS: gl.constexpr,
    INITIAL: gl.constexpr, LOCAL: gl.constexpr,
):  # fmt: skip
    """`fused_fwd_epilogue_kernel`, with one initial block at most.

    With descriptors of branches these are written as well, the sliding one through the queries'
    shared memory, where the sum reads it again. Of tiles with a block union the selected branch is
    read from `selected_ptr`, which at an offset is the result's memory. Tiles are counted in
    positions, rows and tokens by query.
    """
    PADDED_SLOTS: gl.constexpr = width_of(NUM_SLOTS)
    SAVE: gl.constexpr = sliding_desc is not None
    FIRST: gl.constexpr = 1 if SAVE else 0
    TOPK: gl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    # Steps that attend the row's first block: with documents none is an initial block.
    FIRST_BLOCKS: gl.constexpr = 1 if document_start_ptr is None else 0
    # At an offset tiles begin before the first query, and keys after the last may hold anything.
    EARLY: gl.constexpr = offsets_ptr is not None
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query_desc.dtype
    QUERIES: gl.constexpr = query_desc.block_type.shape
    TOKENS: gl.constexpr = QUERIES[1]
    HEADS: gl.constexpr = QUERIES[3]
    D: gl.constexpr = QUERIES[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    SLOTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, PADDED_SLOTS, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    head_in_chunk = gl.program_id(1)
    batch = (first_head + head_in_chunk) // kv_heads
    h = (first_head + head_in_chunk) % kv_heads
    at = (batch, h)
    first_tile = (first_head + head_in_chunk) * tiles_per_head + chunk_start // TOKENS
    tile = first_tile + gl.program_id(0)
    size = gl.load(union_size_ptr + tile)
    if size == OTHERS:
        return
    has_union = size >= 0
    query_offset, chunk_start = row_offset(
        offsets_ptr, first_head + head_in_chunk, 0, chunk_start, BLOCK_N
    )
    first_position = chunk_start + gl.program_id(0) * TOKENS
    first = first_position - query_offset
    last_start = None
    if EARLY:
        last_start = query_offset + num_tokens - BLOCK_N
    own_block = first_position // BLOCK_N
    first_key = 0  # of the document, which starts with a block
    if document_start_ptr is not None:
        document_start_ptr += batch.to(gl.int64) * num_tokens + first
        first_key = gl.load(document_start_ptr, mask=first < num_tokens, other=0)
    lowest = gl.maximum(first_position - window + 1, first_key)
    window_blocks = own_block - lowest // BLOCK_N + 1
    steps = window_blocks
    if not has_union:
        steps += FIRST_BLOCKS

    # Separate allocations: the compiler then orders no access to one behind those to another.
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, D], dtype)
    buffers, barriers = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(BUFFERS):
        buffers += (gl.allocate_shared_memory(dtype, [BLOCK_M, D], SHARED),)
    # Barriers of keys, values, queries, and each buffer of partial outputs.
    for i in gl.static_range(3 + BUFFERS):
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(barriers[i], count=1)
    fence_async_shared()
    thread_barrier()
    q, keys, kept, values = buffers[0], buffers[1], buffers[2], buffers[3]
    mbarrier.expect(barriers[2], query_desc.block_type.nbytes)
    tma_load(query_desc, [batch, first, h, 0, 0], barriers[2], q.reshape(QUERIES))
    own_start = tile_start(own_block, last_start)
    fetch(key_desc, at, own_start, barriers[0], keys, True)
    fetch(value_desc, at, own_start, barriers[1], values, True)

    b, head = batch.to(gl.int64), h.to(gl.int64) * GROUP
    query_heads = kv_heads * GROUP
    group = b * num_tokens * query_heads + head
    token, head_in_group, token_mask, row_mask = query_rows(
        first, num_tokens, GROUP, HEADS, EARLY, ROW
    )
    row = group + row_offsets(token, head_in_group, 1, query_heads)  # [BLOCK_M]
    acc = gl.zeros([BLOCK_M, D], gl.float32, OUT)
    row_max = gl.full([BLOCK_M], MIN_LOGIT, gl.float32, ROW)
    row_sum = sums_by_lane(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES))
    position = token + query_offset  # [BLOCK_M]
    descs = (key_desc, value_desc)
    blocks = (own_block, window_blocks, steps, first_position, window)
    mbarrier.wait(barriers[2], 0)
    local_blocks = gl.minimum(LOCAL, own_block + 1 - first_key // BLOCK_N)
    acc, row_max, row_sum = attend_window(
        0, local_blocks, descs, at, blocks, position, q, keys, values, barriers,
        (acc, row_max, row_sum), scale_log2, last_start, TOKENS, SCORES,
    )  # fmt: skip
    # All rows have selected the local blocks: so far both branches have the same result.
    kept_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)  # [BLOCK_M]
    kept.store(scale_rows(acc, 1.0 / kept_sum).to(dtype))
    kept_lse = row_max + gl.log2(kept_sum)
    # Loaded here, used after the window. Of slots that no row has, anything may be loaded.
    gate_ptr += b * gate_strides[0] + head * gate_strides[1]
    gate_ptr += row_offsets(token, head_in_group, gate_strides[1], gate_strides[2])
    gates = gl.tuple(())
    for c in gl.static_range(3):
        gate = gl.load(gate_ptr + c * gate_strides[3], mask=row_mask, other=0.0)
        gates += (gate.to(gl.float32),)
    bitmask_ptr += (b * kv_heads + h) * num_tokens
    bitmask = gl.load(bitmask_ptr + token, mask=token_mask, other=0)  # [BLOCK_M]
    first_row = head_in_chunk * chunk_tokens + first_position - chunk_start
    partial_lse_ptrs = partial_lse_ptr + (
        (first_row + token - first).to(gl.int64) * (NUM_SLOTS * GROUP) + head_in_group
    )
    slot = gl.expand_dims(gl.arange(0, PADDED_SLOTS, gl.SliceLayout(0, SLOTS)), 0)
    lse_ptrs = gl.expand_dims(gl.convert_layout(partial_lse_ptrs, gl.SliceLayout(1, SLOTS)), 1)
    partial_lse = gl.load(
        lse_ptrs + slot * GROUP, mask=slot < NUM_SLOTS, other=float("-inf")
    )  # [BLOCK_M, PADDED_SLOTS]
    acc, row_max, row_sum = attend_window(
        local_blocks, window_blocks, descs, at, blocks, position, q, keys, values, barriers,
        (acc, row_max, row_sum), scale_log2, last_start, TOKENS, SCORES,
    )  # fmt: skip

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), ROW)
    gl.store(sliding_lse_ptr + row, (row_max + gl.log2(row_sum)) * LN2, mask=row_mask)
    parts, fold = (part0, part1, part2, part3), (rows, first1, first2, first3, reach)
    of_tile = (b, first, head, num_tokens, query_heads)
    acc = scale_rows(acc, (1.0 if SAVE else gates[2]) / row_sum)
    # A ring of the buffers that are free from here on: all of them, or all but the queries'.
    ring, ring_barriers = buffers[FIRST:], barriers[3 + FIRST :]
    LAST: gl.constexpr = max(TOPK - len(ring), 0)  # slot whose buffer no later slot takes
    compressed, spare = ring[LAST % len(ring)], ring[(LAST + 1) % len(ring)]
    if has_union:
        if SAVE:
            write_tile(sliding_desc, at, first, q, acc)
            acc = gl.zeros([BLOCK_M, D], gl.float32, OUT)
        copy_token, copy_head, _mask, copy_mask = query_rows(
            first, num_tokens, GROUP, HEADS, EARLY, gl.SliceLayout(1, MEMORY)
        )
        copy_row = group + row_offsets(copy_token, copy_head, 1, query_heads)
        start_rows(selected_ptr, copy_row, copy_mask, spare, HEAD_DIM)
        start_compressed(
            parts, fold, of_tile, compressed, GROUP, HEADS, EARLY, STRIDE, HEAD_DIM, MEMORY
        )
    else:
        # Normaliser of the selected branch: kept result, initial block, partial outputs.
        if FIRST_BLOCKS:
            mbarrier.wait(barriers[0], window_blocks & 1)
            zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, SCORES)
            logits = qk_product(q, keys.permute((1, 0)), zero)  # [BLOCK_M, BLOCK_N]
        if SAVE:
            write_tile(sliding_desc, at, first, q, acc)
            acc = gl.zeros([BLOCK_M, D], gl.float32, OUT)
        num_topk = bitmask >> 24
        partials = (partial_desc, first_row, gl.max(num_topk, 0))
        for i in gl.static_range(2 - FIRST):
            fetch_partials(partials, i, ring_barriers[i], ring[i])
        if FIRST_BLOCKS:
            is_selected = row_mask & (INITIAL > 0) & (((bitmask >> LOCAL) & 1) != 0)
            logits = gl.where(gl.expand_dims(is_selected, 1), logits, float("-inf")) * scale_log2
        slots_of_row = gl.expand_dims(gl.convert_layout(num_topk, gl.SliceLayout(1, SLOTS)), 1)
        partial_lse = gl.where(slot < slots_of_row, partial_lse, float("-inf"))
        new_max = gl.convert_layout(gl.max(partial_lse, 1), ROW)  # [BLOCK_M]
        if FIRST_BLOCKS:
            new_max = gl.maximum(gl.maximum(kept_lse, gl.max(logits, 1)), new_max)
        else:
            new_max = gl.maximum(kept_lse, new_max)
        shift = gl.expand_dims(gl.convert_layout(new_max, gl.SliceLayout(1, SLOTS)), 1)
        row_sum = gl.convert_layout(gl.sum(gl.exp2(partial_lse - shift), 1), ROW)
        row_sum += gl.exp2(kept_lse - new_max)
        if FIRST_BLOCKS:
            row_sum += gl.sum(gl.exp2(logits - gl.expand_dims(new_max, 1)), 1)
        lse_log2 = new_max + gl.log2(row_sum)
        gl.store(selected_lse_ptr + row, lse_log2 * LN2, mask=row_mask)

        factor = gates[1]
        if SAVE:  # the branch is written without its gate
            factor = gl.full([BLOCK_M], 1.0, gl.float32, ROW)
        acc = add_rows(acc, kept, gl.exp2(kept_lse - lse_log2) * factor)
        fence_async_shared()
        fetch_partials(partials, 2 - FIRST, ring_barriers[2 - FIRST], ring[2 - FIRST])
        if FIRST_BLOCKS:
            p = gl.exp2(logits - gl.expand_dims(lse_log2, 1)) * gl.expand_dims(factor, 1)
            mbarrier.wait(barriers[1], window_blocks & 1)
            acc = add_values(p, values, acc)
        fetch_partials(partials, 3 - FIRST, ring_barriers[3 - FIRST], ring[3 - FIRST])
        lse_rows, branch = (partial_lse_ptrs, GROUP, num_topk), (lse_log2, factor)
        slot_lse = load_partial_lse(lse_rows, 0)  # [BLOCK_M]
        if (gl.min(num_topk, 0) == TOPK) & (TOPK > 0):
            ROUNDS: gl.constexpr = LAST // len(ring)
            for s in range(0, ROUNDS * len(ring), len(ring)):
                for i in gl.static_range(len(ring)):
                    acc, slot_lse = add_partials(
                        acc, slot_lse, partials, s + i, lse_rows, branch, ring, ring_barriers,
                        i, False,
                    )  # fmt: skip
            for s in gl.static_range(ROUNDS * len(ring), TOPK):
                acc, slot_lse = add_partials(
                    acc, slot_lse, partials, s, lse_rows, branch, ring, ring_barriers,
                    s % len(ring), False,
                )  # fmt: skip
                if s == LAST:
                    start_compressed(
                        parts, fold, of_tile, compressed, GROUP, HEADS, EARLY, STRIDE, HEAD_DIM,
                        MEMORY,
                    )  # fmt: skip
        else:
            for s in range(0, partials[2], len(ring)):
                for i in gl.static_range(len(ring)):
                    if s + i < partials[2]:
                        acc, slot_lse = add_partials(
                            acc, slot_lse, partials, s + i, lse_rows, branch, ring, ring_barriers,
                            i, True,
                        )  # fmt: skip
            start_compressed(
                parts, fold, of_tile, compressed, GROUP, HEADS, EARLY, STRIDE, HEAD_DIM, MEMORY
            )
    async_copy.wait_group(0)
    thread_barrier()
    if has_union:
        acc = add_rows(acc, spare, gates[1])
    elif SAVE:
        write_tile(selected_desc, at, first, spare, acc)
        acc = scale_rows(acc, gates[1])
    if SAVE:
        if compressed_desc is not None:
            write_tile(compressed_desc, at, first, compressed, None)
        acc = add_rows(acc, q, gates[2])
    acc = add_rows(acc, compressed, gates[0])
    free = ring[(LAST + 2) % len(ring)]
    if EARLY:
        if first < 0:
            write_early_tile(
                selected_ptr, group, of_tile, free, acc, GROUP, HEADS, HEAD_DIM, MEMORY
            )
        else:
            write_tile(out_desc, at, first, free, acc)
    else:
        write_tile(out_desc, at, first, free, acc)
    for i in gl.static_range(3 + BUFFERS):
        mbarrier.invalidate(barriers[i])
    tma.store_wait(0)


def unsupported_reason(
    plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor
) -> str | None:
    """Why `launch` does not take a call that `fwd_epilogue` supports; None if it does.

    A query that is not in (B, S, H, D) memory is copied there before.
    """
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"the Gluon epilogue takes float16 and bfloat16, got {query.dtype}"
    if tile_width(plan.head_dim) not in WIDTHS or plan.head_dim != plan.value_dim:
        return (
            f"the Gluon epilogue takes equal head dims of 33 to 128, got {plan.head_dim} and "
            f"{plan.value_dim}"
        )
    if plan.head_dim % 8:
        return f"the Gluon epilogue copies rows of multiples of 16 bytes, got {plan.head_dim}"
    if plan.block_size != BLOCK_N.value:
        return f"the Gluon epilogue takes blocks of {BLOCK_N.value}, got {plan.block_size}"
    if plan.combine_rows != BLOCK_M.value:
        return f"the Gluon epilogue takes tiles of {BLOCK_M.value} rows, got {plan.combine_rows}"
    if plan.num_initial > 1:
        return f"the Gluon epilogue takes one initial block, got {plan.num_initial}"
    is_copied = not query.transpose(1, 2).is_contiguous()
    if not all(has_tma_strides(x) for x in (key, value, *(() if is_copied else (query,)))):
        return "query, key or value has strides or an address that TMA does not take"
    return None


def descriptors(
    selection: Selection, out: Tensor, branches: tuple[Tensor, ...]
) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of keys, values, queries, the result, and the three branches.

    out: (B, S, Hq, D), contiguous, as are the compressed, the selected and the sliding branch,
    which are empty where they are not wanted: None.
    """
    plan = selection.plan
    of_queries = [query_desc(plan, x) for x in (selection.query.transpose(1, 2), out)]
    of_keys = [kv_descriptor(plan, x) for x in (selection.key, selection.value)]
    of_branches = [query_desc(plan, x) if x.dim() == 4 else None for x in branches]
    return (*of_keys, *of_queries, *of_branches)


def launch(
    descs: tuple[TensorDescriptor | None, ...],
    selected: Tensor,
    grid: tuple[int, int],
    selection: Selection,
    partials: Tensor,
    tensors: tuple[Tensor, ...],
    scalars: tuple[Any, ...],
    stride: int,
) -> None:
    """One query chunk, as `fwd_epilogue._launch`, but for the first two arguments.

    descs: of `descriptors`. selected: memory of the selected branch of tiles with a block union.
    """
    plan = selection.plan
    *inputs, _, selected_lse, sliding_lse = tensors
    fused_fwd_epilogue_sm90_kernel[grid](
        *descs,
        selected,
        partial_desc(plan, partials),
        *inputs,
        selected_lse,
        sliding_lse,
        *scalars,
        STRIDE=stride,
        GROUP=plan.group,
        HEAD_DIM=plan.head_dim,
        NUM_SLOTS=plan.num_slots,
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        num_warps=4,
        maxnreg=REGISTERS,
    )


def query_desc(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of (B, S, Hq, D) by query tiles with their group of heads."""
    rows = x.unflatten(2, (plan.kv_heads, plan.group))
    return _descriptor(rows, [1, plan.combine_tokens, 1, *_tile_of_token(plan)])


def partial_desc(plan: SelectedPlan, partials: Tensor) -> TensorDescriptor:
    """Descriptor of partial outputs by query tiles of one slot."""
    rows = partials.view(-1, plan.num_slots, plan.group, plan.value_dim)
    return _descriptor(rows, [plan.combine_tokens, 1, *_tile_of_token(plan)])


def _tile_of_token(plan: SelectedPlan) -> tuple[int, int]:
    """Heads and head dims of a token in a tile: those of the call, and what they are padded by."""
    return plan.combine_rows // plan.combine_tokens, tile_width(plan.value_dim)


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(x, block, layout)
