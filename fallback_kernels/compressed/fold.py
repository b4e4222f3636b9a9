"""The fold of the compressed branch cut by residue, so that every part is a view of the queries.

Query t is row `j = (t - l + 1) // d` of residue `r = (t - l + 1) % d`. The first `full` residues
have N rows, the others N - 1: no row is missing, none has to be padded. Cutting the others in
three bounds what one call of a dense kernel's backward allocates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

ADD_ROWS = 16  # rows that one program adds
SHORT = 1 << 14  # tokens up to which memory matters less than launches: two parts do


@dataclass(frozen=True)
class Part:
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
    """The parts of the compressed branch, and what tells a query's place in them."""

    parts: tuple[Part, ...]  # four, some perhaps empty
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
    parts = zip(bounds[:-1], bounds[1:], rows, strict=True)
    return Fold(tuple(Part(*part) for part in parts), reach, stride)


def part_rows_view(query: Tensor, part: Part, reach: int, stride: int) -> Tensor:
    """(B, S, H, D), contiguous, to the view (B, rows, width * H, D) of a part."""
    batch, tokens, heads, dim = query.shape
    token = heads * dim
    return query.as_strided(
        (batch, part.rows, part.width * heads, dim),
        (tokens * token, stride * token, dim, 1),
        query.storage_offset() + (reach + part.first) * token,
    )


def sum_residues(shares: list[Tensor], total: Tensor) -> None:
    """Sums keys' gradients over all residues of all parts, in one pass and in float32.

    Args:
        shares: one (B, width, H, rows, D) a part; rows at most N, any strides but the last.
        total: receives the sum, (B, H, N, D), any strides but the last.
    """
    batch, heads, rows, dim = total.shape
    _sum_kernel[triton.cdiv(rows, ADD_ROWS), batch * heads](
        *shares,
        total,
        *(share.shape[1] for share in shares),
        *(share.shape[3] for share in shares),
        *(stride for share in shares for stride in share.stride()[:4]),
        *total.stride()[:3],
        heads,
        rows,
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ADD_ROWS,
    )


@triton.jit
def _add_part(total, part, b, h, row, column, DIM: tl.constexpr):
    share, width, rows, stride_b, stride_w, stride_h, stride_n = part
    share += b * stride_b + h * stride_h
    share = share + row[:, None].to(tl.int64) * stride_n + column[None, :]
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    for _ in range(width):
        total += tl.load(share, mask=there, other=0.0).to(tl.float32)
        share += stride_w
    return total


@triton.jit(
    do_not_specialize=[
        "width0", "width1", "width2", "width3", "rows0", "rows1", "rows2", "rows3", "rows",
    ]
)  # fmt: skip
def _sum_kernel(
    share0, share1, share2, share3, total_ptr,
    width0, width1, width2, width3, rows0, rows1, rows2, rows3,
    stride_b0, stride_w0, stride_h0, stride_n0, stride_b1, stride_w1, stride_h1, stride_n1,
    stride_b2, stride_w2, stride_h2, stride_n2, stride_b3, stride_w3, stride_h3, stride_n3,
    total_stride_b, total_stride_h, total_stride_n, heads, rows,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    parts = (
        (share0, width0, rows0, stride_b0, stride_w0, stride_h0, stride_n0),
        (share1, width1, rows1, stride_b1, stride_w1, stride_h1, stride_n1),
        (share2, width2, rows2, stride_b2, stride_w2, stride_h2, stride_n2),
        (share3, width3, rows3, stride_b3, stride_w3, stride_h3, stride_n3),
    )
    for i in tl.static_range(4):
        total = _add_part(total, parts[i], b, h, row, column, DIM)
    total_ptr += b * total_stride_b + h * total_stride_h
    place = row[:, None].to(tl.int64) * total_stride_n + column[None, :]
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    tl.store(total_ptr + place, total.to(total_ptr.dtype.element_ty), mask=there)


def bounds_of(parts: tuple[Part, ...]) -> tuple[int, int, int, int]:
    """What the kernels need of the parts: N, and the first residue of parts 1, 2 and 3."""
    return parts[0].rows, parts[1].first, parts[2].first, parts[3].first


@triton.jit
def part_place(s, rows, first1, first2, first3, reach, STRIDE: tl.constexpr):
    """Where query s is: part, residue within the part, the part's width and rows, and its row."""
    place = tl.maximum(s - reach, 0)
    residue = place % STRIDE
    part = (residue >= first1).to(tl.int32)
    part += (residue >= first2).to(tl.int32) + (residue >= first3).to(tl.int32)
    first = of_part(part, 0, first1, first2, first3)
    stop = of_part(part, first1, first2, first3, STRIDE)
    part_rows = tl.where(part == 0, rows, rows - 1)
    return part, residue - first, stop - first, part_rows, place // STRIDE


@triton.jit
def of_part(part, part0, part1, part2, part3):
    """The value or pointer that belongs to each element's part."""
    return tl.where(
        part == 0, part0, tl.where(part == 1, part1, tl.where(part == 2, part2, part3))
    )
