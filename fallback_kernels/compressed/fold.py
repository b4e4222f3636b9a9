"""The fold of the compressed branch, cut into ranges of residues that are views of the queries.

Query t is row `j = (t - l + 1) // d` of residue `r = (t - l + 1) % d`. The first `full` residues
have N rows, the others N - 1: no row is missing, none has to be padded. Cutting the others into
three ranges bounds what one call of a dense kernel's backward allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv

ADD_ROWS = tl.constexpr(16)  # rows that one CTA adds
SHORT = 1 << 14  # tokens up to which memory matters less than launches: two ranges do


@dataclass(frozen=True)
class ResidueRange:
    """Residues [first, stop), each with `rows` rows."""

    first: int
    stop: int
    rows: int

    @property
    def width(self) -> int:
        return self.stop - self.first

    @property
    def is_empty(self) -> bool:
        return self.width == 0 or self.rows == 0


class Fold(NamedTuple):
    """The residue ranges of the compressed branch, and what gives a query's position in them."""

    ranges: tuple[ResidueRange, ...]  # four, some perhaps empty
    reach: int  # l - 1, queries that see no block
    stride: int  # d


def fold_of(num_tokens: int, block: int, stride: int) -> Fold:
    """The fold of queries at positions 0 to `num_tokens` - 1, for l = `block` and d = `stride`."""
    reach = block - 1
    num_blocks = max(1, (num_tokens - block) // stride + 1)
    full = min(max(num_tokens - reach - (num_blocks - 1) * stride, 0), stride)
    rest = stride - full
    third = rest if num_tokens <= SHORT else (rest + 2) // 3
    bounds = [0, full, min(full + third, stride), min(full + 2 * third, stride), stride]
    rows = [num_blocks] + [num_blocks - 1] * 3
    ranges = zip(bounds[:-1], bounds[1:], rows, strict=True)
    return Fold(tuple(ResidueRange(*bounds) for bounds in ranges), reach, stride)


def range_rows_view(query: Tensor, residues: ResidueRange, reach: int, stride: int) -> Tensor:
    """(B, S, H, D), contiguous, to the view (B, rows, width * H, D) of a residue range."""
    batch, tokens, heads, dim = query.shape
    token = heads * dim
    return query.as_strided(
        (batch, residues.rows, residues.width * heads, dim),
        (tokens * token, stride * token, dim, 1),
        query.storage_offset() + (reach + residues.first) * token,
    )


def sum_residues(partials: list[Tensor], total: Tensor) -> None:
    """Sums keys' gradients over all residues, in one pass and in float32.

    Args:
        partials: one (B, width, H, rows, D) a residue range, any strides but the last; rows at
            most N.
        total: receives the sum, (B, H, N, D), any strides but the last.
    """
    batch, heads, rows, dim = total.shape
    sum_residues_kernel[cdiv(rows, ADD_ROWS.value), batch * heads](
        *partials,
        total,
        *(partial.shape[1] for partial in partials),
        *(partial.shape[3] for partial in partials),
        *(partial.stride()[:4] for partial in partials),
        total.stride()[:3],
        heads,
        rows,
        DIM=dim,
    )


@triton.jit
def _add_range(total, source, b, h, row, column, DIM: tl.constexpr):
    partial, width, rows, strides = source  # of (B, width, H, rows)
    partial += b * strides[0] + h * strides[2]
    partial = partial + row[:, None].to(tl.int64) * strides[3] + column[None, :]
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    for _ in range(width):
        total += tl.load(partial, mask=mask, other=0.0).to(tl.float32)
        partial += strides[1]
    return total


@recordable
@triton.jit(
    do_not_specialize=[
        "width0", "width1", "width2", "width3", "rows0", "rows1", "rows2", "rows3", "rows",
    ]
)  # fmt: skip
def sum_residues_kernel(
    partial0, partial1, partial2, partial3, total_ptr,
    width0, width1, width2, width3, rows0, rows1, rows2, rows3,
    strides0, strides1, strides2, strides3, total_strides, heads, rows,
    DIM: tl.constexpr,
):  # fmt: skip
    """CTA (tile of rows, KV head of a batch row): their gradients, summed over residues."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = tl.program_id(0) * ADD_ROWS + tl.arange(0, ADD_ROWS)
    column = tl.arange(0, BLOCK_D)
    total = tl.zeros([ADD_ROWS, BLOCK_D], tl.float32)
    sources = (
        (partial0, width0, rows0, strides0),
        (partial1, width1, rows1, strides1),
        (partial2, width2, rows2, strides2),
        (partial3, width3, rows3, strides3),
    )
    for i in tl.static_range(4):
        total = _add_range(total, sources[i], b, h, row, column, DIM)
    total_ptr += b * total_strides[0] + h * total_strides[1]
    offset = row[:, None].to(tl.int64) * total_strides[2] + column[None, :]
    mask = (row < rows)[:, None] & (column < DIM)[None, :]
    tl.store(total_ptr + offset, total.to(total_ptr.dtype.element_ty), mask=mask)


def bounds_of(ranges: tuple[ResidueRange, ...]) -> tuple[int, int, int, int]:
    """What the kernels need of the ranges: N, and the first residue of ranges 1, 2 and 3."""
    return ranges[0].rows, ranges[1].first, ranges[2].first, ranges[3].first


@triton.jit
def fold_position(s, rows, first1, first2, first3, reach, STRIDE: tl.constexpr):
    """Of query s: range, residue within the range, the range's width and rows, and its row."""
    folded = tl.maximum(s - reach, 0)
    residue = folded % STRIDE
    range_index = (residue >= first1).to(tl.int32)
    range_index += (residue >= first2).to(tl.int32) + (residue >= first3).to(tl.int32)
    first = of_range(range_index, 0, first1, first2, first3)
    stop = of_range(range_index, first1, first2, first3, STRIDE)
    range_rows = tl.where(range_index == 0, rows, rows - 1)
    return range_index, residue - first, stop - first, range_rows, folded // STRIDE


@triton.jit
def of_range(range_index, of0, of1, of2, of3):
    """The value or pointer that belongs to each element's range."""
    return tl.where(
        range_index == 0,
        of0,
        tl.where(range_index == 1, of1, tl.where(range_index == 2, of2, of3)),
    )
