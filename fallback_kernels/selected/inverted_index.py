"""The inverted index: which queries chose a KV block, in compressed sparse rows.

A query's choices split in two. Those among the first `num_initial` and the last `num_local`
blocks up to its own are dense candidates: almost every query has them, so they are computed tile
by tile without an index. Whether a query really chose them is a bit of its summary; nothing is
taken for granted. All other choices are free: they go into one list per (window of queries,
batch row, KV head, block), and the programs of the KV-major kernels each take a chunk of a list.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.selected.block_union import UnionLists
from nsa_flex.fallback_kernels.selected.config import ITEM_WORDS, SelectedPlan
from nsa_flex.fallback_kernels.selected.tiles import split_choices

INDEX_TOKENS = 32  # queries per program of the index kernels
ITEMS = 128  # items per program that writes their records


class SelectedIndex(NamedTuple):
    """Lists of free choices; int32 throughout.

    An entry is query * n + slot, where slot counts the free choices of that query: it names the
    query and the place of its partial result at once.
    """

    entries: Tensor  # (B * Hkv * Sq * n,), grouped by list; the tail is unused
    # (windows, bound, 4): list, first entry, entry behind the last, and the list's first entry of
    # a tile that has a union, which all such entries follow; empty: 0, 0, 0, 0
    items: Tensor
    summary: Tensor  # (B, Hkv, Sq): bits 0-15 dense candidates chosen, bits 24- free choices


@triton.jit
def counter_of(
    block,
    batch_head,
    position,
    united,
    base,
    window_tokens,
    window_heads,
    windows_per_head,
    phases,
    phase_tokens,
    num_blocks,
):
    """Number of the counter of a free choice: (list, whether its tile has a union, phase)."""
    past = (position - base) % window_tokens
    part = (position - base) // window_tokens
    window = (batch_head // window_heads) * windows_per_head + part
    head = window * window_heads + batch_head % window_heads
    list_number = (head * num_blocks)[:, None] + block
    return (list_number * 2 + united[:, None]) * phases + (past // phase_tokens)[:, None]


@triton.jit
def in_union(sizes_ptr, batch_head, row_ok, position, base, span, TILE: tl.constexpr):
    """Whether queries belong to tiles that have a union."""
    tile = batch_head * (span // TILE) + (position - base) // TILE
    return tl.load(sizes_ptr + tile, mask=row_ok, other=-1) >= 0


@triton.jit(do_not_specialize=["phases"])
def count_kernel(
    blocks_ptr,
    counts_ptr,
    ranks_ptr,
    summary_ptr,
    sizes_ptr,
    batch_heads,
    num_queries,
    query_offset,
    base,
    span,
    window_tokens,
    window_heads,
    windows_per_head,
    phases,
    phase_tokens,
    num_blocks,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    EVERY: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Summaries of all queries, how many entries each counter has, and each entry's rank there.

    Entries of tiles with a union are counted only if EVERY entry is to be listed.
    Ranks come from an atomic counter, in no fixed order. ORDERED leaves the ranking to a stable
    sort: it writes the counter of every entry into `ranks_ptr` and no counts.
    """
    # Neighbouring programs work for different heads: fewer of them meet at one counter.
    batch_head = tl.program_id(0) % batch_heads
    index = tl.program_id(0) // batch_heads * TOKENS + tl.arange(0, TOKENS)
    row_ok = index < num_queries
    row = batch_head * num_queries + index
    position = index + query_offset
    block, free, slot, summary = split_choices(
        blocks_ptr, row, row_ok, position, NUM_SLOTS, SLOT_COLUMNS, BLOCK_SIZE, INITIAL, LOCAL
    )
    tl.store(summary_ptr + row, summary, mask=row_ok)
    united = index < 0
    if not ORDERED:
        united = in_union(sizes_ptr, batch_head, row_ok, position, base, span, TILE)
    if EVERY or tl.min(united.to(tl.int32), 0) == 0:
        counter = counter_of(
            block, batch_head, position, united.to(tl.int32), base, window_tokens, window_heads,
            windows_per_head, phases, phase_tokens, num_blocks,
        )  # fmt: skip
        place = row[:, None] * NUM_SLOTS + slot
        if ORDERED:
            tl.store(ranks_ptr + place, counter, mask=free)
        else:
            if not EVERY:
                free = free & ~united[:, None]
            rank = tl.atomic_add(counts_ptr + counter, 1, mask=free, sem="relaxed")
            tl.store(ranks_ptr + place, rank, mask=free)


