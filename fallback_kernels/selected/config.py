"""Sizes of the selection kernels' grids, tiles and buffers: shapes in, plain integers out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import SM90_SHARED_MEMORY, shared_memory_bytes
from nsa_flex.fallback_kernels.common.tiles import cdiv, round_up, tile_width

PARTIAL_BYTES = 1 << 30  # partial outputs in memory at once, twice as much for many queries
NUM_STREAMS = 2  # query chunks in memory at once, a stream each; one for groups of few heads
MANY_QUERIES = 1 << 16
# Rows (query, head) of one KV head in a query chunk, where that many fit: CSR rows of shorter
# chunks leave tiles half empty and CTAs with little to do. Those of longer ones gather queries
# from more memory than L2 holds, which costs the backward less: it does more with each.
CHUNK_ROWS = 1 << 17
FORWARD_CHUNK_ROWS = 1 << 16
MIN_CHUNK_TOKENS = 512
MAX_PHASES = 16
MAX_DENSE_BLOCKS = 8  # initial or local; bits 0-15 of a query's bitmask
WORK_TILE_ROWS = 4096  # query rows that one CTA streams past one KV block
SEGMENT_TOKENS = 256  # queries of one CTA that reduce into an initial block
LEAST_SEGMENT_TOKENS = 64
LEAST_WORK_TILE_TOKENS = 128
LEAST_CTAS = 512  # with fewer, work tiles and segments are cut smaller
WORK_TILE_WORDS = 4  # see `SelectedIndex`
# A tile attends the union of its blocks where that has at most so many quarters of a block for
# every top-k block of a query: 42 blocks at 13 top-k blocks. 0: none ever does.
UNION_LIMIT = 13
FEW_HEADS = 4  # a group whose tiles have many entries and whose chunks are few
NARROW = 64  # of head dims: up to it, a third tile in flight leaves room for as many CTAs
FEW_SLOTS = 64  # blocks of a query whose log-sum-exps leave room for four CTAs an SM
TILE_ROWS = 64  # rows (query, head) of a streamed tile
# float32 multiplies in plain registers, where small tiles are the ones that do not spill.
FLOAT32_TILE_ROWS = 16


class QueryChunk(NamedTuple):
    """Queries whose partial outputs are in memory at once: some tokens of some KV heads.

    KV heads are counted over the batch: b * Hkv + h.
    """

    number: int
    first_head: int
    num_heads: int
    start: int  # position of the first query, a multiple of the block size
    first_csr_row: int  # of the CSR rows (query chunk, KV head, block)
    max_work_tiles: int  # upper bound of the CTAs; those beyond the true count exit


def affordable_queries(
    group: int, num_slots: int, width: int, element_size: int, num_streams: int
) -> int:
    """Queries of a chunk at least affordable, counted once for each of its KV heads."""
    query_bytes = group * num_slots * width * element_size
    return max(MIN_CHUNK_TOKENS, PARTIAL_BYTES // (num_streams * query_bytes))


def streams_for(group: int) -> int:
    """Query chunks in memory at once, where a call has so many."""
    return 1 if group <= FEW_HEADS else NUM_STREAMS


def longest_chunk(group: int, affordable: int, rows: int) -> int:
    """Queries of a chunk of one KV head, at most."""
    return min(affordable, max(MIN_CHUNK_TOKENS, rows // group))


def work_tile_tokens(group: int, entries: int) -> int:
    """Queries of a work tile: fewer where so many entries would be the work of few CTAs."""
    tokens = min(512, max(LEAST_WORK_TILE_TOKENS, WORK_TILE_ROWS // group))
    while tokens > LEAST_WORK_TILE_TOKENS and entries < LEAST_CTAS * tokens:
        tokens //= 2
    return max(tokens, LEAST_WORK_TILE_TOKENS)


def index_words(
    query: Tensor, value: Tensor, blocks: Tensor, block_size: int, query_offset: int
) -> int:
    """Length of the int32 tensor that keeps a call's index for its backward.

    An upper bound that grows with the length and never branches on it, so that fake tensors of
    symbolic shapes give it as well. `query_offset` is the largest there can be where a tensor
    holds it.
    """
    batch, heads, tokens, num_slots = blocks.shape
    group = query.shape[1] // heads
    width = max(query.shape[3], value.shape[3])
    affordable = affordable_queries(
        group, num_slots, width, query.element_size(), streams_for(group)
    )
    # All chunks are as large as the first, and the last may be nearly empty: along the tokens,
    # where less than a block is added to each, and along the KV heads, which at most doubles them.
    longest = longest_chunk(group, affordable, CHUNK_ROWS)
    chunks = (tokens + 2 * block_size) // longest + 2
    rows = 2 * batch * heads
    csr_rows = rows * chunks * ((query_offset + tokens) // block_size + 1)
    entries = rows * (tokens + 2 * chunks * block_size) * num_slots
    work_tiles = csr_rows + entries // LEAST_WORK_TILE_TOKENS + chunks * rows + 1
    return blocks.numel() + batch * heads * tokens + WORK_TILE_WORDS * work_tiles


@dataclass(frozen=True)
class SelectedPlan:
    """Everything about a call that shapes and dtypes decide.

    Queries sit at positions [query_offset, query_offset + num_queries). Tiles, chunks and blocks
    are aligned in positions, so that a query tile never straddles two blocks. `num_keys` leaves
    out the keys after the last query: nobody sees them.

    With `offset_tensor`, the device alone knows where each batch row's queries start. Positions
    are then counted from the start of the block of the row's first query, which may be any
    position of that block: `query_offset` is 0, and every row's queries lie in the same span.
    """

    batch: int
    query_heads: int
    kv_heads: int
    num_queries: int
    num_keys: int
    head_dim: int
    value_dim: int
    num_slots: int
    block_size: int
    num_initial: int
    num_local: int
    query_offset: int
    element_size: int
    shared_memory: int = SM90_SHARED_MEMORY  # bytes that one CTA may have
    in_series: bool = False  # query chunks one after the other, on one stream
    differentiable: bool = True  # the index is a backward's, too
    offset_tensor: bool = False  # each batch row has a query offset of its own, on the device

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        num_slots: int,
        block_size: int,
        num_initial_blocks: int,
        num_local_blocks: int,
        query_offset: int,
        *,
        differentiable: bool = True,
        offset_tensor: bool = False,
    ) -> SelectedPlan:
        """Plan of a call; ValueError if no tile fits the device's shared memory."""
        batch, query_heads, num_queries, head_dim = query.shape
        last_key = key.shape[2] if offset_tensor else query_offset + num_queries
        plan = cls(
            batch=batch,
            query_heads=query_heads,
            kv_heads=key.shape[1],
            num_queries=num_queries,
            num_keys=min(key.shape[2], last_key),
            head_dim=head_dim,
            value_dim=value.shape[3],
            num_slots=num_slots,
            block_size=block_size,
            num_initial=min(num_initial_blocks, MAX_DENSE_BLOCKS),
            num_local=min(num_local_blocks, MAX_DENSE_BLOCKS),
            query_offset=0 if offset_tensor else query_offset,
            element_size=query.element_size(),
            shared_memory=shared_memory_bytes(query.device),
            differentiable=differentiable,
            offset_tensor=offset_tensor,
        )
        plan = _kept(plan)
        plan.check_shared_memory(query.dtype)
        return plan

    def check_shared_memory(self, dtype: torch.dtype) -> None:
        needed = self.shared_bytes(self.least_rows, 1)
        if needed > self.shared_memory:
            raise ValueError(
                f"block_size={self.block_size} with head dims {self.head_dim} and "
                f"{self.value_dim} in {dtype} needs {needed} bytes of shared memory; "
                f"the device has {self.shared_memory}"
            )

    @cached_property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def num_blocks(self) -> int:
        return cdiv(self.num_keys, self.block_size)

    @cached_property
    def base(self) -> int:
        """Position where the first query chunk starts."""
        return self.query_offset // self.block_size * self.block_size

    @cached_property
    def span(self) -> int:
        """Positions that the chunks cover, a multiple of the block size."""
        return round_up(self._end - self.base, self.block_size)

    @cached_property
    def _end(self) -> int:
        """Position behind the last query, at most."""
        slack = self.block_size - 1 if self.offset_tensor else 0
        return self.query_offset + slack + self.num_queries

    @cached_property
    def all_heads(self) -> int:
        """KV heads of all batch rows."""
        return self.batch * self.kv_heads

    @cached_property
    def _affordable_queries(self) -> int:
        width = max(self.head_dim, self.value_dim)
        queries = affordable_queries(
            self.group, self.num_slots, width, self.element_size, self._affordable_streams
        )
        return 2 * queries if self.batch * self.num_queries > MANY_QUERIES else queries

    @cached_property
    def num_streams(self) -> int:
        """Query chunks in memory at once, each on a stream."""
        return min(self._affordable_streams, self.num_chunks)

    @cached_property
    def _affordable_streams(self) -> int:
        return 1 if self.in_series else streams_for(self.group)

    @cached_property
    def chunk_tokens(self) -> int:
        """Positions of one query chunk: the whole span or equal parts of it."""
        return round_up(cdiv(self.span, self._parts), self.block_size)

    @cached_property
    def _parts(self) -> int:
        """Query chunks of a KV head. Not by the span: what it has beyond the queries, less than
        two blocks, is no reason for one more.
        """
        rows = CHUNK_ROWS if self.differentiable else FORWARD_CHUNK_ROWS
        longest = longest_chunk(self.group, self._affordable_queries, rows)
        return cdiv(self.num_queries, longest)

    @cached_property
    def chunk_heads(self) -> int:
        """KV heads of one query chunk: as many as fit the buffer."""
        fitting = max(1, self._affordable_queries // cdiv(self.num_queries, self._parts))
        return cdiv(self.all_heads, cdiv(self.all_heads, fitting))

    @cached_property
    def chunks_per_head(self) -> int:
        return cdiv(self.span, self.chunk_tokens)

    @cached_property
    def num_chunks(self) -> int:
        return cdiv(self.all_heads, self.chunk_heads) * self.chunks_per_head

    @cached_property
    def csr_rows_per_chunk(self) -> int:
        return self.chunk_heads * self.num_blocks

    @cached_property
    def num_csr_rows(self) -> int:
        return self.num_chunks * self.csr_rows_per_chunk

    @cached_property
    def phases(self) -> int:
        """Pieces of a chunk whose entries a CSR row counts apart: it ascends from one to the next.

        Counters take at most a quarter of the entries' memory.
        """
        entries = self.all_heads * self.num_queries * self.num_slots
        affordable = min(MAX_PHASES, entries // (8 * self.num_csr_rows))
        return 1 << max(0, affordable.bit_length() - 1)

    @cached_property
    def num_counters(self) -> int:
        """Of the inverted index: (CSR row, whether the tile has a union, phase)."""
        return 2 * self.num_csr_rows * self.phases

    @cached_property
    def partial_rows(self) -> int:
        """Rows of the partial buffer: (KV head, token, top-k slot, query head)."""
        return self.chunk_heads * self.chunk_tokens * self.num_slots * self.group

    @cached_property
    def work_tile_tokens(self) -> int:
        """Queries of one work tile; longer CSR rows are split over several."""
        entries = self.all_heads * self.num_queries * self.num_slots
        return work_tile_tokens(self.group, entries)

    def segment_tokens(self, tokens: int) -> int:
        """Queries of a segment of an initial block, where local blocks have other CTAs."""
        segment = self.work_tile_tokens
        blocks = self.all_heads * self.num_initial
        while segment > LEAST_SEGMENT_TOKENS and tokens * blocks < LEAST_CTAS * segment:
            segment //= 2
        return segment

    def max_work_tiles(self, heads: int, start: int, work_tile_tokens: int) -> int:
        """Sum of ceil(length / work_tile_tokens) over the CSR rows of a chunk, at most."""
        stop = min(start + self.chunk_tokens, self._end)
        queries = min(stop - max(start, self.query_offset), self.num_queries)
        entries = heads * queries * self.num_slots
        seen_blocks = self.num_blocks if self.offset_tensor else cdiv(stop, self.block_size)
        csr_rows = heads * min(self.num_blocks, seen_blocks)
        return min(entries, csr_rows + entries // work_tile_tokens)

    def work_tiles_per_chunk(self, work_tile_tokens: int) -> int:
        """Bound of the work tiles of any chunk."""
        return max(1, *(chunk.max_work_tiles for chunk in self.chunks(work_tile_tokens)))

    def chunks(self, work_tile_tokens: int) -> tuple[QueryChunk, ...]:
        """All query chunks, in the order of their CSR rows."""
        return _chunks(self, work_tile_tokens)

    def shared_bytes(self, rows: int, stages: int) -> int:
        """Shared memory of the widest kernel, the gradient's: a block and tiles of queries."""
        columns = tile_width(self.head_dim) + tile_width(self.value_dim)
        tiles = (self.block_size + rows * stages) * columns
        return (tiles + rows * self.block_size) * self.element_size + 1024

    @cached_property
    def least_rows(self) -> int:
        return max(16, tile_width(self.group))

    @cached_property
    def tile_rows(self) -> int:
        """Rows of a streamed tile: what measured best, fewer where they must fit."""
        rows = FLOAT32_TILE_ROWS if self.element_size == 4 else TILE_ROWS
        while rows > self.least_rows and self.shared_bytes(rows, 1) > self.shared_memory:
            rows //= 2
        return max(rows, self.least_rows)

    @cached_property
    def combine_tokens(self) -> int:
        """Queries of a tile of the combine kernel: a power of two, which divides the block."""
        fitting = max(1, self.tile_rows // self.group)
        return min(self.block_size, 1 << (fitting.bit_length() - 1))

    @cached_property
    def combine_rows(self) -> int:
        return tile_width(self.combine_tokens * self.group)

    @cached_property
    def union_limit(self) -> int:
        return UNION_LIMIT

    @cached_property
    def union_capacity(self) -> int:
        """Blocks that the union of a tile can have, if it is to be attended."""
        return min(
            self.combine_tokens * self.num_slots,
            self.union_limit * self.num_slots // 4 + self.num_initial + self.num_local,
        )

    @cached_property
    def union_stages(self) -> int:
        """Blocks in flight in the union forward."""
        return 1

    @cached_property
    def union_registers(self) -> int | None:
        """Register limit of the union forward in Triton: four CTAs an SM."""
        return 128 if self.num_warps == 4 else None

    @cached_property
    def num_warps(self) -> int:
        wide = max(self.head_dim, self.value_dim) > 128 or self.block_size > 64
        return 8 if wide or self.element_size == 4 else 4

    @cached_property
    def stream_registers(self) -> int | None:
        """Register limit of the forward's kernels: three CTAs an SM, or four, no spills."""
        if self.num_warps != 4:
            return None
        is_narrow = max(self.head_dim, self.value_dim) <= NARROW and self.num_slots <= FEW_SLOTS
        return 128 if is_narrow else 168

    def combine_stages(self, width: int) -> int:
        """Partial outputs in flight in the combine and dQ kernels, rows of `width` columns."""
        tile_bytes = self.combine_rows * tile_width(width) * self.element_size
        return 5 if tile_bytes <= 1 << 14 else 3

    @cached_property
    def gradient_stages(self) -> int:
        """Tiles in flight in the backward, where a tile is queries and output gradients."""
        if self.num_warps != 4:
            return 1
        wanted = (3, 2) if max(self.head_dim, self.value_dim) <= NARROW else (2,)
        fitting = (x for x in wanted if self.shared_bytes(self.tile_rows, x) <= self.shared_memory)
        return next(fitting, 1)

    @cached_property
    def topk_gradient_stages(self) -> int:
        """For top-k blocks. A third stage holds entries: it pays where tiles have many."""
        many = self.gradient_stages > 1 and self.group <= FEW_HEADS
        return 3 if many else self.gradient_stages

    @cached_property
    def int64_offsets(self) -> bool:
        """Whether an offset within a batch row or the partial buffer needs 64 bits."""
        width = max(self.head_dim, self.value_dim)
        rows = max(self.num_queries * self.query_heads, self.partial_rows)
        return rows * width >= 2**31

    def index_constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel over the blocks takes."""
        return {
            "NUM_SLOTS": self.num_slots,
            "BLOCK_SIZE": self.block_size,
            "INITIAL": self.num_initial,
            "LOCAL": self.num_local,
        }

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel over query, key and value takes."""
        return {
            "GROUP": self.group,
            "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "INT64_OFFSETS": self.int64_offsets,
        }


# Shapes repeat from layer to layer and step to step: a plan is made once, its parts on demand.


@lru_cache(maxsize=256)
def _kept(plan: SelectedPlan) -> SelectedPlan:
    """The first plan equal to this one, which knows what was asked of it before."""
    return plan


@lru_cache(maxsize=256)
def _chunks(plan: SelectedPlan, work_tile_tokens: int) -> tuple[QueryChunk, ...]:
    chunks = []
    for number in range(plan.num_chunks):
        first_head = number // plan.chunks_per_head * plan.chunk_heads
        num_heads = min(plan.chunk_heads, plan.all_heads - first_head)
        start = plan.base + number % plan.chunks_per_head * plan.chunk_tokens
        chunk = QueryChunk(
            number=number,
            first_head=first_head,
            num_heads=num_heads,
            start=start,
            first_csr_row=number * plan.csr_rows_per_chunk,
            max_work_tiles=plan.max_work_tiles(num_heads, start, work_tile_tokens),
        )
        chunks.append(chunk)
    return tuple(chunks)
