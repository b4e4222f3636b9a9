"""The union forward on Hopper: TMA copies overlap with the MMAs.

Keys and values of a block have one shared buffer each: the next block's keys are copied during the
softmax and the PV product of this one, its values during the next QK product. Triton waits for a
copy where it is written, or keeps every buffer twice; hence Gluon, its lower level. Queries stay
in registers. Rescaling is lazy: row_max is that of the own block and sums are never rescaled,
unless a probability gets too high; then the tile is computed once more, online.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa_flex.fallback_kernels.common.gluon import thread_barrier, tma_load
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LN2, base2_scale
from nsa_flex.fallback_kernels.common.tiles import tile_width, width_of
from nsa_flex.fallback_kernels.selected import tiles as selected_tiles
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.prepare import Selection

row_offset = gluon.jit(selected_tiles.row_offset.fn)

LIMIT = gl.constexpr(2.0**64)  # of a row's sum, relative to its own block's highest probability


@gluon.jit
def fetch(tiles, at, block, buffer, barrier, BLOCK_SIZE: gl.constexpr):
    """Start the TMA copy of a block of (batch, KV head) `at` into a buffer that all have read."""
    mbarrier.expect(barrier, tiles.block_type.nbytes)
    tma_load(tiles, [at[0], at[1], block * BLOCK_SIZE, 0], barrier, buffer)


@gluon.jit
def qk_product(q, keys, zero):
    """q k^T [BLOCK_M, BLOCK_SIZE] of a block of keys, laid out as `zero`."""
    logits = warpgroup_mma(q, keys, zero, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, [logits])


@gluon.jit
def sums_by_lane(p):
    """Sums of each row over what a thread holds of it [BLOCK_M, 4], for the last sum to come."""
    BLOCK_M: gl.constexpr = p.shape[0]
    BLOCK_N: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([BLOCK_M, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def add_sums(row_sum, factor, p):
    """Sums by lane, each row by its factor, and those of `p`."""
    row: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
    return row_sum * gl.expand_dims(gl.convert_layout(factor, row), 1) + sums_by_lane(p)


@gluon.jit
def online_softmax(logits, seen, row_max, row_sum, scale_log2):
    """p of one block, alpha that rescales earlier sums, and the new row_max and sums by lane.

    `online_softmax_update` in Gluon: here the MMA is issued apart, and sums stay by lane. A row
    that has seen nothing yet has row_max -inf; subtracting it would give NaN.
    """
    new_max = gl.where(seen, gl.maximum(row_max, gl.max(logits, 1) * scale_log2), row_max)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(logits * scale_log2 - gl.expand_dims(gl.where(seen, shift, float("inf")), 1))
    alpha = gl.exp2(row_max - shift)
    return p, alpha, new_max, add_sums(row_sum, alpha, p)


@gluon.jit
def scale_rows(out, factor):
    """`out`, each row by its factor, which may be laid out as the logits' rows."""
    row: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    return out * gl.expand_dims(gl.convert_layout(factor, row), 1)


@gluon.jit
def add_values(p, values, out):
    """`out` [BLOCK_M, BLOCK_DV] plus the product of probabilities and a block of values."""
    operand: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 2)
    out = warpgroup_mma(gl.convert_layout(p.to(values.dtype), operand), values, out, is_async=True)
    return warpgroup_mma_wait(0, [out])


@gluon.jit
def clear_rows(values, first):
    """Zeros in the rows of a shared tile from `first` on: 0 times what is there could be NaN."""
    BLOCK_SIZE: gl.constexpr = values.shape[0]
    if first < BLOCK_SIZE:
        WARPS: gl.constexpr = gl.num_warps()
        MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
        row = gl.expand_dims(gl.arange(0, BLOCK_SIZE, gl.SliceLayout(1, MEMORY)), 1)
        tile = values.load(MEMORY)
        values.store(gl.where(row < first, tile, gl.zeros_like(tile)))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def tile_rows_of(first_query, num_queries, GROUP: gl.constexpr, BLOCK_TOKENS: gl.constexpr, row):
    """Query of each row of a tile, its head in the group, and the row mask; all [BLOCK_M]."""
    query = first_query + row // GROUP
    row_mask = (row < BLOCK_TOKENS * GROUP) & (query >= 0) & (query < num_queries)
    return query, row % GROUP, row_mask