@triton.jit(do_not_specialize=["phases"])
def scatter_kernel(
    blocks_ptr,
    starts_ptr,
    ranks_ptr,
    entries_ptr,
    sizes_ptr,
    batch_heads,
    num_queries,
    query_offset,
    base,
    span,
    window_tokens,
    window_heads,
    windows_per_head,
    phases,
    phase_tokens,
    num_blocks,
    NUM_SLOTS: tl.constexpr,
    SLOT_COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    EVERY: tl.constexpr,
):
    """Write each entry to its place: start of its counter's entries plus its rank."""
    batch_head = tl.program_id(0) % batch_heads
    index = tl.program_id(0) // batch_heads * TOKENS + tl.arange(0, TOKENS)
    row_ok = index < num_queries
    row = batch_head * num_queries + index
    position = index + query_offset
    united = in_union(sizes_ptr, batch_head, row_ok, position, base, span, TILE)
    if EVERY or tl.min(united.to(tl.int32), 0) == 0:
        block, free, slot, _ = split_choices(
            blocks_ptr, row, row_ok, position, NUM_SLOTS, SLOT_COLUMNS, BLOCK_SIZE, INITIAL, LOCAL
        )
        counter = counter_of(
            block, batch_head, position, united.to(tl.int32), base, window_tokens, window_heads,
            windows_per_head, phases, phase_tokens, num_blocks,
        )  # fmt: skip
        if not EVERY:
            free = free & ~united[:, None]
        rank = tl.load(ranks_ptr + row[:, None] * NUM_SLOTS + slot, mask=free, other=0)
        start = tl.load(starts_ptr + counter, mask=free, other=0)
        tl.store(entries_ptr + start + rank, index[:, None] * NUM_SLOTS + slot, mask=free)


@triton.jit(do_not_specialize=["phases"])
def item_kernel(
    starts_ptr,
    item_starts_ptr,
    items_ptr,
    bound,
    lists_per_window,
    chunk,
    steps,
    phases,
    ITEMS: tl.constexpr,
):
    """Cut the lists of one window into chunks; the records after the last item stay empty."""
    window = tl.program_id(1)
    index = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    first = window * lists_per_window
    item = tl.load(item_starts_ptr + first) + index
    some = item < tl.load(item_starts_ptr + first + lists_per_window)
    # The last list that starts at or before the item: a binary search.
    low = tl.zeros([ITEMS], tl.int32) + first
    high = low + lists_per_window
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(item_starts_ptr + middle) <= item
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    counter = starts_ptr + low * (2 * phases)
    start = tl.load(counter)
    united = tl.load(counter + phases)
    stop = tl.load(counter + 2 * phases)
    start += (item - tl.load(item_starts_ptr + low)) * chunk
    stop = tl.minimum(start + chunk, stop)
    record = items_ptr + (window * bound + index) * 4
    inside = index < bound
    tl.store(record, tl.where(some, low, 0), mask=inside)
    tl.store(record + 1, tl.where(some, start, 0), mask=inside)
    tl.store(record + 2, tl.where(some, stop, 0), mask=inside)
    tl.store(record + 3, tl.where(some, united, 0), mask=inside)


def _starts(counts: Tensor) -> Tensor:
    """Exclusive running sum with the total at the end."""
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    return starts


