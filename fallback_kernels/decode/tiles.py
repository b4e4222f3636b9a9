"""Device functions shared by the kernels of a decode step: tiles of keys and online softmax."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_the_kernel_before(EARLY: tl.constexpr):
    """Until then a kernel that starts EARLY may read nothing that this step wrote."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_the_next_kernel_start(EARLY: tl.constexpr):
    """Its programs take their places, and wait, as soon as all of this kernel's have started."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def load_members(
    pointer, stride_h, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The query heads of a group [ROWS, COLUMNS], zeros behind GROUP and DIM."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    inside = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    return tl.load(pointer + row[:, None] * stride_h + dim[None, :], mask=inside, other=0.0)


@triton.jit
def tile_pointers(pointer, stride_s, first, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows first ... first + ROWS - 1 [ROWS, COLUMNS] of what `pointer` is the first row of."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    return pointer + ((first + row).to(tl.int64) * stride_s)[:, None] + dim[None, :]


@triton.jit
def load_tile(pointers, there, DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows where `there` [ROWS], zeros elsewhere and behind DIM: [ROWS, COLUMNS]."""
    if DIM < COLUMNS:
        inside = there[:, None] & (tl.arange(0, COLUMNS) < DIM)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)
    return tl.load(pointers, mask=there[:, None], other=0.0)


@triton.jit
def tile_weights(q, k, there, top, scale_log2, PRECISION: tl.constexpr):
    """exp2(logit - new top) [rows, keys], the new top [rows] and what to scale old sums by."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
    logits = tl.where(there[None, :], logits, float("-inf"))
    new_top = tl.maximum(top, tl.max(logits, 1))
    return tl.exp2(logits - new_top[:, None]), new_top, tl.exp2(top - new_top)


@triton.jit
def store_part(
    partial_ptr, top_ptr, total_ptr, unit, part, num_parts, out, top, total,
    GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One partial result of a unit: partial (units, G, parts, Dv), top and total without Dv."""
    row, dim = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    line = (unit.to(tl.int64) * GROUP + row) * num_parts + part
    inside = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    tl.store(partial_ptr + line[:, None] * DIM + dim[None, :], out, mask=inside)
    tl.store(top_ptr + line, top, mask=row < GROUP)
    tl.store(total_ptr + line, total, mask=row < GROUP)


@triton.jit
def visible_blocks(position, COMPRESS: tl.constexpr, STRIDE: tl.constexpr):
    """Compressed keys that a query at `position` sees."""
    past = position - (COMPRESS - 1)
    return tl.where(past >= 0, past // STRIDE + 1, 0)


@triton.jit
def share_of_split(seen, num_splits, KEYS: tl.constexpr):
    """Tiles each split takes of `seen` compressed keys, and how many splits have any."""
    tiles = tl.cdiv(seen, KEYS)
    share = tl.maximum(tl.cdiv(tiles, num_splits), 1)
    return share, tl.cdiv(tiles, share)
