"""Partial attention of the top-k blocks on Hopper: queries and outputs bypass shared memory.

What `fwd_partial.selected_fwd_partial_kernel` computes. There a tile of gathered queries goes from
registers to shared memory, where the tensor cores read it, and its output through shared memory
again to be stored as whole rows. Here a thread loads and stores vectors of the rows that it has in
the MMA layout. Of such a row it has pairs of head dims that lie apart, and not vectors: so the
head dims of keys and values are permuted, once for a work tile, and a thread's pairs are the
vectors that it loads.

L2 requests are 128 bytes, both ways: one load of a thread brings what the next one finds in L1,
and stores are of rows that two groups of lanes have put together.
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
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.strides import has_tma_strides
from nsa_flex.fallback_kernels.selected import tiles as selected_tiles
from nsa_flex.fallback_kernels.selected.config import SelectedPlan

load_work_tile = gluon.jit(selected_tiles.load_work_tile.fn)
row_shift = gluon.jit(selected_tiles.row_shift.fn)
first_partial = gluon.jit(selected_tiles.first_partial.fn)
group_rows = gluon.jit(tiles.group_rows.fn)

DIM = gl.constexpr(128)  # head dim of queries, keys and values
BLOCK = gl.constexpr(64)  # keys
BLOCK_M = gl.constexpr(64)  # (query, head) of a tile
REGISTERS = 128  # four CTAs an SM

# Queries, two numbers in an element: a thread has rows i and i + 8, as in the MMA layout, and 32
# bytes of every 128.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
# Outputs: eight lanes have 128 bytes of a row, and of the next one.
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
def permuted_columns(x, A: gl.constexpr, B: gl.constexpr):
    """Columns (a, b) of A times B pairs as (b, a), along the whole row.

    Of the columns of an MMA tile a thread has one pair in four: it has (b, lane), where B of its
    pairs lie side by side (lane, b).
    """
    rows: gl.constexpr = x.shape[0]
    x = x.reshape([rows, DIM // (2 * A * B), A, B, 2]).permute((0, 1, 3, 2, 4))
    return x.reshape([rows, DIM])


@gluon.jit
def load_block(base_ptr, stride, block, num_keys, SIDE_BY_SIDE: gl.constexpr):
    """Keys or values [BLOCK, DIM] in shared memory, columns permuted; 0 past the last key."""
    WARPS: gl.constexpr = gl.num_warps()
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    key = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, MEMORY))
    column = gl.arange(0, DIM, gl.SliceLayout(0, MEMORY))
    pointer = gl.expand_dims(base_ptr + key.to(gl.int64) * stride, 1) + gl.expand_dims(column, 0)
    tile = gl.load(pointer, mask=gl.expand_dims(key < num_keys, 1), other=0.0)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, DIM], tile.dtype)
    tile = permuted_columns(tile, 4, SIDE_BY_SIDE)
    return gl.allocate_shared_memory(tile.dtype, [BLOCK, DIM], SHARED, tile)


@gluon.jit
def row_pointers(base_ptr, row, BLOCK_D: gl.constexpr, INT64_OFFSETS: gl.constexpr):
    """Pointers [BLOCK_M, BLOCK_D] to rows of a dense (rows, BLOCK_D) matrix."""
    if INT64_OFFSETS:
        row = row.to(gl.int64)
    column = gl.arange(0, BLOCK_D, gl.SliceLayout(0, row.type.layout.parent))
    return base_ptr + gl.expand_dims(row * BLOCK_D, 1) + gl.expand_dims(column, 0)


@gluon.jit
def load_queries(
    query_ptr, entry, head_in_group, query_heads,
    NUM_SLOTS: gl.constexpr, INT64_OFFSETS: gl.constexpr,
):  # fmt: skip
    """Query of each entry [BLOCK_M, DIM / 2], two numbers in an int32: what a loop carries in 16
    bits it repacks. They should stay in the cache, where other work tiles find them.
    """
    query_row = (entry // NUM_SLOTS) * query_heads + head_in_group
    pointer = row_pointers(
        query_ptr.to(gl.pointer_type(gl.int32)), query_row, DIM // 2, INT64_OFFSETS
    )
    return gl.load(pointer, eviction_policy="evict_last")


@gluon.jit
def unpacked(pairs, dtype: gl.constexpr):
    """The numbers of `load_queries`."""
    low = pairs.to(gl.int16).to(dtype, bitcast=True)
    high = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    rows: gl.constexpr = pairs.shape[0]
    return gl.join(low, high).reshape([rows, DIM])


@recordable
@gluon.jit(
    do_not_specialize=[
        "first_work_tile",
        "first_head",
        "first_csr_row",
        "chunk_shift",
        "num_queries",
        "num_keys",
        "num_blocks",
    ]
)
def selected_fwd_partial_sm90_kernel(
    query_ptr, key_ptr, value_ptr, partial_ptr, partial_lse_ptr, entries_ptr, work_tiles_ptr,
    offsets_ptr,
    key_strides, value_strides,
    first_work_tile, first_head, first_csr_row, chunk_shift, chunk_tokens,
    num_queries, num_keys, num_blocks, kv_heads, scale_log2,
    GROUP: gl.constexpr, NUM_SLOTS: gl.constexpr, INT64_OFFSETS: gl.constexpr,
):  # fmt: skip
    """`fwd_partial.selected_fwd_partial_kernel`."""
    start, stop, batch, head, head_in_chunk, block = load_work_tile(
        work_tiles_ptr, first_work_tile + gl.program_id(0), first_head, first_csr_row, kv_heads,
        num_blocks, True,
    )  # fmt: skip
    if start >= stop:
        return
    BLOCK_TOKENS: gl.constexpr = BLOCK_M // GROUP
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    QUERIES: gl.constexpr = gl.DotOperandLayout(0, LOGITS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    QUERY_ROWS: gl.constexpr = gl.SliceLayout(1, PAIRS)
    STORED: gl.constexpr = gl.SliceLayout(1, LINES)

    b, h = batch.to(gl.int64), head.to(gl.int64)
    query_heads = kv_heads * GROUP
    query_ptr = group_rows(query_ptr, b, h, num_queries, kv_heads, GROUP, DIM)
    # Partial row of an entry: (first + entry) * GROUP + query head within the group.
    chunk_shift = row_shift(offsets_ptr, batch * kv_heads + head, chunk_shift, BLOCK)
    first = first_partial(head_in_chunk, chunk_tokens, chunk_shift, NUM_SLOTS)
    row = gl.arange(0, BLOCK_M, QUERY_ROWS)
    token, head_in_group = row // GROUP, row % GROUP
    # Rows past the end repeat the last entry: no load needs a mask, no store sees them.
    last = stop - 1
    entry = gl.load(entries_ptr + gl.minimum(start + token, last))
    next_entry = gl.load(entries_ptr + gl.minimum(start + BLOCK_TOKENS + token, last))
    key_ptr += b * key_strides[0] + h * key_strides[1]
    value_ptr += b * value_strides[0] + h * value_strides[1]
    keys = load_block(key_ptr, key_strides[2], block, num_keys, QUERY_PAIRS).permute((1, 0))
    values = load_block(value_ptr, value_strides[2], block, num_keys, RESULT_PAIRS)  # [BLOCK, DIM]
    fence_async_shared()
    thread_barrier()
    q = load_queries(query_ptr, entry, head_in_group, query_heads, NUM_SLOTS, INT64_OFFSETS)
    zero = gl.zeros([BLOCK_M, BLOCK], gl.float32, LOGITS)
    none = gl.zeros([BLOCK_M, DIM], gl.float32, OUT)
    for tile in range(start, stop, BLOCK_TOKENS):
        operand = gl.convert_layout(
            permuted_columns(unpacked(q, dtype), 4, QUERY_PAIRS), QUERIES
        )  # [BLOCK_M, DIM]
        logits = warpgroup_mma(
            operand, keys, zero, use_acc=False, is_async=True
        )  # [BLOCK_M, BLOCK]
        logits = warpgroup_mma_wait(0, [logits])
        # The next tile is read while this one is computed.
        after_next = gl.load(entries_ptr + gl.minimum(tile + 2 * BLOCK_TOKENS + token, last))
        q = load_queries(  # [BLOCK_M, DIM / 2]
            query_ptr, next_entry, head_in_group, query_heads, NUM_SLOTS, INT64_OFFSETS
        )
        row_max = gl.max(logits, 1) * scale_log2  # [BLOCK_M]
        p = gl.exp2(logits * scale_log2 - gl.expand_dims(row_max, 1))
        row_sum = gl.sum(p, 1)  # [BLOCK_M]
        p *= gl.expand_dims(fast_reciprocal(row_sum), 1)
        p = gl.convert_layout(p.to(dtype), WEIGHTS)
        out = warpgroup_mma(p, values, none, use_acc=False, is_async=True)  # [BLOCK_M, DIM]
        offset = (first + entry) * GROUP + head_in_group
        row_mask = (token < BLOCK_TOKENS) & (tile + token < stop)
        lse = gl.convert_layout(row_max + fast_log2(row_sum), QUERY_ROWS)
        gl.store(partial_lse_ptr + offset, lse, mask=row_mask)
        out = warpgroup_mma_wait(0, [out])
        out = gl.convert_layout(permuted_columns(out.to(dtype), RESULT_PAIRS, 4), LINES)
        pointer = row_pointers(partial_ptr, gl.convert_layout(offset, STORED), DIM, INT64_OFFSETS)
        mask = gl.expand_dims(gl.convert_layout(row_mask, STORED), 1)
        gl.store(pointer, out, mask=mask, eviction_policy="evict_first")
        entry = next_entry
        next_entry = after_next


def unsupported_reason(plan: SelectedPlan, query: Tensor) -> str | None:
    """Why `launch` does not take a call, from shapes, dtypes and strides; None if it does."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"query is {query.dtype}; float16 or bfloat16 is needed"
    if not plan.head_dim == plan.value_dim == DIM.value:
        return f"head dims are {plan.head_dim} and {plan.value_dim}; {DIM.value} is needed"
    if plan.block_size != BLOCK.value:
        return f"block_size is {plan.block_size}; {BLOCK.value} is needed"
    if plan.tile_rows != BLOCK_M.value:
        return f"tiles have {plan.tile_rows} rows; {BLOCK_M.value} are needed"
    if not has_tma_strides(query):
        return "query's rows do not begin at multiples of 16 bytes"  # which the loads want
    return None


def launch(plan: SelectedPlan, num_ctas: int, arguments: tuple[Any, ...]) -> None:
    """`fwd_partial._launch`."""
    selected_fwd_partial_sm90_kernel[(num_ctas,)](
        *arguments,
        GROUP=plan.group,
        NUM_SLOTS=plan.num_slots,
        INT64_OFFSETS=plan.int64_offsets,
        num_warps=4,
        maxnreg=REGISTERS,
    )
