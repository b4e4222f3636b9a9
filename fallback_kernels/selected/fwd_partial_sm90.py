"""Partial attention of the free choices on Hopper: queries and results pass no shared memory.

What `selected_forward.partial_kernel` computes. There a tile of gathered queries goes from
registers to shared memory, where the matrix unit reads it, and its results through shared memory
again to be stored as whole rows. Here a thread loads and stores vectors of the rows that it has in
the matrix unit's layout. Of such a row it has pairs of head dims that lie apart, and not vectors:
so the head dims of keys and values change places, once for a whole list, and a thread's pairs are
the vectors that it loads.

The L2 cache is asked for 128 bytes at once, both ways: by one load of a thread for what the next
one finds in the L1, and by stores of rows that two groups of lanes have put together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa_flex.fallback_kernels.common import tiles
from nsa_flex.fallback_kernels.common.gluon import fast_log2, fast_reciprocal, thread_barrier
from nsa_flex.fallback_kernels.common.strides import has_tma_strides
from nsa_flex.fallback_kernels.selected import tiles as selected_tiles
from nsa_flex.fallback_kernels.selected.config import SelectedPlan

item_of = gluon.jit(selected_tiles.item_of.fn)
first_entry = gluon.jit(selected_tiles.first_entry.fn)
group_rows = gluon.jit(tiles.group_rows.fn)

WIDTH = gl.constexpr(128)  # of queries, keys and values
BLOCK = gl.constexpr(64)  # keys
ROWS = gl.constexpr(64)  # (query, head) of a tile
REGISTERS = 128  # four programs a multiprocessor

# Queries, two numbers in an element: a thread has rows i and i + 8, as the matrix unit has them,
# and 32 bytes of every 128.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# Results: eight lanes have 128 bytes of a row, and of the next one.
LINES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [1, 0], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
)
QUERY_PAIRS = gl.constexpr(8)  # that lie side by side in a thread
RESULT_PAIRS = gl.constexpr(4)


@gluon.jit
def turned(x, A: gl.constexpr, B: gl.constexpr):
    """Columns (a, b) of A times B pairs as (b, a); these again and again along a row.

    Of the matrix unit's columns a thread has one pair in four: it has (b, lane), where B of its
    pairs lie side by side (lane, b).
    """
    rows: gl.constexpr = x.shape[0]
    x = x.reshape([rows, WIDTH // (2 * A * B), A, B, 2]).permute((0, 1, 3, 2, 4))
    return x.reshape([rows, WIDTH])


@gluon.jit
def load_block(base_ptr, stride, block, num_keys, SIDE_BY_SIDE: gl.constexpr):
    """Keys or values of a block in shared memory, columns turned; 0 past the last key."""
    WARPS: gl.constexpr = gl.num_warps()
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, MEMORY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, MEMORY))
    pointer = gl.expand_dims(base_ptr + key.to(gl.int64) * stride, 1) + gl.expand_dims(column, 0)
    tile = gl.load(pointer, mask=gl.expand_dims(key < num_keys, 1), other=0.0)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, WIDTH], tile.dtype)
    tile = turned(tile, 4, SIDE_BY_SIDE)
    return gl.allocate_shared_memory(tile.dtype, [BLOCK, WIDTH], SHARED, tile)


@gluon.jit
def row_pointers(base_ptr, row, COLUMNS: gl.constexpr, WIDE: gl.constexpr):
    """Of rows of a dense (rows, COLUMNS) matrix."""
    if WIDE:
        row = row.to(gl.int64)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, row.type.layout.parent))
    return base_ptr + gl.expand_dims(row * COLUMNS, 1) + gl.expand_dims(column, 0)


@gluon.jit
def load_queries(
    query_ptr, entry, member, query_heads, NUM_SLOTS: gl.constexpr, WIDE: gl.constexpr
):  # fmt: skip
    """Query of each entry, two numbers in an int32: what a loop carries in 16 bits it repacks.

    They should stay in the cache, where other lists find them.
    """
    line = (entry // NUM_SLOTS) * query_heads + member
    pointer = row_pointers(query_ptr.to(gl.pointer_type(gl.int32)), line, WIDTH // 2, WIDE)
    return gl.load(pointer, eviction_policy="evict_last")


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr):
    """The numbers of `load_queries`."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    rows: gl.constexpr = pairs.shape[0]
    return gl.join(low, high).reshape([rows, WIDTH])


