"""Device functions that the kernels of a decode step share: launches, tiles, online softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Waits for the kernel before this one; only from here on may its results be read."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Lets the next kernel's CTAs be scheduled once all CTAs of this kernel have come here."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def completes_any(
    lengths_ptr, batch_size, num_new, capacity, num_compressed,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, PADDED_BATCH: tl.constexpr,
):  # fmt: skip
    """Whether `num_new` tokens complete a block of any row of the batch."""
    row = tl.arange(0, PADDED_BATCH)
    length = tl.load(lengths_ptr + row, mask=row < batch_size, other=capacity)
    block = tl.where(length >= COMPRESS, (length - COMPRESS) // STRIDE + 1, 0)  # the next one
    stored = tl.minimum(length + num_new, capacity)
    completes = (block * STRIDE + COMPRESS <= stored) & (block < num_compressed)
    return tl.max((completes & (row < batch_size)).to(tl.int32), 0) > 0


@triton.jit
def load_query_group(
    pointer, stride_h, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The query heads of a group [BLOCK_M, BLOCK_D], zeros past GROUP and HEAD_DIM."""
    head_in_group, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    mask = (head_in_group < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]  # [BLOCK_M, BLOCK_D]
    return tl.load(
        pointer + head_in_group[:, None] * stride_h + dim[None, :], mask=mask, other=0.0
    )


@triton.jit
def tile_pointers(pointer, stride_s, first, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers [BLOCK_N, BLOCK_D] to rows first ... first + BLOCK_N - 1 behind `pointer`."""
    row, dim = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    return pointer + ((first + row).to(tl.int64) * stride_s)[:, None] + dim[None, :]


@triton.jit
def page_pointers(
    pointer, table_ptr, stride_page, stride_s, first, row_mask,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`tile_pointers`, of rows in pages of PAGE rows that the request's table lists; the table is
    read for the rows of `row_mask` [BLOCK_N] alone.
    """
    row, dim = first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    page = tl.load(table_ptr + row // PAGE, mask=row_mask, other=0).to(tl.int64)  # [BLOCK_N]
    offset = page * stride_page + (row % PAGE).to(tl.int64) * stride_s
    return pointer + offset[:, None] + dim[None, :]


@triton.jit
def load_tile(pointers, row_mask, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows of `row_mask` [BLOCK_N], zeros elsewhere and past DIM: [BLOCK_N, BLOCK_D]."""
    if DIM < BLOCK_D:
        mask = row_mask[:, None] & (tl.arange(0, BLOCK_D) < DIM)[None, :]  # [BLOCK_N, BLOCK_D]
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers, mask=row_mask[:, None], other=0.0)


@triton.jit
def softmax_step(q, k, key_mask, row_max, scale_log2, PRECISION: tl.constexpr):
    """Online softmax over one tile of keys, all of it in base 2.

    Returns:
        p [BLOCK_M, BLOCK_N], exp2(logit - new row_max); the new row_max [BLOCK_M]; alpha
        [BLOCK_M], the factor that rescales the sums so far.
    """
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [BLOCK_M, BLOCK_N]
    logits = tl.where(key_mask[None, :], logits, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(logits, 1))  # [BLOCK_M]
    return tl.exp2(logits - new_max[:, None]), new_max, tl.exp2(row_max - new_max)


@triton.jit
def store_partial(
    partial_ptr, row_max_ptr, row_sum_ptr, unit, split, num_splits, out, row_max, row_sum,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    OUTPUT: tl.constexpr = True,
):  # fmt: skip
    """One split's output of a unit: partial (units, G, splits, Dv) if OUTPUT, row_max and row_sum
    without Dv.
    """
    head_in_group, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    slot = (unit.to(tl.int64) * GROUP + head_in_group) * num_splits + split  # [BLOCK_M]
    mask = (head_in_group < GROUP)[:, None] & (dim < VALUE_DIM)[None, :]  # [BLOCK_M, BLOCK_DV]
    if OUTPUT:
        tl.store(partial_ptr + slot[:, None] * VALUE_DIM + dim[None, :], out, mask=mask)
    tl.store(row_max_ptr + slot, row_max, mask=head_in_group < GROUP)
    tl.store(row_sum_ptr + slot, row_sum, mask=head_in_group < GROUP)


@triton.jit
def count_visible_blocks(position, COMPRESS: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed keys that a query at `position` sees."""
    past = position - (COMPRESS - 1)
    return tl.where(past >= 0, past // STRIDE + 1, 0)


@triton.jit
def tiles_of_split(num_visible, num_compressed_splits, BLOCK_N: tl.constexpr):
    """Tiles of compressed keys that each split takes, and how many splits have any."""
    tiles = tl.cdiv(num_visible, BLOCK_N)
    tiles_per_split = tl.maximum(tl.cdiv(tiles, num_compressed_splits), 1)
    return tiles_per_split, tl.cdiv(tiles, tiles_per_split)


@triton.jit
def count_slots(
    position,
    SELECT: tl.constexpr, NUM_SLOTS: tl.constexpr, TOPK: tl.constexpr, INITIAL: tl.constexpr,
    TILED: tl.constexpr,
):  # fmt: skip
    """How many initial and local slots, and how many top-k slots, a query at `position` fills.

    With fewer blocks than slots, slot i holds block i. TILED: past the first tile of NUM_SLOTS
    blocks half of the slots are for blocks before a query's tile, the others for its own tile.
    """
    filled = tl.minimum(position // SELECT + 1, NUM_SLOTS)
    num_topk = tl.minimum(tl.maximum(filled - INITIAL, 0), TOPK)
    if TILED:
        HALF: tl.constexpr = NUM_SLOTS // 2
        own = position // SELECT
        in_tiles = HALF + tl.minimum(own % NUM_SLOTS, HALF - 1)
        num_topk = tl.where(own < NUM_SLOTS, num_topk, in_tiles)
        filled = tl.where(own < NUM_SLOTS, filled, in_tiles + 1)
    return filled - num_topk, num_topk
