"""The end of the core's forward on Hopper: three programs a multiprocessor.

What `core_end` computes, in 64 KiB of shared memory and 168 registers a thread, where that
kernel has two programs of 255. The result of the blocks up to a query's own waits in shared memory
until the normaliser of the selected branch is known. Everything is copied while something else is
computed: keys and values, then partial results and the compressed branch's rows into the buffers
that the rest has left, and out of them what is written. For a backward the branches are written by
themselves as well.
"""

from __future__ import annotations

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

from nsa_flex.fallback_kernels.common.gluon import thread_barrier, to_float32
from nsa_flex.fallback_kernels.common.strides import has_tma_strides
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.compressed import fold as fold_parts
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.fwd_union_sm90 import (
    add_sums,
    add_values,
    scores_of,
    sums_by_lane,
    tiles_of,
    times,
)
from nsa_flex.fallback_kernels.selected.prepare import Selection
from nsa_flex.fallback_kernels.sliding import tiles as sliding_tiles

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
def fetch_partials(partials, slot, arrival, buffer):
    """Start the copy of a tile's partial results of one slot, if they are wanted.

    partials: their descriptor, the tile's first row and how many slots are wanted.
    """
    tiles, first_row, slots = partials
    mbarrier.expect(arrival, tiles.block_type.nbytes, pred=slot < slots)
    shape: gl.constexpr = tiles.block_type.shape
    tma.async_copy_global_to_shared(
        tiles, [first_row, slot, 0, 0], arrival, buffer.reshape(shape), slot < slots
    )


@gluon.jit
def load_weights(rows, slot):
    """Log-sum-exps of the partial results of a slot; -inf where there are none.

    rows: where those of slot 0 are, the distance of the next slot's, and how many a row has.
    """
    lse_place, step, free = rows
    return gl.load(lse_place + slot * step, mask=slot < free, other=float("-inf"))


