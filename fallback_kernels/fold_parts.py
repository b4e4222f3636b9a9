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

COPY = 4096  # elements that one program copies
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


def pieces_of(fold: Fold, num_tokens: int) -> list[Part]:
    """The parts that hold something, in pieces whose gradients take little memory at a time."""
    widest = fold.stride if num_tokens <= SHORT else max(1, fold.stride // 5)
    return [
        Part(first, min(first + widest, part.stop), part.rows)
        for part in fold.parts
        if not part.is_empty
        for first in range(part.first, part.stop, widest)
    ]


def part_rows_view(query: Tensor, part: Part, reach: int, stride: int) -> Tensor:
    """(B, S, H, D), contiguous, to the view (B, rows, width * H, D) of a part."""
    batch, tokens, heads, dim = query.shape
    token = heads * dim
    return query.as_strided(
        (batch, part.rows, part.width * heads, dim),
        (tokens * token, stride * token, dim, 1),
        query.storage_offset() + (reach + part.first) * token,
    )


def place_part(rows: Tensor, out: Tensor, part: Part, reach: int, stride: int) -> None:
    """Copies (B, rows, width * H, D), contiguous, to its place in `out`, (B, S, H, D), contiguous.

    One pass at the speed of memory, which torch's copy between such strides is far from.
    """
    batch, tokens, heads, dim = out.shape
    token = heads * dim
    run = part.width * token
    _place_kernel[part.rows, triton.cdiv(run, COPY), batch](
        rows,
        out,
        run,
        part.rows,
        tokens * token,
        stride * token,
        (reach + part.first) * token,
        COPY,
    )


@triton.jit(do_not_specialize=["rows"])
def _place_kernel(source, target, run, rows, stride_b, stride_row, first, COPY: tl.constexpr):
    b, row = tl.program_id(2).to(tl.int64), tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * COPY + tl.arange(0, COPY)
    there = place < run
    x = tl.load(source + (b * rows + row) * run + place, mask=there)
    tl.store(target + b * stride_b + row * stride_row + first + place, x, mask=there)


def add_residues(shares: Tensor, totals: Tensor) -> None:
    """Adds to `totals`, float32 (B, H, N, D), the sum of `shares` (B, width, H, rows, D).

    In one pass; rows at most N, the last dimension of both contiguous.
    """
    batch, width, heads, rows, dim = shares.shape
    _add_kernel[triton.cdiv(rows, ADD_ROWS), batch * heads](
        shares,
        totals,
        width,
        heads,
        rows,
        *shares.stride()[:4],
        *totals.stride()[:3],
        DIM=dim,
        COLUMNS=triton.next_power_of_2(dim),
        ROWS=ADD_ROWS,
    )


@triton.jit(do_not_specialize=["width", "rows"])
def _add_kernel(
    shares, totals, width, heads, rows,
    share_stride_b, share_stride_w, share_stride_h, share_stride_n,
    total_stride_b, total_stride_h, total_stride_n,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    there = (row < rows)[:, None] & (column < DIM)[None, :]
    totals += b * total_stride_b + h * total_stride_h
    total = totals + row[:, None] * total_stride_n + column[None, :]
    shares += b * share_stride_b + h * share_stride_h
    share = shares + row[:, None] * share_stride_n + column[None, :]
    x = tl.load(total, mask=there, other=0.0)
    for _ in range(width):
        x += tl.load(share, mask=there, other=0.0).to(tl.float32)
        share += share_stride_w
    tl.store(total, x, mask=there)


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
