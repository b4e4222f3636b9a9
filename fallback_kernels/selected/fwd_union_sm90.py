"""The walk of a tile's union on Hopper, its copies in flight beside its products.

Keys and values of a block have one buffer each: the next block's keys are on their way while the
probabilities of this one are made and multiplied, its values during the next scores. Triton waits
for a copy where it is written, or keeps every buffer twice; hence Gluon, its lower level. Queries
stay in registers, and the tops of rows are those of the own block: no other is searched for a
higher score, and no sum scaled by one, unless a probability gets too high.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa_flex.fallback_kernels.common.softmax import LN2, base2_scale
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.prepare import Selection

REGISTERS = 168  # three programs a multiprocessor
LIMIT = gl.constexpr(2.0**64)  # of a row's sum, relative to its own block's highest probability


@gluon.jit
def fetch(tiles, at, block, buffer, arrival, BLOCK_SIZE: gl.constexpr):
    """Start the copy of a block of batch row and KV head `at` into a buffer that all have read."""
    mbarrier.expect(arrival, tiles.block_type.nbytes)
    tma.async_copy_global_to_shared(tiles, [at[0], at[1], block * BLOCK_SIZE, 0], arrival, buffer)


@gluon.jit
def scores_of(q, keys, zero):
    """Products of the queries and a block of keys, laid out as `zero`."""
    scores = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [scores])


@gluon.jit
def sums_by_lane(p):
    """Sums of each row over what a thread holds of it: (rows, 4), for the last sum to come."""
    ROWS: gl.constexpr = p.shape[0]
    COLUMNS: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([ROWS, COLUMNS // 8, 4, 2]), 3), 1)


@gluon.jit
def add_sums(total, factor, p):
    """Sums by lane, each row by its factor, and those of `p`."""
    row: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return total * gl.expand_dims(gl.convert_layout(factor, row), 1) + sums_by_lane(p)


@gluon.jit
def online_softmax(scores, seen, top, total, scale_log2):
    """Probabilities of one block, what earlier sums shrink by, and the new top and sums by lane.

    A row that has seen nothing yet has top -inf; subtracting it would give NaN.
    """
    new_top = gl.where(seen, gl.maximum(top, gl.max(scores, 1) * scale_log2), top)
    shift = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(scores * scale_log2 - gl.expand_dims(gl.where(seen, shift, float("inf")), 1))
    decay = gl.exp2(top - shift)
    return p, decay, new_top, add_sums(total, decay, p)


@gluon.jit
def times(out, factor):
    """`out`, each row by its factor, which may be laid out as the scores' rows."""
    row: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    return out * gl.expand_dims(gl.convert_layout(factor, row), 1)


@gluon.jit
def add_values(p, values, out):
    """`out` plus the product of probabilities and a block of values."""
    operand: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    out = warpgroup_mma(gl.convert_layout(p.to(values.dtype), operand), values, out, is_async=True)
    return warpgroup_mma_wait(0, [out])


@gluon.jit
def rows_of_tile(first_query, num_queries, GROUP: gl.constexpr, TOKENS: gl.constexpr, row):
    """Query of each row of a tile, its head within the group, and whether it is there."""
    query = first_query + row // GROUP
    row_ok = (row < TOKENS * GROUP) & (query >= 0) & (query < num_queries)
    return query, row % GROUP, row_ok


@gluon.jit
def pointers(base_ptr, line, row_ok, width: gl.constexpr, COLUMNS: gl.constexpr):
    """Of rows of a dense (rows, width) matrix, and which of the places are there."""
    layout: gl.constexpr = gl.SliceLayout(0, line.type.layout.parent)
    column = gl.arange(0, COLUMNS, layout)
    pointer = base_ptr + gl.expand_dims(line * width, 1) + gl.expand_dims(column, 0)
    return pointer, gl.expand_dims(row_ok, 1) & gl.expand_dims(column < width, 0)


