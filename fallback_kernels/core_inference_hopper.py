"""The end of the core's forward without gradients on Hopper: three programs a multiprocessor.

What `core_inference` computes, in 64 KiB of shared memory and 168 registers a thread, where that
kernel has two programs of 255. The result of the blocks up to a query's own waits in shared memory
until the normaliser of the selected branch is known. Keys, values and partial results are copied
while something else is computed; the partial results into the buffers that the rest has left.
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
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa_flex.fallback_kernels import fold_parts, sliding_tiles
from nsa_flex.fallback_kernels.selected_plan import SelectedPlan, padded
from nsa_flex.fallback_kernels.selected_prepare import Selection
from nsa_flex.fallback_kernels.selected_union_tiles import by_copy_engine
from nsa_flex.fallback_kernels.selected_walk import (
    add_sums,
    add_values,
    scores_of,
    sums_by_lane,
    times,
)

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # 3.6, 3.7
part_place = gluon.jit(fold_parts.part_place.fn)
of_part = gluon.jit(fold_parts.of_part.fn)
row_places = gluon.jit(sliding_tiles.row_places.fn)

ROWS = gl.constexpr(64)  # (token, query head) of a tile
BLOCK = gl.constexpr(64)  # keys
WIDTH = gl.constexpr(128)  # of queries, keys and values
BUFFERS = gl.constexpr(4)  # tiles in shared memory: queries, keys, what is kept, and values
REGISTERS = 168  # three programs a multiprocessor


@gluon.jit
def block_of(step, own, in_window):
    """Block of a step: the window's from right to left, then the first."""
    return gl.where(step < in_window, own - step, 0)