@gluon.jit
def add_partials(
    acc, weights, partials, slot, rows, branch, buffers, arrived,
    PLACE: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """`acc` and the weighted partial results of a slot, in buffer PLACE; the next slot's weights.

    partials: as `fetch_partials` has them. rows: as `load_weights` has them. branch: log-sum-exps
    of its rows, and factors. SOME: not all rows have a result; in place of those of the others
    there may be anything.
    """
    share = gl.exp2(weights - branch[0]) * branch[1]
    weights = load_weights(rows, slot + 1)
    mbarrier.wait(arrived[PLACE], slot // len(buffers) & 1)
    part = to_float32(buffers[PLACE].load(acc.type.layout))
    fetch_partials(partials, slot + len(buffers), arrived[PLACE], buffers[PLACE])
    if SOME:
        known = gl.convert_layout(slot < rows[2], gl.SliceLayout(1, acc.type.layout))
        part = gl.where(gl.expand_dims(known, 1), part, 0.0)
    return acc + times(part, share), weights


@gluon.jit
def write_tile(tiles, at, first, buffer, tile):
    """Start the copy of a tile of queries' rows out of a buffer, which gets `tile` if it is given.

    at: batch row and KV head. first: the tile's first token.
    """
    if tile is not None:
        buffer.store(tile.to(buffer.dtype))
    fence_async_shared()
    thread_barrier()
    shape: gl.constexpr = tiles.block_type.shape
    tma.async_copy_shared_to_global(tiles, [at[0], first, at[1], 0, 0], buffer.reshape(shape))


@gluon.jit
def attend_window(
    begin, end, tiles, at, blocks, token, q, keys, values, arrived, sums, scale_log2,
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
        mbarrier.wait(arrived[0], phase)
        scores = scores_of(q, keys.permute((1, 0)), zero)
        fetch(tiles[0], at, following, arrived[0], keys, more)
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
        mbarrier.wait(arrived[1], phase)
        acc = add_values(p, values, times(acc, shrink))
        fetch(tiles[1], at, following, arrived[1], values, more)
    return acc, top, total


@gluon.jit
def rows_of(first, num_tokens, GROUP: gl.constexpr, layout: gl.constexpr):
    """Token and member of the group of every row, and whether there is such a query."""
    row = gl.arange(0, ROWS, layout)
    token = first + row // GROUP
    return token, row % GROUP, token < num_tokens


@gluon.jit
def start_rows(pointer, line, there, buffer):
    """Start the copy of rows of WIDTH numbers, 0 for those that are not there, to a buffer."""
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, line.type.layout.parent))
    pointer = gl.expand_dims(pointer + line * WIDTH, 1) + gl.expand_dims(column, 0)
    # The choice of a pointer hides that rows start at multiples of 16 bytes.
    pointer = gl.multiple_of(pointer, (1, 16))
    async_copy.async_copy_global_to_shared(buffer, pointer, gl.expand_dims(there, 1))
    async_copy.commit_group()


@gluon.jit
def start_compressed(
    x, fold, tile, buffer, GROUP: gl.constexpr, STRIDE: gl.constexpr, MEMORY: gl.constexpr
):
    """Start the copy of a tile's rows of the compressed branch; 0 where it sees no block.

    x: the parts of the fold. fold: its rows, where parts begin, and its reach. tile: batch row,
    first token and first query head, and how many tokens and query heads there are.
    """
    batch, first, head, num_tokens, query_heads = tile
    token, member, there = rows_of(first, num_tokens, GROUP, gl.SliceLayout(1, MEMORY))
    rows, first1, first2, first3, reach = fold
    part, residue, width, part_rows, row = part_place(
        token, rows, first1, first2, first3, reach, STRIDE
    )
    line = ((batch * part_rows + row) * width + residue) * query_heads + head + member
    pointer = of_part(part, x[0], x[1], x[2], x[3])
    start_rows(pointer, line, there & (token >= reach), buffer)


@gluon.jit
def add_rows(acc, buffer, factor):
    """`acc` and the rows in a buffer, each by its factor."""
    return acc + times(to_float32(buffer.load(acc.type.layout)), factor)


@gluon.jit(
    do_not_specialize=[
        "first_head", "window_start", "num_tokens", "window",
        "rows", "first1", "first2", "first3", "reach",
    ]
)  # fmt: skip
def hopper_end_kernel(
    key_tiles, value_tiles, query_tiles, out_tiles,
    compressed_tiles, selected_tiles, sliding_tiles, selected_ptr,
    partial_tiles, partial_lse_ptr, summary_ptr, union_sizes_ptr, x0, x1, x2, x3, gate_ptr,
    selected_lse_ptr, sliding_lse_ptr,
    gate_stride_b, gate_stride_h, gate_stride_s, gate_stride_c,
    first_head, window_start, window_tokens, tiles_per_row,
    num_tokens, window, kv_heads, scale_log2, rows, first1, first2, first3, reach,
    STRIDE: gl.constexpr, GROUP: gl.constexpr, NUM_SLOTS: gl.constexpr,
    INITIAL: gl.constexpr, LOCAL: gl.constexpr, SLOT_COLUMNS: gl.constexpr,
):  # fmt: skip
    """`core_end.end_kernel`, with one initial block at most.

    With tiles of the branches each is written by itself as well, the sliding one through the
    queries' shared memory, where the sum finds it again. Of tiles that have a union the selected
    branch is read from `selected_ptr`.
    """
    SAVE: gl.constexpr = sliding_tiles is not None
    FIRST: gl.constexpr = 1 if SAVE else 0
    FREE: gl.constexpr = NUM_SLOTS - INITIAL - LOCAL
    TOKENS: gl.constexpr = ROWS // GROUP
    LN2: gl.constexpr = 0.6931471805599453
    WARPS: gl.constexpr = gl.num_warps()
    dtype: gl.constexpr = query_tiles.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])
    SLOTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, SLOT_COLUMNS, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    LINE: gl.constexpr = gl.SliceLayout(1, SCORES)

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

    # Allocations of their own: what becomes of one makes nobody wait for another.
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    buffers, arrived = gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(BUFFERS):
        buffers += (gl.allocate_shared_memory(dtype, [ROWS, WIDTH], SHARED),)
    # Of keys, values, queries, and partial results.
    for i in gl.static_range(3 + BUFFERS):
        arrived += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(arrived[i], count=1)
    fence_async_shared()
    thread_barrier()
    q, keys, kept, values = buffers[0], buffers[1], buffers[2], buffers[3]
    mbarrier.expect(arrived[2], query_tiles.block_type.nbytes)
    QUERIES: gl.constexpr = query_tiles.block_type.shape
    tma.async_copy_global_to_shared(
        query_tiles, [batch, first, h, 0, 0], arrived[2], q.reshape(QUERIES)
    )
    fetch(key_tiles, at, own, arrived[0], keys, True)
    fetch(value_tiles, at, own, arrived[1], values, True)

    b, head = batch.to(gl.int64), h.to(gl.int64) * GROUP
    query_heads = kv_heads * GROUP
    group = b * num_tokens * query_heads + head
    token, member, there = rows_of(first, num_tokens, GROUP, LINE)
    line = group + row_places(token, member, 1, query_heads)
    acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
    top = gl.full([ROWS], -3.0e38, gl.float32, LINE)
    total = sums_by_lane(gl.zeros([ROWS, BLOCK], gl.float32, SCORES))
    tiles, blocks = (key_tiles, value_tiles), (own, in_window, steps, first, window)
    mbarrier.wait(arrived[2], 0)
    chosen_blocks = gl.minimum(LOCAL, own + 1)
    acc, top, total = attend_window(
        0, chosen_blocks, tiles, at, blocks, token, q, keys, values, arrived, (acc, top, total),
        scale_log2, TOKENS, SCORES,
    )  # fmt: skip
    # All rows have chosen these blocks: so far both branches have the same result.
    kept_total = gl.convert_layout(gl.sum(total, 1), LINE)
    kept.store(times(acc, 1.0 / kept_total).to(dtype))
    kept_lse = top + gl.log2(kept_total)
    # Wanted behind the window; what lies in place of slots that no row has may be anything.
    gate_ptr += b * gate_stride_b + head * gate_stride_h
    gate_ptr += row_places(token, member, gate_stride_h, gate_stride_s)
    gates = gl.tuple(())
    for c in gl.static_range(3):
        gates += (gl.load(gate_ptr + c * gate_stride_c, mask=there, other=0.0).to(gl.float32),)
    summary_ptr += (b * kv_heads + h) * num_tokens
    summary = gl.load(summary_ptr + token, mask=there, other=0)
    first_row = within * window_tokens + first - window_start
    lse_place = partial_lse_ptr + (
        (first_row + token - first).to(gl.int64) * (NUM_SLOTS * GROUP) + member
    )
    slot = gl.expand_dims(gl.arange(0, SLOT_COLUMNS, gl.SliceLayout(0, SLOTS)), 0)
    partial_lse = gl.load(
        gl.expand_dims(gl.convert_layout(lse_place, gl.SliceLayout(1, SLOTS)), 1) + slot * GROUP,
        mask=slot < NUM_SLOTS,
        other=float("-inf"),
    )
    acc, top, total = attend_window(
        chosen_blocks, in_window, tiles, at, blocks, token, q, keys, values, arrived,
        (acc, top, total), scale_log2, TOKENS, SCORES,
    )  # fmt: skip

    total = gl.convert_layout(gl.sum(total, 1), LINE)
    gl.store(sliding_lse_ptr + line, (top + gl.log2(total)) * LN2, mask=there)
    x, fold = (x0, x1, x2, x3), (rows, first1, first2, first3, reach)
    place = (b, first, head, num_tokens, query_heads)
    acc = times(acc, (1.0 if SAVE else gates[2]) / total)
    # Memory takes partial results as soon as it is done with: all of it, or but the queries'.
    ring, ready = buffers[FIRST:], arrived[3 + FIRST :]
    LAST: gl.constexpr = max(FREE - len(ring), 0)  # slot in whose place no other follows
    compressed, spare = ring[LAST % len(ring)], ring[(LAST + 1) % len(ring)]
    if has_union:
        if SAVE:
            write_tile(sliding_tiles, at, first, q, acc)
            acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
        row_token, row_member, row_there = rows_of(
            first, num_tokens, GROUP, gl.SliceLayout(1, MEMORY)
        )
        row_line = group + row_places(row_token, row_member, 1, query_heads)
        start_rows(selected_ptr, row_line, row_there, spare)
        start_compressed(x, fold, place, compressed, GROUP, STRIDE, MEMORY)
    else:
        # Normaliser of the selected branch: the kept result's, the first block, partial results.
        mbarrier.wait(arrived[0], in_window & 1)
        zero = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
        scores = scores_of(q, keys.permute((1, 0)), zero)
        if SAVE:
            write_tile(sliding_tiles, at, first, q, acc)
            acc = gl.zeros([ROWS, WIDTH], gl.float32, OUT)
        free = summary >> 24
        partials = (partial_tiles, first_row, gl.max(free, 0))
        for i in gl.static_range(2 - FIRST):
            fetch_partials(partials, i, ready[i], ring[i])
        chosen = there & (INITIAL > 0) & (((summary >> LOCAL) & 1) != 0)
        scores = gl.where(gl.expand_dims(chosen, 1), scores, float("-inf")) * scale_log2
        slot_free = gl.expand_dims(gl.convert_layout(free, gl.SliceLayout(1, SLOTS)), 1)
        partial_lse = gl.where(slot < slot_free, partial_lse, float("-inf"))
        best = gl.convert_layout(gl.max(partial_lse, 1), LINE)
        best = gl.maximum(gl.maximum(kept_lse, gl.max(scores, 1)), best)
        shift = gl.expand_dims(gl.convert_layout(best, gl.SliceLayout(1, SLOTS)), 1)
        total = gl.convert_layout(gl.sum(gl.exp2(partial_lse - shift), 1), LINE)
        total += gl.exp2(kept_lse - best)
        total += gl.sum(gl.exp2(scores - gl.expand_dims(best, 1)), 1)
        lse_log2 = best + gl.log2(total)
        gl.store(selected_lse_ptr + line, lse_log2 * LN2, mask=there)

        factor = gates[1]
        if SAVE:  # the branch is written without its gate
            factor = gl.full([ROWS], 1.0, gl.float32, LINE)
        acc = add_rows(acc, kept, gl.exp2(kept_lse - lse_log2) * factor)
        fence_async_shared()
        fetch_partials(partials, 2 - FIRST, ready[2 - FIRST], ring[2 - FIRST])
        p = gl.exp2(scores - gl.expand_dims(lse_log2, 1)) * gl.expand_dims(factor, 1)
        mbarrier.wait(arrived[1], in_window & 1)
        acc = add_values(p, values, acc)
        fetch_partials(partials, 3 - FIRST, ready[3 - FIRST], ring[3 - FIRST])
        rows_lse, branch = (lse_place, GROUP, free), (lse_log2, factor)
        weights = load_weights(rows_lse, 0)
        if (gl.min(free, 0) == FREE) & (FREE > 0):
            ROUNDS: gl.constexpr = LAST // len(ring)
            for s in range(0, ROUNDS * len(ring), len(ring)):
                for i in gl.static_range(len(ring)):
                    acc, weights = add_partials(
                        acc, weights, partials, s + i, rows_lse, branch, ring, ready, i, False
                    )
            for s in gl.static_range(ROUNDS * len(ring), FREE):
                acc, weights = add_partials(
                    acc, weights, partials, s, rows_lse, branch, ring, ready, s % len(ring), False
                )
                if s == LAST:
                    start_compressed(x, fold, place, compressed, GROUP, STRIDE, MEMORY)
        else:
            for s in range(0, partials[2], len(ring)):
                for i in gl.static_range(len(ring)):
                    if s + i < partials[2]:
                        acc, weights = add_partials(
                            acc, weights, partials, s + i, rows_lse, branch, ring, ready, i, True
                        )
            start_compressed(x, fold, place, compressed, GROUP, STRIDE, MEMORY)
    async_copy.wait_group(0)
    thread_barrier()
    if has_union:
        acc = add_rows(acc, spare, gates[1])
    elif SAVE:
        write_tile(selected_tiles, at, first, spare, acc)
        acc = times(acc, gates[1])
    if SAVE:
        write_tile(compressed_tiles, at, first, compressed, None)
        acc = add_rows(acc, q, gates[2])
    acc = add_rows(acc, compressed, gates[0])
    write_tile(out_tiles, at, first, ring[(LAST + 2) % len(ring)], acc)
    for i in gl.static_range(3 + BUFFERS):
        mbarrier.invalidate(arrived[i])
    tma.store_wait(0)