@gluon.jit
def attend_union(
    size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, arrived, rows, own, scale_log2,
    RISING: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_COLUMNS: gl.constexpr, VALUE_COLUMNS: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Sums of values, tops of rows, sums of probabilities by lane; the own block is on its way.

    copies: of blocks that came into the buffers before. tiles, buffers, arrived: of keys and of
    values. at: batch row and KV head. rows: token within the tile of each row, whether it is
    there, and the last key of the own block that it sees. RISING: tops rise with the scores; else
    they stay those of the own block, which every row must see.
    """
    token, row_ok, last_key = rows
    ROWS: gl.constexpr = q.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_SIZE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE_COLUMNS, 16])
    keys = buffers[0].reshape([BLOCK_SIZE, HEAD_COLUMNS]).permute((1, 0))
    values = buffers[1].reshape([BLOCK_SIZE, VALUE_COLUMNS])
    zero = gl.zeros([ROWS, BLOCK_SIZE], gl.float32, SCORES)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = sums_by_lane(zero)
    out = gl.zeros([ROWS, VALUE_COLUMNS], gl.float32, OUT)

    # The own block is the only one where single keys are masked: up to the query, or none.
    position = own * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, SCORES))
    following = gl.load(union_ptr, mask=size > 0, other=0)
    mbarrier.wait(arrived[0], copies & 1)
    scores = scores_of(q, keys, zero)
    if size > 0:
        fetch(tiles[0], at, following, buffers[0], arrived[0], BLOCK_SIZE)
    seen = gl.expand_dims(position, 0) <= gl.expand_dims(last_key, 1)
    scores = gl.where(seen, scores, float("-inf"))
    p, decay, top, total = online_softmax(scores, last_key >= 0, top, total, scale_log2)
    mbarrier.wait(arrived[1], copies & 1)
    out = add_values(p, values, times(out, decay))
    if size > 0:
        fetch(tiles[1], at, following, buffers[1], arrived[1], BLOCK_SIZE)

    for i in range(size):
        phase = (copies + i + 1) & 1
        more = i + 1 < size
        following = gl.load(union_ptr + i + 1, mask=more, other=0)
        bits = gl.load(masks_ptr + i * WORDS) >> (token % 32)
        if WORDS == 2:
            upper = gl.load(masks_ptr + i * WORDS + 1) >> (token % 32)
            bits = gl.where(token < 32, bits, upper)
        mbarrier.wait(arrived[0], phase)
        scores = scores_of(q, keys, zero)
        if more:
            fetch(tiles[0], at, following, buffers[0], arrived[0], BLOCK_SIZE)
        chosen = row_ok & ((bits & 1) != 0)
        if RISING:
            p, decay, top, total = online_softmax(scores, chosen, top, total, scale_log2)
            out = times(out, decay)
        else:
            shift = gl.where(chosen, top, float("inf"))
            p = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
            total += sums_by_lane(p)
        mbarrier.wait(arrived[1], phase)
        out = add_values(p, values, out)
        if more:
            fetch(tiles[1], at, following, buffers[1], arrived[1], BLOCK_SIZE)
    return out, top, total


@gluon.jit(do_not_specialize=["base"])
def walk_kernel(
    key_tiles, value_tiles, query_ptr, summary_ptr, sizes_ptr, union_ptr, masks_ptr,
    out_ptr, lse_ptr, base, query_offset, num_queries, kv_heads, scale_log2,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_COLUMNS: gl.constexpr,
    VALUE_DIM: gl.constexpr, VALUE_COLUMNS: gl.constexpr,
    WIDE: gl.constexpr, TOKENS: gl.constexpr, ROWS: gl.constexpr,
    CAPACITY: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of the tiles that have a union, as `union_kernel` has them."""
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    size = gl.load(sizes_ptr + tile)
    if size < 0:
        return
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_SIZE, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])

    batch = gl.program_id(1) // kv_heads
    head = gl.program_id(1) % kv_heads
    first = base + gl.program_id(0) * TOKENS
    own = first // BLOCK_SIZE
    tiles, at = (key_tiles, value_tiles), (batch, head)
    buffers, arrived = gl.tuple(()), gl.tuple(())
    for i in gl.static_range(2):
        buffers += (gl.allocate_shared_memory(dtype, tiles[i].block_type.shape, tiles[i].layout),)
        arrived += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(arrived[i], count=1)
    fence_async_shared()
    for i in gl.static_range(2):
        fetch(tiles[i], at, own, buffers[i], arrived[i], BLOCK_SIZE)

    b, h = batch.to(gl.int64), head.to(gl.int64)
    group = (b * num_queries * kv_heads + h) * GROUP
    query_heads = kv_heads * GROUP
    summary_ptr += (b * kv_heads + h) * num_queries
    union_ptr += tile.to(gl.int64) * CAPACITY
    masks_ptr += tile.to(gl.int64) * CAPACITY * WORDS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, MEMORY))
    query, member, there = rows_of_tile(first - query_offset, num_queries, GROUP, TOKENS, row)
    line = query * query_heads + member
    if WIDE:
        line = line.to(gl.int64)
    pointer, mask = pointers(query_ptr + group * HEAD_DIM, line, there, HEAD_DIM, HEAD_COLUMNS)
    q = gl.load(pointer, mask=mask, other=0.0)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, SCORES, 2))

    row = gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
    token = row // GROUP
    query, member, row_ok = rows_of_tile(first - query_offset, num_queries, GROUP, TOKENS, row)
    summary = gl.load(summary_ptr + query, mask=row_ok, other=0)
    last_key = gl.where((summary & 1) != 0, first + token, -1)
    rows = (token, row_ok, last_key)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, VALUE_COLUMNS, 16])
    out = gl.zeros([ROWS, VALUE_COLUMNS], gl.float32, OUT)
    top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = sums_by_lane(gl.zeros([ROWS, BLOCK_SIZE], gl.float32, SCORES))
    copies = size * 0
    rising = size >= 0
    if dtype == gl.bfloat16:  # noqa: SIM102 -- half precision ends at 2**16
        if gl.min(gl.where(row_ok, last_key, 0), 0) >= 0:
            out, top, total = attend_union(
                size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, arrived, rows, own,
                scale_log2, False, BLOCK_SIZE, HEAD_COLUMNS, VALUE_COLUMNS, WORDS,
            )  # fmt: skip
            rising = gl.max(gl.sum(total, 1), 0) > LIMIT
            if rising:  # once more
                copies = size + 1
                for i in gl.static_range(2):
                    fetch(tiles[i], at, own, buffers[i], arrived[i], BLOCK_SIZE)
    if rising:
        out, top, total = attend_union(
            size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, arrived, rows, own,
            scale_log2, True, BLOCK_SIZE, HEAD_COLUMNS, VALUE_COLUMNS, WORDS,
        )  # fmt: skip
    for i in gl.static_range(2):
        mbarrier.invalidate(arrived[i])

    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, SCORES))
    empty = total == 0.0
    lse = gl.where(empty, float("-inf"), top + gl.log2(total)) * LN2
    gl.store(lse_ptr + group + query * query_heads + member, lse, mask=row_ok)
    rounded = times(out, gl.where(empty, 0.0, 1.0 / total)).to(dtype)
    pointer, mask = pointers(out_ptr + group * VALUE_DIM, line, there, VALUE_DIM, VALUE_COLUMNS)
    gl.store(pointer, gl.convert_layout(rounded, MEMORY), mask=mask)


def walk(selection: Selection, out: Tensor, lse: Tensor) -> None:
    """`attend_unions` where tiles are of 64 rows and 16 bits."""
    plan, lists, unions, query, key, value, scale = selection
    constants = plan.constants()
    del constants["NUM_SLOTS"], constants["PRECISION"]
    walk_kernel[(plan.span // plan.merge_tokens, plan.batch * plan.kv_heads)](
        tiles_of(plan, key),
        tiles_of(plan, value),
        query,
        lists.summary,
        *unions,
        out,
        lse,
        plan.base,
        plan.query_offset,
        plan.num_queries,
        plan.kv_heads,
        base2_scale(scale),
        **constants,
        TOKENS=plan.merge_tokens,
        ROWS=plan.merge_rows,
        CAPACITY=plan.union_capacity,
        WORDS=unions.masks.shape[2],
        num_warps=plan.num_warps,
        maxnreg=REGISTERS,
    )


def tiles_of(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of keys or values (B, Hkv, Sk, D) by blocks.

    What lies past the last key that a query sees is read as 0: it may hold anything.
    """
    shape = [1, 1, plan.block_size, tile_width(x.shape[3])]
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor.from_tensor(x[:, :, : plan.num_keys], shape, layout)