@gluon.jit
def pointers(base_ptr, query_row, row_mask, DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Pointers to rows of a dense (rows, DIM) matrix and their mask, [BLOCK_M, BLOCK_D]."""
    layout: gl.constexpr = gl.SliceLayout(0, query_row.type.layout.parent)
    column = gl.arange(0, BLOCK_D, layout)
    pointer = base_ptr + gl.expand_dims(query_row * DIM, 1) + gl.expand_dims(column, 0)
    return pointer, gl.expand_dims(row_mask, 1) & gl.expand_dims(column < DIM, 0)


@gluon.jit
def attend_union(
    size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, barriers, rows, own, end_key,
    scale_log2,
    RESCALE: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_DV], row_max [BLOCK_M], row_sum by lane; the own block is on its way.

    copies: of blocks that came into the buffers before. tiles, buffers, barriers: of keys and of
    values. at: batch row and KV head. rows: token within the tile of each row, its mask, and the
    last key of the own block that it sees. end_key: keys from there on may hold anything; None:
    the copy reads them as 0. RESCALE: online softmax; else row_max stays that of the
    own block (lazy rescaling), which every row must see.
    """
    token, row_mask, last_key = rows
    BLOCK_M: gl.constexpr = q.shape[0]
    WARPS: gl.constexpr = gl.num_warps()
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_SIZE, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_DV, 16])
    keys = buffers[0].reshape([BLOCK_SIZE, BLOCK_D]).permute((1, 0))  # [BLOCK_D, BLOCK_SIZE]
    values = buffers[1].reshape([BLOCK_SIZE, BLOCK_DV])  # [BLOCK_SIZE, BLOCK_DV]
    zero = gl.zeros([BLOCK_M, BLOCK_SIZE], gl.float32, LOGITS)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))  # [BLOCK_M]
    row_sum = sums_by_lane(zero)
    out = gl.zeros([BLOCK_M, BLOCK_DV], gl.float32, OUT)  # [BLOCK_M, BLOCK_DV]

    # The own block is the only one whose keys are masked one by one: up to the query, or none.
    position = own * BLOCK_SIZE + gl.arange(0, BLOCK_SIZE, gl.SliceLayout(0, LOGITS))
    following = gl.load(union_ptr, mask=size > 0, other=0)
    mbarrier.wait(barriers[0], copies & 1)
    logits = qk_product(q, keys, zero)  # [BLOCK_M, BLOCK_SIZE]
    if size > 0:
        fetch(tiles[0], at, following, buffers[0], barriers[0], BLOCK_SIZE)
    seen = gl.expand_dims(position, 0) <= gl.expand_dims(last_key, 1)
    logits = gl.where(seen, logits, float("-inf"))
    p, alpha, row_max, row_sum = online_softmax(
        logits, last_key >= 0, row_max, row_sum, scale_log2
    )
    mbarrier.wait(barriers[1], copies & 1)
    if end_key is not None:
        clear_rows(values, end_key - own * BLOCK_SIZE)
    out = add_values(p, values, scale_rows(out, alpha))
    if size > 0:
        fetch(tiles[1], at, following, buffers[1], barriers[1], BLOCK_SIZE)

    for i in range(size):
        phase = (copies + i + 1) & 1
        more = i + 1 < size
        following = gl.load(union_ptr + i + 1, mask=more, other=0)
        bits = gl.load(masks_ptr + i * WORDS) >> (token % 32)  # [BLOCK_M]
        if WORDS == 2:
            upper = gl.load(masks_ptr + i * WORDS + 1) >> (token % 32)
            bits = gl.where(token < 32, bits, upper)
        mbarrier.wait(barriers[0], phase)
        logits = qk_product(q, keys, zero)  # [BLOCK_M, BLOCK_SIZE]
        if more:
            fetch(tiles[0], at, following, buffers[0], barriers[0], BLOCK_SIZE)
        selected = row_mask & ((bits & 1) != 0)
        if RESCALE:
            p, alpha, row_max, row_sum = online_softmax(
                logits, selected, row_max, row_sum, scale_log2
            )
            out = scale_rows(out, alpha)
        else:
            shift = gl.where(selected, row_max, float("inf"))
            p = gl.exp2(logits * scale_log2 - gl.expand_dims(shift, 1))  # [BLOCK_M, BLOCK_SIZE]
            row_sum += sums_by_lane(p)
        mbarrier.wait(barriers[1], phase)
        out = add_values(p, values, out)
        if more:
            fetch(tiles[1], at, following, buffers[1], barriers[1], BLOCK_SIZE)
    return out, row_max, row_sum