def takes(plan: SelectedPlan, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `launch` takes a call that `core_end.serves`, from shapes and strides."""
    return (
        query.dtype in (torch.float16, torch.bfloat16)
        and plan.head_dim == plan.value_dim == WIDTH.value
        and plan.block_size == BLOCK.value
        and plan.merge_rows == ROWS.value
        and plan.num_initial <= 1
        and has_tma_strides(query)
        and has_tma_strides(key)
        and has_tma_strides(value)
    )


def tiles_of_call(
    selection: Selection, out: Tensor, branches: tuple[Tensor, ...]
) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of keys, values, queries, the result, and the branches, if they are wanted.

    out: (B, S, Hq, D), contiguous, as are the compressed, the selected and the sliding branch.
    """
    plan = selection.plan
    of_queries = [query_tiles(plan, x) for x in (selection.query.transpose(1, 2), out, *branches)]
    of_keys = [tiles_of(plan, x) for x in (selection.key, selection.value)]
    return (*of_keys, *of_queries, *([] if branches else [None] * 3))


def launch(
    tiles: tuple[TensorDescriptor | None, ...],
    selected: Tensor,
    grid: tuple[int, int],
    selection: Selection,
    partial: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    stride: int,
) -> None:
    """One window of queries, as `core_end._launch`, but for the first two arguments.

    `tiles`: of `tiles_of_call`. `selected`: where the selected branch of tiles with a union is.
    """
    plan = selection.plan
    *inputs, _, selected_lse, sliding_lse = tensors
    hopper_end_kernel[grid](
        *tiles,
        selected,
        partial_tiles(plan, partial),
        *inputs,
        selected_lse,
        sliding_lse,
        *numbers,
        STRIDE=stride,
        GROUP=plan.group,
        NUM_SLOTS=plan.num_slots,
        INITIAL=plan.num_initial,
        LOCAL=plan.num_local,
        SLOT_COLUMNS=tile_width(plan.num_slots),
        num_warps=4,
        maxnreg=REGISTERS,
    )


def query_tiles(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of (B, S, Hq, D) by tiles of queries and their group of heads."""
    rows = x.unflatten(2, (plan.kv_heads, plan.group))
    return _descriptor(rows, [1, plan.merge_tokens, 1, plan.group, plan.value_dim])


def partial_tiles(plan: SelectedPlan, partial: Tensor) -> TensorDescriptor:
    """Descriptor of partial results by tiles of one slot."""
    rows = partial.view(-1, plan.num_slots, plan.group, plan.value_dim)
    return _descriptor(rows, [plan.merge_tokens, 1, plan.group, plan.value_dim])


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor.from_tensor(x, block, layout)
