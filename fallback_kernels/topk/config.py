"""How the fused choice of blocks cuts a call into launches: from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa_flex.fallback_kernels.common.tiles import tile_width

SCORE_BYTES = 1 << 28  # scores of a chunk
PROGRAMS = 1024  # fewer tiles of queries than that are split along the keys
BAND = 16  # scores that share a maximum: `choose_top.BAND`
BANDED_WIDTHS = (2048, 16384)  # rows of scores whose maxima `top_kernel` starts from, if written
FEW_SLOTS = 16  # blocks of a query that are taken one by one: `choose_distinct.MOST`
FEW_BANDED = 512  # rows of so many scores, and up to as many as above, then start from maxima
HOPPER_PROGRAMS = 192  # chunks of fewer programs go to the kernel that splits along the keys


def row_width(num_blocks: int) -> int:
    """Scores of a row in memory: at least a vector for each of 32 threads."""
    return max(128, tile_width(num_blocks))


class Chunk(NamedTuple):
    """Queries whose scores are in memory at once."""

    start: int
    size: int
    width: int  # blocks that they may choose from, rounded up to a row of `top_kernel`
    candidates: int
    hopper: bool  # scores come from `banded_score_kernel`

    @property
    def maxima(self) -> int:
        """Room for the maxima of a row's bands: whole vectors, as of everything in a row."""
        return max(16, self.width // BAND) if self.hopper else 0

    @property
    def pitch(self) -> int:
        """Scores from a row to the next: `top_kernel`'s candidates and maxima lie between them."""
        return self.width + self.candidates + self.maxima

    @property
    def banded(self) -> bool:
        """Whether the choice starts from the maxima of bands."""
        least, most = BANDED_WIDTHS
        return self.hopper and (FEW_BANDED if self._few_slots else least) <= self.width <= most

    @property
    def _few_slots(self) -> bool:
        return self.candidates <= 2 * FEW_SLOTS

    @property
    def few(self) -> bool:
        """Whether the best blocks are taken one by one, without a search where that is sure."""
        return self._few_slots and self.lanes == 32

    @property
    def lanes(self) -> int:
        """Threads that share a row of scores."""
        return 32 if self.banded else max(32, self.width // 32)

    @property
    def depth(self) -> int:
        """Scores of a row in one thread."""
        return self.width // self.lanes


@dataclass(frozen=True)
class ChoicePlan:
    """Everything about a call that shapes and dtypes decide."""

    batch: int
    query_heads: int
    kv_heads: int
    num_queries: int
    head_dim: int
    num_blocks: int
    num_slots: int
    select_block_size: int
    element_size: int
    hopper: bool = False  # whether `banded_score_kernel` takes the call

    @cached_property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def members(self) -> int:
        """G, rounded up to a power of two."""
        return triton.next_power_of_2(self.group)

    @cached_property
    def head_columns(self) -> tuple[int, int]:
        """Widths of the two tiles that hold the head dim; the second may be 0."""
        main = 1 << (self.head_dim.bit_length() - 1)
        if main < 16:
            return 16, 0
        return main, tile_width(self.head_dim - main) if self.head_dim > main else 0

    @cached_property
    def tile_columns(self) -> int:
        """Columns (query head, token) of a tile of scores."""
        if self.element_size == 4 or self.head_dim > 128 or self.members == 1:
            return max(64, self.members)
        return 128

    @cached_property
    def tile_tokens(self) -> int:
        most = self.tile_columns // self.members
        return max(16 // self.members, min(most, triton.next_power_of_2(self.num_queries)), 1)

    @cached_property
    def hopper_tokens(self) -> int:
        """Tokens of a program of `banded_score_kernel`: 128 rows (query head, token)."""
        return 128 // self.members

    @cached_property
    def hopper_registers(self) -> int:
        """Three programs a multiprocessor where a thread sums heads, two where it holds tokens."""
        return 255 if self.members == 1 else 168

    @cached_property
    def tile_rows(self) -> int:
        """Keys of a tile: what one warp group multiplies at once, less where it is float32."""
        return 32 if self.element_size == 4 else 64

    @cached_property
    def stages(self) -> int:
        """Tiles of keys in flight: three where that leaves room for three programs."""
        return 3 if self.tile_columns <= 64 and self.head_dim <= 128 else 2

    @cached_property
    def registers(self) -> int | None:
        """Most of a thread: few enough for three programs of 128 threads a multiprocessor."""
        return None if self.element_size == 4 else 168

    @cached_property
    def candidates(self) -> int:
        """Places for blocks of a row among which the choice is finished."""
        return max(32, 2 * triton.next_power_of_2(self.num_slots))

    @cached_property
    def past(self) -> int:
        """No query sits later than if the last one were the last key."""
        return self.num_blocks * self.select_block_size - self.num_queries

    def chunks(self) -> Iterator[Chunk]:
        """All queries, as many at a time as `SCORE_BYTES` holds the scores of."""
        start = 0
        while start < self.num_queries:
            chunk = self.chunk(start)
            yield chunk
            start += chunk.size

    def chunk(self, start: int) -> Chunk:
        """The most queries from `start` on; the narrowest rows that do not make them fewer."""
        best = Chunk(start, 0, 0, self.candidates, False)
        own = (self.past + start) // self.select_block_size
        width, widest = row_width(min(own + 1, self.num_blocks)), row_width(self.num_blocks)
        while width <= widest:
            pitch = Chunk(start, 1, width, self.candidates, self.hopper).pitch
            row_bytes = 4 * self.batch * self.kv_heads * pitch
            size = max(self.tile_tokens, SCORE_BYTES // row_bytes // 64 * 64, 1)
            wide_enough = width * self.select_block_size - self.past - start
            if width == widest:
                wide_enough = self.num_queries - start
            size = min(size, wide_enough, self.num_queries - start)
            if size > best.size:
                best = Chunk(start, size, width, self.candidates, self._hopper_takes(size))
            width *= 2
        return best

    def _hopper_takes(self, num_queries: int) -> bool:
        tiles = triton.cdiv(num_queries, self.hopper_tokens)
        return self.hopper and tiles * self.batch * self.kv_heads >= HOPPER_PROGRAMS

    def empty_scores(self, device: torch.device) -> Tensor:
        """Room for the scores of any chunk, rows (batch row, KV head, query)."""
        most = max((chunk.size * chunk.pitch for chunk in self.chunks()), default=0)
        size = self.batch * self.kv_heads * most
        return torch.empty(size, dtype=torch.float32, device=device)

    def splits(self, num_queries: int, num_tiles: int) -> int:
        """Programs that share the `num_tiles` tiles of keys of one tile of queries."""
        programs = triton.cdiv(num_queries, self.tile_tokens) * self.batch * self.kv_heads
        return max(1, min(triton.cdiv(PROGRAMS, programs), num_tiles))

    def tile_constants(self) -> dict[str, Any]:
        """Compile-time arguments that kernels over queries and keys take."""
        head_columns, tail_columns = self.head_columns
        return {
            "GROUP": self.group,
            "MEMBERS": self.members,
            "TOKENS": self.tile_tokens,
            "ROWS": self.tile_rows,
            "HEAD_DIM": self.head_dim,
            "HEAD_COLUMNS": head_columns,
            "TAIL_COLUMNS": tail_columns,
            "PRECISION": "ieee" if self.element_size == 4 else "tf32",
            "STAGES": self.stages,
        }