@recordable
@gluon.jit(do_not_specialize=["base", "query_offset", "num_queries"])
def selected_fwd_union_sm90_kernel(
    key_tiles, value_tiles, query_ptr, bitmask_ptr, offsets_ptr, sizes_ptr, union_ptr, masks_ptr,
    out_ptr, lse_ptr, base, query_offset, num_queries, kv_heads, scale_log2,
    GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    INT64_OFFSETS: gl.constexpr, BLOCK_TOKENS: gl.constexpr, BLOCK_M: gl.constexpr,
    CAPACITY: gl.constexpr, WORDS: gl.constexpr,
):  # fmt: skip
    """`fwd_union.selected_fwd_union_kernel`: output and log-sum-exp of tiles that have a union."""
    BLOCK_D: gl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: gl.constexpr = width_of(VALUE_DIM)
    tile = gl.program_id(1) * gl.num_programs(0) + gl.program_id(0)
    size = gl.load(sizes_ptr + tile)
    if size < 0:
        return
    dtype: gl.constexpr = query_ptr.dtype.element_ty
    WARPS: gl.constexpr = gl.num_warps()
    LOGITS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_SIZE, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])

    batch = gl.program_id(1) // kv_heads
    head = gl.program_id(1) % kv_heads
    query_offset, base = row_offset(offsets_ptr, gl.program_id(1), query_offset, base, BLOCK_SIZE)
    first = base + gl.program_id(0) * BLOCK_TOKENS
    own = first // BLOCK_SIZE
    tiles, at = (key_tiles, value_tiles), (batch, head)
    buffers, barriers = gl.tuple(()), gl.tuple(())
    for i in gl.static_range(2):
        buffers += (gl.allocate_shared_memory(dtype, tiles[i].block_type.shape, tiles[i].layout),)
        barriers += (gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),)
        mbarrier.init(barriers[i], count=1)
    fence_async_shared()
    for i in gl.static_range(2):
        fetch(tiles[i], at, own, buffers[i], barriers[i], BLOCK_SIZE)

    b, h = batch.to(gl.int64), head.to(gl.int64)
    group = (b * num_queries * kv_heads + h) * GROUP
    query_heads = kv_heads * GROUP
    bitmask_ptr += (b * kv_heads + h) * num_queries
    union_ptr += tile.to(gl.int64) * CAPACITY
    masks_ptr += tile.to(gl.int64) * CAPACITY * WORDS
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, MEMORY))
    query, head_in_group, row_mask = tile_rows_of(
        first - query_offset, num_queries, GROUP, BLOCK_TOKENS, row
    )
    stored = row_mask
    query_row = query * query_heads + head_in_group
    if INT64_OFFSETS:
        query_row = query_row.to(gl.int64)
    pointer, mask = pointers(query_ptr + group * HEAD_DIM, query_row, row_mask, HEAD_DIM, BLOCK_D)
    q = gl.load(pointer, mask=mask, other=0.0)  # [BLOCK_M, BLOCK_D]
    q = gl.convert_layout(q, gl.DotOperandLayout(0, LOGITS, 2))

    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOGITS))
    token = row // GROUP
    query, head_in_group, row_mask = tile_rows_of(
        first - query_offset, num_queries, GROUP, BLOCK_TOKENS, row
    )
    bitmask = gl.load(bitmask_ptr + query, mask=row_mask, other=0)  # [BLOCK_M]
    last_key = gl.where((bitmask & 1) != 0, first + token, -1)
    rows = (token, row_mask, last_key)
    end_key = None  # the host cut the keys there
    if offsets_ptr is not None:
        end_key = query_offset + num_queries
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_DV, 16])
    out = gl.zeros([BLOCK_M, BLOCK_DV], gl.float32, OUT)  # [BLOCK_M, BLOCK_DV]
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, LOGITS))  # [BLOCK_M]
    row_sum = sums_by_lane(gl.zeros([BLOCK_M, BLOCK_SIZE], gl.float32, LOGITS))
    copies = size * 0
    rescale = size >= 0
    if dtype == gl.bfloat16:  # noqa: SIM102 -- half precision ends at 2**16
        if gl.min(gl.where(row_mask, last_key, 0), 0) >= 0:
            out, row_max, row_sum = attend_union(
                size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, barriers, rows, own,
                end_key, scale_log2, False, BLOCK_SIZE, BLOCK_D, BLOCK_DV, WORDS,
            )  # fmt: skip
            rescale = gl.max(gl.sum(row_sum, 1), 0) > LIMIT
            if rescale:  # once more
                copies = size + 1
                for i in gl.static_range(2):
                    fetch(tiles[i], at, own, buffers[i], barriers[i], BLOCK_SIZE)
    if rescale:
        out, row_max, row_sum = attend_union(
            size, copies, tiles, at, union_ptr, masks_ptr, q, buffers, barriers, rows, own,
            end_key, scale_log2, True, BLOCK_SIZE, BLOCK_D, BLOCK_DV, WORDS,
        )  # fmt: skip
    for i in gl.static_range(2):
        mbarrier.invalidate(barriers[i])

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, LOGITS))
    empty = row_sum == 0.0
    lse = gl.where(empty, float("-inf"), row_max + gl.log2(row_sum)) * LN2
    gl.store(lse_ptr + group + query * query_heads + head_in_group, lse, mask=row_mask)
    rounded = scale_rows(out, gl.where(empty, 0.0, 1.0 / row_sum)).to(dtype)
    pointer, mask = pointers(out_ptr + group * VALUE_DIM, query_row, stored, VALUE_DIM, BLOCK_DV)
    gl.store(pointer, gl.convert_layout(rounded, MEMORY), mask=mask)


