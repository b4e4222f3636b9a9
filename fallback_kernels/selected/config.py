"""Sizes of the selection kernels' grids, tiles and buffers: shapes in, plain integers out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import SM90_SHARED_MEMORY, shared_memory_bytes
from nsa_flex.fallback_kernels.common.tiles import round_up, tile_width

PARTIAL_BYTES = 1 << 30  # partial results in memory at once, twice as much for many queries
WINDOW_LANES = 2  # windows in memory at once, each on a stream; one for groups of few heads
MANY_QUERIES = 1 << 16
# Rows (query, head) of one KV head in a window, where that many fit: the lists of shorter windows
# leave tiles half empty and programs with little to do. Those of longer ones gather queries from
# more memory than the cache holds, which the backward, with more to do for each, minds less.
WINDOW_ROWS = 1 << 17
FORWARD_WINDOW_ROWS = 1 << 16
MIN_WINDOW_TOKENS = 512
MAX_PHASES = 16
MAX_DENSE_BLOCKS = 8  # initial or local; bits 0-15 of a query's summary
CHUNK_ROWS = 4096  # query rows one program streams past one KV block
INITIAL_CHUNK_TOKENS = 256  # queries per program that reduce into one initial block
ITEM_WORDS = 4  # see `SelectedIndex`
# A tile walks the union of its free choices where that has at most so many quarters of a block
# for every free choice of a query: 42 blocks at 13 free choices. 0: none ever does.
UNION_LIMIT = 13
FEW_HEADS = 4  # a group, whose tiles have many entries and whose windows are few
TILE_ROWS = 64  # rows (query, head) of a streamed tile
# float32 multiplies in plain registers, where small tiles are the ones that do not spill.
FLOAT32_TILE_ROWS = 16


class Window(NamedTuple):
    """Queries whose partial results are in memory at once: some tokens of some KV heads.

    KV heads are counted over the batch: b * Hkv + h.
    """

    number: int
    first_head: int
    num_heads: int
    start: int  # position of the first query, a multiple of the block size
    first_list: int  # of the lists (window, KV head, block)
    max_items: int  # upper bound of the programs; those beyond the true count leave at once


def affordable_queries(
    group: int, num_slots: int, width: int, element_size: int, lanes: int
) -> int:
    """Queries of a window at least affordable, counted once for each of its KV heads."""
    query_bytes = group * num_slots * width * element_size
    return max(MIN_WINDOW_TOKENS, PARTIAL_BYTES // (lanes * query_bytes))


def lanes_for(group: int) -> int:
    """Windows in memory at once, where a call has so many."""
    return 1 if group <= FEW_HEADS else WINDOW_LANES


def longest_window(group: int, affordable: int, rows: int) -> int:
    """Queries of a window of one KV head, at most."""
    return min(affordable, max(MIN_WINDOW_TOKENS, rows // group))


def chunk_tokens(group: int) -> int:
    return min(512, max(128, CHUNK_ROWS // group))


def index_words(
    query: Tensor, value: Tensor, blocks: Tensor, block_size: int, query_offset: int
) -> int:
    """Length of the int32 tensor that keeps a call's index for its backward.

    An upper bound that grows with the length and never branches on it, so that fake tensors of
    symbolic shapes give it as well.
    """
    batch, heads, tokens, num_slots = blocks.shape
    group = query.shape[1] // heads
    width = max(query.shape[3], value.shape[3])
    affordable = affordable_queries(
        group, num_slots, width, query.element_size(), lanes_for(group)
    )
    # All windows are as large as the first, and the last may be nearly empty: along the tokens,
    # where less than a block is added to each, and along the KV heads, which at most doubles them.
    longest = longest_window(group, affordable, WINDOW_ROWS)
    windows = (tokens + 2 * block_size) // longest + 2
    rows = 2 * batch * heads
    lists = rows * windows * ((query_offset + tokens) // block_size + 1)
    entries = rows * (tokens + 2 * windows * block_size) * num_slots
    items = lists + entries // chunk_tokens(group) + windows * rows + 1
    return blocks.numel() + batch * heads * tokens + ITEM_WORDS * items


@dataclass(frozen=True)
class SelectedPlan:
    """Everything about a call that shapes and dtypes decide.

    Queries sit at positions [query_offset, query_offset + num_queries). Tiles, windows and blocks
    are aligned in positions, so that a tile of the merge never straddles two blocks. `num_keys`
    leaves out the keys after the last query: nobody sees them.
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
    shared_memory: int = SM90_SHARED_MEMORY  # bytes that one program may have
    in_series: bool = False  # windows one after the other, on one stream
    differentiable: bool = True  # the lists are a backward's, too

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Tensor,
        block_size: int,
        num_initial_blocks: int,
        num_local_blocks: int,
        query_offset: int,
        *,
        differentiable: bool = True,
    ) -> SelectedPlan:
        """Plan of a call; ValueError if no tile fits the device's shared memory."""
        batch, query_heads, num_queries, head_dim = query.shape
        plan = cls(
            batch=batch,
            query_heads=query_heads,
            kv_heads=key.shape[1],
            num_queries=num_queries,
            num_keys=min(key.shape[2], query_offset + num_queries),
            head_dim=head_dim,
            value_dim=value.shape[3],
            num_slots=blocks.shape[3],
            block_size=block_size,
            num_initial=min(num_initial_blocks, MAX_DENSE_BLOCKS),
            num_local=min(num_local_blocks, MAX_DENSE_BLOCKS),
            query_offset=query_offset,
            element_size=query.element_size(),
            shared_memory=shared_memory_bytes(query.device),
            differentiable=differentiable,
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
        return triton.cdiv(self.num_keys, self.block_size)

    @cached_property
    def base(self) -> int:
        """Position where the first window starts."""
        return self.query_offset // self.block_size * self.block_size

    @cached_property
    def span(self) -> int:
        """Positions that the windows cover, a multiple of the block size."""
        return round_up(self.query_offset + self.num_queries - self.base, self.block_size)

    @cached_property
    def all_heads(self) -> int:
        """KV heads of all batch rows."""
        return self.batch * self.kv_heads

    @cached_property
    def _affordable_queries(self) -> int:
        width = max(self.head_dim, self.value_dim)
        queries = affordable_queries(
            self.group, self.num_slots, width, self.element_size, self._affordable_lanes
        )
        return 2 * queries if self.batch * self.num_queries > MANY_QUERIES else queries

    @cached_property
    def window_lanes(self) -> int:
        """Windows in memory at once, each on a stream."""
        return min(self._affordable_lanes, self.num_windows)

    @cached_property
    def _affordable_lanes(self) -> int:
        return 1 if self.in_series else lanes_for(self.group)

    @cached_property
    def window_tokens(self) -> int:
        """Positions of one window: the whole span or equal parts of it."""
        rows = WINDOW_ROWS if self.differentiable else FORWARD_WINDOW_ROWS
        longest = longest_window(self.group, self._affordable_queries, rows)
        count = triton.cdiv(self.span, longest)
        return round_up(triton.cdiv(self.span, count), self.block_size)

    @cached_property
    def window_heads(self) -> int:
        """KV heads of one window: as many as fit the buffer."""
        fitting = max(1, self._affordable_queries // self.window_tokens)
        return triton.cdiv(self.all_heads, triton.cdiv(self.all_heads, fitting))

    @cached_property
    def windows_per_head(self) -> int:
        return triton.cdiv(self.span, self.window_tokens)

    @cached_property
    def num_windows(self) -> int:
        return triton.cdiv(self.all_heads, self.window_heads) * self.windows_per_head

    @cached_property
    def lists_per_window(self) -> int:
        return self.window_heads * self.num_blocks

    @cached_property
    def num_lists(self) -> int:
        return self.num_windows * self.lists_per_window

    @cached_property
    def phases(self) -> int:
        """Parts of a window whose entries a list counts apart: it ascends from one to the next.

        Counters take at most a quarter of the entries' memory.
        """
        entries = self.all_heads * self.num_queries * self.num_slots
        affordable = min(MAX_PHASES, entries // (8 * self.num_lists))
        return 1 << max(0, affordable.bit_length() - 1)

    @cached_property
    def partial_rows(self) -> int:
        """Rows of the partial buffer: (KV head, token, slot, query head)."""
        return self.window_heads * self.window_tokens * self.num_slots * self.group

    @cached_property
    def chunk_tokens(self) -> int:
        """Queries of one item; longer lists are split over several."""
        return chunk_tokens(self.group)

    def max_items(self, heads: int, start: int, chunk: int) -> int:
        """Sum of ceil(list length / chunk) over the lists of a window, at most."""
        stop = min(start + self.window_tokens, self.query_offset + self.num_queries)
        entries = heads * (stop - max(start, self.query_offset)) * self.num_slots
        lists = heads * min(self.num_blocks, triton.cdiv(stop, self.block_size))
        return min(entries, lists + entries // chunk)

    def items_per_window(self, chunk: int) -> int:
        """Room for the items of any window."""
        return max(1, *(window.max_items for window in self.windows(chunk)))

    def windows(self, chunk: int) -> tuple[Window, ...]:
        """All windows, in the order of their lists."""
        return _windows(self, chunk)

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
    def merge_tokens(self) -> int:
        """Queries of a merge tile: a power of two, so that it divides the block."""
        fitting = max(1, self.tile_rows // self.group)
        return min(self.block_size, 1 << (fitting.bit_length() - 1))

    @cached_property
    def merge_rows(self) -> int:
        return tile_width(self.merge_tokens * self.group)

    @cached_property
    def union_limit(self) -> int:
        return UNION_LIMIT

    @cached_property
    def union_capacity(self) -> int:
        """Blocks that the union of a tile can have, if it is to be walked."""
        return min(
            self.merge_tokens * self.num_slots,
            self.union_limit * self.num_slots // 4 + self.num_initial + self.num_local,
        )

    @cached_property
    def union_stages(self) -> int:
        """Blocks in flight in the walk of a union."""
        return 1

    @cached_property
    def union_registers(self) -> int | None:
        """Register limit of the walk in Triton: four programs a multiprocessor."""
        return 128 if self.num_warps == 4 else None

    @cached_property
    def num_warps(self) -> int:
        wide = max(self.head_dim, self.value_dim) > 128 or self.block_size > 64
        return 8 if wide or self.element_size == 4 else 4

    @cached_property
    def stream_registers(self) -> int | None:
        """Register limit of the forward's kernels: three programs a multiprocessor, no spills."""
        return 168 if self.num_warps == 4 else None

    def merge_stages(self, width: int) -> int:
        """Partial results in flight in the merges of rows of `width` columns."""
        tile_bytes = self.merge_rows * tile_width(width) * self.element_size
        return 5 if tile_bytes <= 1 << 14 else 3

    @cached_property
    def gradient_stages(self) -> int:
        """Tiles in flight in the backward, where a tile is queries and output gradients."""
        fits = self.shared_bytes(self.tile_rows, 2) <= self.shared_memory
        return 2 if fits and self.num_warps == 4 else 1

    @cached_property
    def list_gradient_stages(self) -> int:
        """The same for lists. A third stage holds entries alone; it pays where tiles have many."""
        many = self.gradient_stages == 2 and self.group <= FEW_HEADS
        return 3 if many else self.gradient_stages

    @cached_property
    def wide(self) -> bool:
        """Whether an offset within a batch row or the partial buffer needs 64 bits."""
        width = max(self.head_dim, self.value_dim)
        rows = max(self.num_queries * self.query_heads, self.partial_rows)
        return rows * width >= 2**31

    def index_constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel over the choices takes."""
        return {
            "NUM_SLOTS": self.num_slots,
            "SLOT_COLUMNS": tile_width(self.num_slots),
            "BLOCK_SIZE": self.block_size,
            "INITIAL": self.num_initial,
            "LOCAL": self.num_local,
        }

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel over query, key and value takes."""
        return {
            "GROUP": self.group,
            "NUM_SLOTS": self.num_slots,
            "BLOCK_SIZE": self.block_size,
            "HEAD_DIM": self.head_dim,
            "HEAD_COLUMNS": tile_width(self.head_dim),
            "VALUE_DIM": self.value_dim,
            "VALUE_COLUMNS": tile_width(self.value_dim),
            "PRECISION": "ieee" if self.element_size == 4 else "tf32",
            "WIDE": self.wide,
        }


# Shapes repeat from layer to layer and step to step: a plan is made once, its parts on demand.


@lru_cache(maxsize=256)
def _kept(plan: SelectedPlan) -> SelectedPlan:
    """The first plan equal to this one, which knows what was asked of it before."""
    return plan


@lru_cache(maxsize=256)
def _windows(plan: SelectedPlan, chunk: int) -> tuple[Window, ...]:
    windows = []
    for number in range(plan.num_windows):
        first_head = number // plan.windows_per_head * plan.window_heads
        num_heads = min(plan.window_heads, plan.all_heads - first_head)
        start = plan.base + number % plan.windows_per_head * plan.window_tokens
        window = Window(
            number=number,
            first_head=first_head,
            num_heads=num_heads,
            start=start,
            first_list=number * plan.lists_per_window,
            max_items=plan.max_items(num_heads, start, chunk),
        )
        windows.append(window)
    return tuple(windows)
