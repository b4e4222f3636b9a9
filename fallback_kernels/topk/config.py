"""How the top-k block selection cuts a call into launches: from shapes and dtypes alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2, tile_width
from nsa_flex.reasons import explained

SCORE_BYTES = 1 << 28  # scores of a query chunk
MIN_CTAS = 1024  # fewer query tiles than that are split along the keys
BAND = 16  # scores that share a maximum: `select.BAND`
# Widths of rows of scores where `topk_select_kernel` starts from the maxima of bands, if written.
BANDED_WIDTHS = (2048, 16384)
MAX_FLAGS = 128  # blocks of a row that `select.store_flagged` writes at once
FEW_SLOTS = 16  # blocks of a query that are taken one by one: `select_few.MOST`
FEW_BANDED = 512  # rows of so many scores, and up to as many as above, then start from maxima
SELECT_QUERIES = 8  # of a CTA of `topk_select_kernel`, in calls of so many rows of scores:
SELECT_MANY_ROWS = 1 << 15
SPAN = 32  # queries that see at most so many blocks have `topk_span_kernel`
SPAN_TOKENS = 64  # most queries of one of its CTAs: rows of a warp group's product
SPAN_CTAS = 256  # fewer are given fewer queries each, down to
SPAN_MIN_TOKENS = 16
SPAN_RESIDUES = (1, 2, 4)  # l'/d
SPAN_STAGES = 2  # tiles of queries in flight
SM90_MIN_CTAS = 192  # chunks of fewer CTAs go to the kernel that splits along the keys


def row_width(num_blocks: int) -> int:
    """Scores of a row in memory: at least a vector for each of 32 threads."""
    return max(128, tile_width(num_blocks))


class QueryChunk(NamedTuple):
    """Queries whose scores are in memory at once."""

    start: int
    size: int
    width: int  # blocks up to the last query's own, rounded up to a row of `topk_select_kernel`
    candidates: int
    sm90: bool  # scores come from `topk_scores_sm90_kernel`

    @property
    def maxima(self) -> int:
        """Room for the maxima of a row's bands: whole vectors, as of everything in a row."""
        return max(16, self.width // BAND) if self.sm90 else 0

    @property
    def pitch(self) -> int:
        """Stride of a row of scores, with room for candidates and maxima at its end."""
        return self.width + self.candidates + self.maxima

    @property
    def banded(self) -> bool:
        """Whether the selection starts from the maxima of bands."""
        least, most = BANDED_WIDTHS
        return self.sm90 and (FEW_BANDED if self._few_slots else least) <= self.width <= most

    @property
    def _few_slots(self) -> bool:
        return self.candidates <= 2 * FEW_SLOTS

    @property
    def few(self) -> bool:
        """Whether the best blocks are taken one by one, without a search where that is sure."""
        return self._few_slots and self.threads == 32

    @property
    def threads(self) -> int:
        """Threads that share a row of scores."""
        return 32 if self.banded else max(32, self.width // 32)

    @property
    def depth(self) -> int:
        """Scores of a row in one thread."""
        return self.width // self.threads


@dataclass(frozen=True)
class TopkPlan:
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
    sm90: bool = False  # whether `topk_scores_sm90_kernel` takes the call
    spans: bool = False  # whether `topk_span_kernel` takes queries that see SPAN blocks
    longest: int | None = None  # blocks of the longest document, if known
    tiled: bool = False  # whether `topk_select_tiled_kernel` selects
    maximum: bool = False  # whether scores are maxima, not sums

    @cached_property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def padded_group(self) -> int:
        """G, rounded up to a power of two."""
        return next_power_of_2(self.group)

    @cached_property
    def block_m(self) -> int:
        """Columns (head in group, token) of a tile of scores."""
        if self.element_size == 4 or self.head_dim > 128 or self.padded_group == 1:
            return max(64, self.padded_group)
        return 128

    @cached_property
    def tile_tokens(self) -> int:
        most = self.block_m // self.padded_group
        return max(16 // self.padded_group, min(most, next_power_of_2(self.num_queries)), 1)

    @cached_property
    def sm90_tokens(self) -> int:
        """Tokens of a CTA of `topk_scores_sm90_kernel`: 128 rows (head in group, token)."""
        return 128 // self.padded_group

    @cached_property
    def sm90_registers(self) -> int:
        """Three CTAs an SM where a thread sums heads, two where it holds tokens."""
        return 255 if self.padded_group == 1 else 168

    @cached_property
    def block_n(self) -> int:
        """Keys of a tile: one warp group's MMA, less in float32."""
        return 32 if self.element_size == 4 else 64

    @cached_property
    def stages(self) -> int:
        """Tiles of keys in flight: three where that leaves room for three CTAs an SM.

        In float32 a third makes ptxas spill most registers.
        """
        narrow = self.block_m <= 64 and self.head_dim <= 128
        return 3 if narrow and self.element_size < 4 else 2

    @cached_property
    def registers(self) -> int | None:
        """Register limit of a thread: three CTAs of 128 threads an SM.

        Without one where maxima of a single head would spill.
        """
        free = self.element_size == 4 or (self.maximum and self.padded_group == 1)
        return None if free else 168

    @cached_property
    def candidates(self) -> int:
        """Room for the blocks of a row among which the selection is finished."""
        return min(MAX_FLAGS, max(32, 2 * next_power_of_2(self.num_slots)))

    @cached_property
    def past(self) -> int:
        """No query sits later than if the last one were the last key."""
        return self.num_blocks * self.select_block_size - self.num_queries

    @cached_property
    def scored(self) -> int:
        """Queries with so many blocks before their own have scores in memory."""
        return SPAN if self.spans else self.num_slots

    @cached_property
    def has_scores(self) -> bool:
        """Whether some queries may see more blocks than `topk_span_kernel` takes."""
        return not self.spans or (self.longest or self.num_blocks) > SPAN

    @cached_property
    def span_tokens(self) -> int:
        """Queries of a CTA of `topk_span_kernel`, of two blocks at most."""
        most = min(SPAN_TOKENS, self.select_block_size, next_power_of_2(self.num_queries))
        tokens = 1 << (most.bit_length() - 1)
        heads = self.batch * self.kv_heads
        while tokens > SPAN_MIN_TOKENS and heads * cdiv(self.num_queries, tokens) < SPAN_CTAS:
            tokens //= 2
        return max(tokens, SPAN_MIN_TOKENS)

    def chunks(self) -> Iterator[QueryChunk]:
        """Queries, as many at a time as `SCORE_BYTES` holds the scores of."""
        start = 0 if self.has_scores else self.num_queries
        while start < self.num_queries:
            chunk = self.chunk(start)
            yield chunk
            start += chunk.size

    def chunk(self, start: int) -> QueryChunk:
        """The most queries from `start` on; the narrowest rows that do not make them fewer."""
        best = QueryChunk(start, 0, 0, self.candidates, False)
        own = (self.past + start) // self.select_block_size
        width, widest = row_width(min(own + 1, self.num_blocks)), row_width(self.num_blocks)
        while width <= widest:
            pitch = QueryChunk(start, 1, width, self.candidates, self.sm90).pitch
            row_bytes = 4 * self.batch * self.kv_heads * pitch
            size = max(self.tile_tokens, SCORE_BYTES // row_bytes // 64 * 64, 1)
            wide_enough = width * self.select_block_size - self.past - start
            if width == widest:
                wide_enough = self.num_queries - start
            size = min(size, wide_enough, self.num_queries - start)
            if size > best.size:
                best = QueryChunk(start, size, width, self.candidates, False)
            width *= 2
        sm90 = self.sm90 and self.sm90_unsupported_reason(best.size) is None
        return best._replace(sm90=sm90)

    @explained
    def sm90_unsupported_reason(self, num_queries: int) -> str | None:
        """Why `topk_scores_sm90_kernel` takes no chunk of so many queries; None if it does."""
        ctas = cdiv(num_queries, self.sm90_tokens) * self.batch * self.kv_heads
        if ctas < SM90_MIN_CTAS:
            return f"{ctas} CTAs do not fill the device: other kernels split them along the keys"
        return None

    def empty_workspace(self, device: torch.device) -> Tensor:
        """Memory for the scores of any chunk, rows (batch row, KV head, query)."""
        most = max((chunk.size * chunk.pitch for chunk in self.chunks()), default=0)
        size = self.batch * self.kv_heads * most
        return torch.empty(size, dtype=torch.float32, device=device)

    def splits(self, num_queries: int, num_tiles: int) -> int:
        """CTAs that share the `num_tiles` tiles of keys of one query tile."""
        ctas = cdiv(num_queries, self.tile_tokens) * self.batch * self.kv_heads
        return max(1, min(cdiv(MIN_CTAS, ctas), num_tiles))

    def queries_of_select(self, num_queries: int, has_documents: bool) -> int:
        """Queries that a CTA of `topk_select_kernel` takes.

        In packed rows most of them may have nothing to choose, and a CTA a query takes longer than
        their blocks.
        """
        rows = num_queries * self.batch * self.kv_heads
        return SELECT_QUERIES if has_documents and rows >= SELECT_MANY_ROWS else 1

    def tile_constants(self) -> dict[str, Any]:
        """Compile-time arguments that kernels over queries and keys take."""
        return {
            "GROUP": self.group,
            "BLOCK_TOKENS": self.tile_tokens,
            "BLOCK_N": self.block_n,
            "HEAD_DIM": self.head_dim,
            "STAGES": self.stages,
        }