def launch(selection: Selection, out: Tensor, lse: Tensor) -> None:
    """`attend_unions` where tiles are of 64 rows and 16 bits."""
    plan, csr, unions, query, key, value, scale, offsets = selection
    selected_fwd_union_sm90_kernel[(plan.span // plan.combine_tokens, plan.batch * plan.kv_heads)](
        kv_descriptor(plan, key),
        kv_descriptor(plan, value),
        query,
        csr.bitmask,
        offsets,
        *unions,
        out,
        lse,
        plan.base,
        plan.query_offset,
        plan.num_queries,
        plan.kv_heads,
        base2_scale(scale),
        **plan.constants(),
        BLOCK_TOKENS=plan.combine_tokens,
        BLOCK_M=plan.combine_rows,
        CAPACITY=plan.union_capacity,
        WORDS=unions.masks.shape[2],
        num_warps=plan.num_warps,
        maxnreg=plan.stream_registers,
    )


def kv_descriptor(plan: SelectedPlan, x: Tensor) -> TensorDescriptor:
    """Descriptor of keys or values (B, Hkv, Sk, D) by blocks.

    What lies past the last key that a query sees is read as 0: it may hold anything.
    """
    shape = [1, 1, plan.block_size, tile_width(x.shape[3])]
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    layout = gl.NVMMASharedLayout.get_default_for(shape, dtype)
    return TensorDescriptor.from_tensor(x[:, :, : plan.num_keys], shape, layout)