@gluon.jit
def fetch(tiles, at, block, arrival, buffer, wanted):
    """Start the copy of a block of keys or values of batch row and KV head `at`, if `wanted`."""
    mbarrier.expect(arrival, tiles.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(
        tiles,
        [at[0], at[1], block * BLOCK, 0],
        arrival,
        buffer.reshape([1, 1, BLOCK, WIDTH]),
        wanted,
    )


@gluon.jit
def fetch_partials(partials, slot, arrived, buffers):
    """Start the copy of a tile's partial results of one slot, if they are wanted.

    partials: their descriptor, the tile's first row and how many slots are wanted.
    """
    tiles, first_row, slots = partials
    arrival, buffer = arrived.index(2 + slot % BUFFERS), buffers.index(slot % BUFFERS)
    mbarrier.expect(arrival, tiles.block_type.nbytes, pred=slot < slots)
    shape: gl.constexpr = tiles.block_type.shape
    tma.async_copy_global_to_shared(
        tiles, [first_row, slot, 0, 0], arrival, buffer.reshape(shape), slot < slots
    )


@gluon.jit
def take_partials(partials, slot, arrived, buffers, layout: gl.constexpr):
    """Partial results of a slot as float32; those of a later one take their place."""
    mbarrier.wait(arrived.index(2 + slot % BUFFERS), slot // BUFFERS & 1)
    part = buffers.index(slot % BUFFERS).load(layout).to(gl.float32)
    fetch_partials(partials, slot + BUFFERS, arrived, buffers)
    return part


@gluon.jit
def attend_window(
    begin, end, tiles, at, blocks, token, q, arrived, keys, values, sums, scale_log2,
    TOKENS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """`sums` with blocks of the window more: those of the steps from `begin` to before `end`.

    tiles: of keys and values. at: batch row and KV head. blocks: the own one, how many lie in the
    window, how many are wanted in all, first token of the tile, and the window. sums: of values,
    tops of rows, sums of probabilities by lane.
    """
    own, in_window, steps, first, window = blocks
    acc, top, total = sums
    zero = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
    for step in range(begin, end):
        phase = step & 1
        following = block_of(step + 1, own, in_window)
        more = step + 1 < steps
        mbarrier.wait(arrived.index(0), phase)
        scores = scores_of(q, keys.permute((1, 0)), zero)
        fetch(tiles[0], at, following, arrived.index(0), keys, more)
        start = (own - step) * BLOCK
        if (step == 0) | (start + window < first + TOKENS):
            key = gl.expand_dims(start + column, 0)
            query = gl.expand_dims(token, 1)
            scores = gl.where((key <= query) & (key > query - window), scores, float("-inf"))
        higher = gl.maximum(top, gl.max(scores, 1) * scale_log2)
        p = gl.exp2(scores * scale_log2 - gl.expand_dims(higher, 1))
        shrink = gl.exp2(top - higher)
        total = add_sums(total, shrink, p)
        top = higher
        mbarrier.wait(arrived.index(1), phase)
        acc = add_values(p, values, times(acc, shrink))
        fetch(tiles[1], at, following, arrived.index(1), values, more)
    return acc, top, total


@gluon.jit
def rows_of(first, num_tokens, GROUP: gl.constexpr, layout: gl.constexpr):
    """Token and member of the group of every row, and whether there is such a query."""
    row = gl.arange(0, ROWS, layout)
    token = first + row // GROUP
    return token, row % GROUP, token < num_tokens


@gluon.jit
def compressed_rows(
    x0, x1, x2, x3, batch, token, head, there, query_heads,
    rows, first1, first2, first3, reach, STRIDE: gl.constexpr,
):  # fmt: skip
    """`core_merge.load_compressed` in the layout of `token`'s parent."""
    part, residue, width, part_rows, row = part_place(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((batch * part_rows + row) * width + residue) * query_heads + head
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, token.type.layout.parent))
    pointer = gl.expand_dims(of_part(part, x0, x1, x2, x3) + line * WIDTH, 1)
    pointer = gl.multiple_of(pointer + gl.expand_dims(column, 0), (1, 16))
    return gl.load(pointer, mask=gl.expand_dims(there & (token >= reach), 1), other=0.0)


@gluon.jit(
    do_not_specialize=[
        "first_head", "window_start", "num_tokens", "window",
        "rows", "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def hopper_inference_kernel(
    key_tiles, value_tiles, partial_tiles,
    query_ptr, partial_lse_ptr, summary_ptr, union_sizes_ptr, x0, x1, x2, x3, gate_ptr,
    out_ptr, selected_lse_ptr, sliding_lse_ptr,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    first_head, window_start, window_tokens, tiles_per_row,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: gl.constexpr, GROUP: gl.constexpr, NUM_SLOTS: gl.constexpr,
    INITIAL: gl.constexpr, LOCAL: gl.constexpr, SLOT_COLUMNS: gl.constexpr,
):  # fmt: skip
    """`core_inference.inference_kernel`, with one initial block at most."""
    TOKENS: gl.constexpr = ROWS // GROUP
    LN2: gl.constexpr = 0.6931471805599453
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    SLOTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLOT_COLUMNS, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)
    OUT_LINE: gl.constexpr = gl.SliceLayout(1, OUT)

    within = gl.program_id(1)
    batch = (first_head + within) // kv_heads
    h = (first_head + within) % kv_heads
    at = (batch, h)
    tile = (first_head + within) * tiles_per_row + window_start // TOKENS + gl.program_id(0)
    has_union = gl.load(union_sizes_ptr + tile) >= 0
    first = window_start + gl.program_id(0) * TOKENS
    own = first // BLOCK
    in_window = own - gl.maximum(first - window + 1, 0) // BLOCK + 1
    steps = in_window
    if not has_union:
        steps += 1

    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    buffers = gl.allocate_shared_memory(dtype, [BUFFERS, ROWS, WIDTH], SHARED)
    q, keys, kept, values = buffers.index(0), buffers.index(1), buffers.index(2), buffers.index(3)
    arrived = gl.allocate_shared_memory(gl.int64, [2 + BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 + BUFFERS):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    thread_barrier()
    fetch(key_tiles, at, own, arrived.index(0), keys, True)
    fetch(value_tiles, at, own, arrived.index(1), values, True)

    b, head = batch.to(gl.int64), h.to(gl.int64) * GROUP
    query_heads = kv_heads * GROUP
    group = b * num_tokens * query_heads + head
    token, member, there = rows_of(first, num_tokens, GROUP, gl.SliceLayout(1, MEMORY))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, MEMORY))
    line = group + row_places(token, member, 1, query_heads)
    place = gl.expand_dims(line * WIDTH, 1) + gl.expand_dims(column, 0)
    q.store(gl.load(query_ptr + place, mask=gl.expand_dims(there, 1), other=0.0))
    fence_async_shared()
    thread_barrier()

    token, member, there = rows_of(first, num_tokens, GROUP, LINE)
    line = group + row_places(token, member, 1, query_heads)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    top = gl.full([ROWS], -3.0e38, gl.float32, LINE)
    total = sums_by_lane(gl.zeros([ROWS, BLOCK], gl.float32, SCORES))
    tiles, blocks = (key_tiles, value_tiles), (own, in_window, steps, first, window)
    chosen_blocks = gl.minimum(LOCAL, own + 1)
    acc, top, total = attend_window(
        0, chosen_blocks, tiles, at, blocks, token, q, arrived, keys, values, (acc, top, total),
        scale_log2, TOKENS, SCORES,
    )  # fmt: skip
    # All rows have chosen these blocks: so far both branches have the same result.
    kept_total = gl.convert_layout(gl.sum(total, 1), LINE)
    kept.store(times(acc, 1.0 / kept_total).to(dtype))
    kept_lse = top + gl.log2(kept_total)
    acc, top, total = attend_window(
        chosen_blocks, in_window, tiles, at, blocks, token, q, arrived, keys, values,
        (acc, top, total), scale_log2, TOKENS, SCORES,
    )  # fmt: skip

    total = gl.convert_layout(gl.sum(total, 1), LINE)
    gate_ptr += b * gate_stride_b + head * gate_stride_h
    gate_place = gate_ptr + row_places(token, member, gate_stride_h, gate_stride_s)
    gate = gl.load(gate_place + 2 * gate_stride_c, mask=there, other=0.0).to(gl.float32)
    selected_gate = gl.load(gate_place + gate_stride_c, mask=there, other=0.0).to(gl.float32)
    summary_ptr += (b * kv_heads + h) * num_tokens
    summary = gl.load(summary_ptr + token, mask=there, other=0)
    gl.store(sliding_lse_ptr + line, (top + gl.log2(total)) * LN2, mask=there)
    acc = times(acc, gate / total)

    if not has_union:
        free = summary >> 24
        first_row = within * window_tokens + first - window_start
        lse_place = partial_lse_ptr + (
            (first_row + token - first).to(gl.int64) * (NUM_SLOTS * GROUP) + member
        )
        # Normaliser of the selected branch: the kept result's, the first block, partial results.
        mbarrier.wait(arrived.index(0), in_window & 1)
        zero = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
        scores = scores_of(q, keys.permute((1, 0)), zero)
        # Memory takes partial results as soon as it is done with: that of queries and keys now.
        partials = (partial_tiles, first_row, gl.max(free, 0))
        fetch_partials(partials, 0, arrived, buffers)
        fetch_partials(partials, 1, arrived, buffers)
        chosen = there & (INITIAL > 0) & (((summary >> LOCAL) & 1) != 0)
        scores = gl.where(gl.expand_dims(chosen, 1), scores, float("-inf")) * scale_log2
        slot = gl.arange(0, SLOT_COLUMNS, gl.SliceLayout(0, SLOTS))
        slot_free = gl.convert_layout(free, gl.SliceLayout(1, SLOTS))
        lse_row = gl.convert_layout(lse_place, gl.SliceLayout(1, SLOTS))
        partial_lse = gl.load(
            gl.expand_dims(lse_row, 1) + gl.expand_dims(slot * GROUP, 0),
            mask=gl.expand_dims(slot, 0) < gl.expand_dims(slot_free, 1),
            other=float("-inf"),
        )
        best = gl.convert_layout(gl.max(partial_lse, 1), LINE)
        best = gl.maximum(gl.maximum(kept_lse, gl.max(scores, 1)), best)
        shift = gl.expand_dims(gl.convert_layout(best, gl.SliceLayout(1, SLOTS)), 1)
        total = gl.convert_layout(gl.sum(gl.exp2(partial_lse - shift), 1), LINE)
        total += gl.exp2(kept_lse - best)
        total += gl.sum(gl.exp2(scores - gl.expand_dims(best, 1)), 1)
        lse_log2 = best + gl.log2(total)
        gl.store(selected_lse_ptr + line, lse_log2 * LN2, mask=there)

        share = gl.exp2(kept_lse - lse_log2) * selected_gate
        acc += times(kept.load(OUT).to(gl.float32), share)
        fence_async_shared()
        fetch_partials(partials, 2, arrived, buffers)
        p = gl.exp2(scores - gl.expand_dims(lse_log2, 1)) * gl.expand_dims(selected_gate, 1)
        mbarrier.wait(arrived.index(1), in_window & 1)
        acc = add_values(p, values, acc)
        fetch_partials(partials, 3, arrived, buffers)
        # All queries have so many; some have more, where for the others there may be anything.
        common = gl.min(free, 0)
        weight = gl.load(lse_place, mask=free > 0, other=float("-inf"))
        for s in range(common):
            share = gl.exp2(weight - lse_log2) * selected_gate
            weight = gl.load(lse_place + (s + 1) * GROUP, mask=s + 1 < free, other=float("-inf"))
            acc += times(take_partials(partials, s, arrived, buffers, OUT), share)
        for s in range(common, partials[2]):
            share = gl.exp2(weight - lse_log2) * selected_gate
            known = gl.convert_layout(s < free, OUT_LINE)
            weight = gl.load(lse_place + (s + 1) * GROUP, mask=s + 1 < free, other=float("-inf"))
            part = take_partials(partials, s, arrived, buffers, OUT)
            acc += times(gl.where(gl.expand_dims(known, 1), part, 0.0), share)
    for i in gl.static_range(2 + BUFFERS):
        mbarrier.invalidate(arrived.index(i))

    token, member, there = rows_of(first, num_tokens, GROUP, gl.SliceLayout(1, MEMORY))
    gate_place = gate_ptr + row_places(token, member, gate_stride_h, gate_stride_s)
    gate = gl.load(gate_place, mask=there, other=0.0).to(gl.float32)
    branch = compressed_rows(
        x0, x1, x2, x3, b, token, head + member, there, query_heads,
        rows, first1, first2, first3, reach, STRIDE,
    )  # fmt: skip
    result = gl.convert_layout(acc, MEMORY) + branch.to(gl.float32) * gl.expand_dims(gate, 1)
    if has_union:
        gate = gl.load(gate_place + gate_stride_c, mask=there, other=0.0).to(gl.float32)
        branch = gl.load(out_ptr + place, mask=gl.expand_dims(there, 1), other=0.0)
        result += branch.to(gl.float32) * gl.expand_dims(gate, 1)
    gl.store(out_ptr + place, result.to(dtype), mask=gl.expand_dims(there, 1))


def takes(plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `launch` takes a call that `core_inference.serves`, from shapes and strides."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and plan.head_dim == plan.value_dim == WIDTH.value
        and plan.block_size == BLOCK.value
        and plan.merge_rows == ROWS.value
        and plan.num_initial <= 1
        and by_copy_engine(key)
        and by_copy_engine(value)
    )


def launch(
    tiles: tuple[TensorDescriptor, TensorDescriptor],
    grid: tuple[int, int],
    selection: Selection,
    partial: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    stride: int,
) -> None:
    """One window of queries, as `core_inference._launch`.

    `tiles`: of the keys and the values, `selected_walk.tiles_of`.
    """
    plan = selection.plan
    hopper_inference_kernel[grid](
        *tiles,
        partial_tiles(plan, partial),
        selection.query,
        *tensors,
        *numbers,
        STRIDE=stride,
        GROUP=plan.group,
        NUM_SLOTS=plan.num_slots,
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        SLOT_COLUMNS=padded(plan.num_slots),
        num_warps=4,
        maxnreg=REGISTERS,
    )


def partial_tiles(plan: SelectedPlan, partial: Tensor) -> TensorDescriptor:
    """Descriptor of partial results by tiles of one slot."""
    shape = (-1, plan.num_slots, plan.group, plan.value_dim)
    block = [plan.merge_tokens, 1, plan.group, plan.value_dim]
    dtype = gl.float16 if partial.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(partial.view(shape), block, layout)