@gluon.jit(do_not_specialize=["first_item", "first_head", "first_list", "window_shift"])
def hopper_partial_kernel(
    query_ptr, key_ptr, value_ptr, partial_ptr, partial_lse_ptr, entries_ptr, items_ptr,
    key_stride_b, key_stride_h, key_stride_s, value_stride_b, value_stride_h, value_stride_s,
    first_item, first_head, first_list, window_shift, window_tokens,
    num_queries, num_keys, num_blocks, kv_heads, scale_log2,
    GROUP: gl.constexpr, NUM_SLOTS: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """`selected_forward.partial_kernel`."""
    start, stop, batch, head, within, block = item_of(
        items_ptr, first_item + gl.program_id(0), first_head, first_list, kv_heads, num_blocks,
        True,
    )  # fmt: skip
    if start >= stop:
        return
    TOKENS: gl.constexpr = ROWS // GROUP
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, PAIRS)
    STORED: gl.constexpr = gl.SliceLayout(1, LINES)

    b, h = batch.to(gl.int64), head.to(gl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, WIDTH)
    # Partial row of an entry: (first + entry) * GROUP + query head within the group.
    first = first_entry(within, window_tokens, window_shift, NUM_SLOTS)
    row = gl.arange(0, ROWS, LINE)
    token, member = row // GROUP, row % GROUP
    # Rows past the end repeat the last entry: no load needs a mask, no store sees them.
    last = stop - 1
    entry = gl.load(entries_ptr + gl.minimum(start + token, last))
    ahead = gl.load(entries_ptr + gl.minimum(start + TOKENS + token, last))
    key_ptr += b * key_stride_b + h * key_stride_h
    value_ptr += b * value_stride_b + h * value_stride_h
    keys = load_block(key_ptr, key_stride_s, block, num_keys, QUERY_PAIRS).permute((1, 0))
    values = load_block(value_ptr, value_stride_s, block, num_keys, RESULT_PAIRS)
    fence_async_shared()
    thread_barrier()
    q = load_queries(query_ptr, entry, member, query_heads, NUM_SLOTS, WIDE)
    zero = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    none = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    for tile in range(start, stop, TOKENS):
        operand = gl.convert_layout(turned(unpacked(q, dtype), 4, QUERY_PAIRS), QUERIES)
        scores = warpgroup_mma(operand, keys, zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, [scores])
        # The next tile is read while this one is computed.
        further = gl.load(entries_ptr + gl.minimum(tile + 2 * TOKENS + token, last))
        q = load_queries(query_ptr, ahead, member, query_heads, NUM_SLOTS, WIDE)
        top = gl.max(scores, 1) * scale_log2
        p = gl.exp2(scores * scale_log2 - gl.expand_dims(top, 1))
        total = gl.sum(p, 1)
        p *= gl.expand_dims(fast_reciprocal(total), 1)
        p = gl.convert_layout(p.to(dtype), WEIGHTS)
        out = warpgroup_mma(p, values, none, use_acc=False, is_async=True)
        place = (first + entry) * GROUP + member
        row_ok = (token < TOKENS) & (tile + token < stop)
        lse = gl.convert_layout(top + fast_log2(total), LINE)
        gl.store(partial_lse_ptr + place, lse, mask=row_ok)
        out = warpgroup_mma_wait(0, [out])
        out = gl.convert_layout(turned(out.to(dtype), RESULT_PAIRS, 4), LINES)
        pointer = row_pointers(partial_ptr, gl.convert_layout(place, STORED), WIDTH, WIDE)
        there = gl.expand_dims(gl.convert_layout(row_ok, STORED), 1)
        gl.store(pointer, out, mask=there, eviction_policy="evict_first")
        entry = ahead
        ahead = further


def unsupported_reason(plan: SelectedPlan, query: Tensor) -> str | None:
    """Why `launch` does not take a call, from shapes, dtypes and strides; None if it does."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}; float16 or bfloat16 is needed"
    if not plan.head_dim == plan.value_dim == WIDTH.value:
        return f"head dims are {plan.head_dim} and {plan.value_dim}; {WIDTH.value} is needed"
    if plan.block_size != BLOCK.value:
        return f"block_size is {plan.block_size}; {BLOCK.value} is needed"
    if plan.tile_rows != ROWS.value:
        return f"tiles have {plan.tile_rows} rows; {ROWS.value} are needed"
    if not has_tma_strides(query):
        return "query's rows do not begin at multiples of 16 bytes"  # which the loads want
    return None


def launch(plan: SelectedPlan, programs: int, arguments: tuple[Any, ...]) -> None:
    """`selected_forward._launch`."""
    hopper_partial_kernel[(programs,)](
        *arguments,
        GROUP=plan.group,
        NUM_SLOTS=plan.num_slots,
        WIDE=plan.wide,
        num_warps=4,
        maxnreg=REGISTERS,
    )