def index_views(
    plan: SelectedPlan, chunk: int, storage: Tensor | None, like: Tensor
) -> SelectedIndex:
    """The parts of an index in `storage`, int32 of `index_words`; None: in new memory."""
    batch_heads = plan.batch * plan.kv_heads
    shapes = (
        (batch_heads * plan.num_queries * plan.num_slots,),
        (plan.num_windows, plan.items_per_window(chunk), ITEM_WORDS),
        (plan.batch, plan.kv_heads, plan.num_queries),
    )
    sizes = [math.prod(shape) for shape in shapes]
    if storage is None:
        storage = torch.empty(sum(sizes), dtype=torch.int32, device=like.device)
    assert storage.numel() >= sum(sizes)
    parts = storage[: sum(sizes)].split(sizes)
    return SelectedIndex(*(x.view(shape) for x, shape in zip(parts, shapes, strict=True)))


def build_index(
    plan: SelectedPlan,
    blocks: Tensor,
    chunk: int,
    *,
    unions: UnionLists | None = None,
    every: bool = True,
    storage: Tensor | None = None,
) -> SelectedIndex:
    """Invert `blocks` (B, Hkv, Sq, n) on its device, without a look at its values on the host.

    Args:
        plan: sizes; `plan.num_initial` and `plan.num_local` say which blocks are no list entries.
        blocks: int32, contiguous.
        chunk: entries per item.
        unions: of the tiles. None: lists ascend by query, the same in every run, which costs a
            sort of all entries; no tile counts as having a union.
        every: list the entries of tiles with a union as well, which only a backward needs.
        storage: memory for the index, see `index_views`.
    """
    index = index_views(plan, chunk, storage, blocks)
    num_counters = 2 * plan.num_lists * plan.phases
    batch_heads = plan.batch * plan.kv_heads
    grid = (triton.cdiv(plan.num_queries, INDEX_TOKENS) * batch_heads,)
    sizes = (
        batch_heads,
        plan.num_queries,
        plan.query_offset,
        plan.base,
        plan.span,
        plan.window_tokens,
        plan.window_heads,
        plan.windows_per_head,
        plan.phases,
        triton.cdiv(plan.window_tokens, plan.phases),
        plan.num_blocks,
    )
    constants = {
        **plan.index_constants(),
        "TOKENS": INDEX_TOKENS,
        "TILE": plan.merge_tokens,
        "EVERY": every,
    }
    if unions is None:
        counters = torch.full_like(blocks, num_counters)
        ordered = (blocks, counters, counters, index.summary, counters)
        count_kernel[grid](*ordered, *sizes, **constants, ORDERED=True)
        starts = _sort_entries(plan, counters, num_counters, index.entries)
    else:
        counts = torch.zeros(num_counters, dtype=torch.int32, device=blocks.device)
        ranks = torch.empty_like(blocks)
        atomic = (blocks, counts, ranks, index.summary, unions.sizes)
        count_kernel[grid](*atomic, *sizes, **constants, ORDERED=False)
        starts = _starts(counts)
        scattered = (blocks, starts, ranks, index.entries, unions.sizes)
        scatter_kernel[grid](*scattered, *sizes, **constants)
    _cut_lists(plan, starts, chunk, index.items)
    return index


def _cut_lists(plan: SelectedPlan, starts: Tensor, chunk: int, items: Tensor) -> None:
    """Records of all items of the lists whose counters' entries begin at `starts`."""
    lengths = starts[:: 2 * plan.phases].diff()
    bound = items.shape[1]
    item_kernel[(triton.cdiv(bound, ITEMS), plan.num_windows)](
        starts,
        _starts((lengths + (chunk - 1)) // chunk),
        items,
        bound,
        plan.lists_per_window,
        chunk,
        plan.lists_per_window.bit_length(),
        plan.phases,
        ITEMS=ITEMS,
    )


def _sort_entries(
    plan: SelectedPlan, counters: Tensor, num_counters: int, entries: Tensor
) -> Tensor:
    """Fill `entries` from the counter of every entry, by a stable sort; starts of the counters."""
    in_order, places = torch.sort(counters.flatten(), stable=True)
    entries.copy_(places % (plan.num_queries * plan.num_slots))
    numbers = torch.arange(num_counters + 1, dtype=torch.int32, device=counters.device)
    return torch.searchsorted(in_order, numbers, out_int32=True)
