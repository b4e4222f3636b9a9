"""The inverted index: which queries selected a KV block, in compressed sparse rows (CSR).

A query's blocks split in two. Almost every query has the first `num_initial` blocks and the last
`num_local` up to its own, so that these need no index. Whether a query really selected one of them
is a bit of its bitmask; nothing is taken for granted. All others are its top-k blocks: there is a
CSR row of queries for every (query chunk, batch row, KV head, block), and a CTA of the KV-major
kernels takes one work tile, a piece of a row.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2, width_of
from nsa_flex.fallback_kernels.selected.block_union import BlockUnions
from nsa_flex.fallback_kernels.selected.config import WORK_TILE_WORDS, SelectedPlan
from nsa_flex.fallback_kernels.selected.tiles import row_offset, split_blocks

INDEX_TOKENS = tl.constexpr(32)  # queries of one CTA of the index kernels
TILES_PER_CTA = tl.constexpr(128)  # work tiles whose records one CTA writes
STARTS_TILE = 2048  # counters that a CTA of `index_starts_kernel` adds at a time
TOTALS_TILE = 256  # totals of earlier CTAs that it adds at a time
ONE_CTA_COUNTERS = 1 << 14  # up to so many, one CTA takes less than two launches
MANY_COUNTERS = 1 << 20  # up to so many, two launches take less than PyTorch's five operators
# Of the call's lengths no kernel needs to know what divides them: each answer would compile anew.
LENGTHS = (
    *("num_queries", "query_offset", "base", "span", "chunk_tokens", "chunk_heads"),
    *("chunks_per_head", "phases", "phase_tokens", "num_blocks"),
)
WORK_TILE_LENGTHS = ("bound", "csr_rows_per_chunk", "steps")


class SelectedIndex(NamedTuple):
    """CSR rows of queries by top-k block; int32 throughout.

    An entry is query * n + slot, where slot counts the top-k blocks of that query: it names the
    query and the slot of its partial output at once.
    """

    entries: Tensor  # (B * Hkv * Sq * n,), grouped by CSR row; the tail is unused
    # (query chunks, bound, 4): CSR row, first entry, entry behind the last, and the row's first
    # entry of a query tile that has a union, which all such entries follow; empty: 0, 0, 0, 0
    work_tiles: Tensor
    bitmask: Tensor  # (B, Hkv, Sq): see `split_blocks`


@triton.jit
def counter_of(
    block,
    batch_head,
    position,
    has_union,
    base,
    chunk_tokens,
    chunk_heads,
    chunks_per_head,
    phases,
    phase_tokens,
    num_blocks,
):
    """Counter of a top-k block of a query: (CSR row, whether its tile has a union, phase)."""
    past = (position - base) % chunk_tokens
    chunk_of_head = (position - base) // chunk_tokens
    chunk = (batch_head // chunk_heads) * chunks_per_head + chunk_of_head
    head = chunk * chunk_heads + batch_head % chunk_heads
    csr_row = (head * num_blocks)[:, None] + block
    return (csr_row * 2 + has_union[:, None]) * phases + (past // phase_tokens)[:, None]


@triton.jit
def are_indexed(
    is_topk, has_union, kinds_ptr, batch, index, num_queries,
    ORDERED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Of `is_topk` [BLOCK_TOKENS, PADDED_SLOTS], entries that somebody reads.

    Of short documents only a forward does, where a tile has no union.
    """
    short = has_kind(kinds_ptr, batch, index, num_queries, SHORT_DOCUMENT, BLOCK_SIZE)
    kept = ~short  # [BLOCK_TOKENS]
    if not ORDERED:
        kept = kept | (has_union == 0)
    return is_topk & kept[:, None]


@triton.jit
def tiles_have_union(
    sizes_ptr, batch_head, row_mask, position, base, span, TILE_TOKENS: tl.constexpr
):
    """Whether queries belong to tiles that have a union, or of short queries."""
    tile = batch_head * (span // TILE_TOKENS) + (position - base) // TILE_TOKENS
    return tl.load(sizes_ptr + tile, mask=row_mask, other=-1) != -1


@recordable
@triton.jit(do_not_specialize=LENGTHS)
def index_count_kernel(
    blocks_ptr,
    offsets_ptr,
    counts_ptr,
    ranks_ptr,
    bitmask_ptr,
    sizes_ptr,
    batch_heads,
    num_queries,
    query_offset,
    base,
    span,
    chunk_tokens,
    chunk_heads,
    chunks_per_head,
    phases,
    phase_tokens,
    num_blocks,
    kinds_ptr,
    kv_heads,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ALL_ENTRIES: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Bitmasks of all queries, how many entries each counter has, and each entry's rank there.

    Without ALL_ENTRIES, entries of tiles with a union are not counted. Ranks come from an atomic
    counter, in no fixed order. ORDERED leaves the ranking to a stable sort: it writes the counter
    of every entry into `ranks_ptr` and no counts.
    """
    PADDED_SLOTS: tl.constexpr = width_of(NUM_SLOTS)
    # Neighbouring CTAs work for different heads: fewer of them contend for one counter.
    batch_head = tl.program_id(0) % batch_heads
    query_offset, base = row_offset(offsets_ptr, batch_head, query_offset, base, BLOCK_SIZE)
    index = tl.program_id(0) // batch_heads * INDEX_TOKENS + tl.arange(0, INDEX_TOKENS)
    row_mask = index < num_queries  # [INDEX_TOKENS]
    row = batch_head * num_queries + index
    position = index + query_offset
    block, is_topk, slot, bitmask = split_blocks(
        blocks_ptr, row, row_mask, position, NUM_SLOTS, PADDED_SLOTS, BLOCK_SIZE, INITIAL, LOCAL
    )
    tl.store(bitmask_ptr + row, bitmask, mask=row_mask)
    has_union = index < 0
    if not ORDERED:
        has_union = tiles_have_union(
            sizes_ptr, batch_head, row_mask, position, base, span, TILE_TOKENS
        )
    if ALL_ENTRIES or tl.min(has_union.to(tl.int32), 0) == 0:
        counter = counter_of(  # [INDEX_TOKENS, PADDED_SLOTS]
            block, batch_head, position, has_union.to(tl.int32), base, chunk_tokens, chunk_heads,
            chunks_per_head, phases, phase_tokens, num_blocks,
        )  # fmt: skip
        offset = row[:, None] * NUM_SLOTS + slot
        if kinds_ptr is not None:
            is_topk = are_indexed(
                is_topk, has_union, kinds_ptr, batch_head // kv_heads, index, num_queries,
                ORDERED, BLOCK_SIZE,
            )  # fmt: skip
        if ORDERED:
            tl.store(ranks_ptr + offset, counter, mask=is_topk)
        else:
            if not ALL_ENTRIES:
                is_topk = is_topk & ~has_union[:, None]
            rank = tl.atomic_add(
                counts_ptr + counter, 1, mask=is_topk, sem="relaxed"
            )  # [INDEX_TOKENS, PADDED_SLOTS]
            tl.store(ranks_ptr + offset, rank, mask=is_topk)


@triton.jit
def write_work_tiles(
    starts_ptr, work_tile_starts_ptr, work_tiles_ptr, cta, chunk, bound, csr_rows_per_chunk,
    work_tile_tokens, steps, phases,
):  # fmt: skip
    """Cut the CSR rows of a query chunk into work tiles; records after the last one are empty."""
    index = cta * TILES_PER_CTA + tl.arange(0, TILES_PER_CTA)
    first = chunk * csr_rows_per_chunk
    work_tile = tl.load(work_tile_starts_ptr + first) + index
    some = work_tile < tl.load(work_tile_starts_ptr + first + csr_rows_per_chunk)
    # The last CSR row that starts at or before the work tile: a binary search.
    low = tl.zeros([TILES_PER_CTA], tl.int32) + first  # [TILES_PER_CTA]
    high = low + csr_rows_per_chunk
    for _ in range(steps):
        middle = (low + high) // 2
        below = tl.load(work_tile_starts_ptr + middle) <= work_tile
        low = tl.where(below, middle, low)
        high = tl.where(below, high, middle)
    counter_ptr = starts_ptr + low * (2 * phases)  # [TILES_PER_CTA]
    start = tl.load(counter_ptr)
    union_start = tl.load(counter_ptr + phases)
    stop = tl.load(counter_ptr + 2 * phases)
    start += (work_tile - tl.load(work_tile_starts_ptr + low)) * work_tile_tokens
    stop = tl.minimum(start + work_tile_tokens, stop)
    record = work_tiles_ptr + (chunk * bound + index) * 4
    inside = index < bound
    tl.store(record, tl.where(some, low, 0), mask=inside)
    tl.store(record + 1, tl.where(some, start, 0), mask=inside)
    tl.store(record + 2, tl.where(some, stop, 0), mask=inside)
    tl.store(record + 3, tl.where(some, union_start, 0), mask=inside)


@recordable
@triton.jit(do_not_specialize=[*LENGTHS, *WORK_TILE_LENGTHS, "work_tile_ctas"])
def index_scatter_kernel(
    blocks_ptr,
    offsets_ptr,
    starts_ptr,
    ranks_ptr,
    entries_ptr,
    sizes_ptr,
    work_tile_starts_ptr,
    work_tiles_ptr,
    bound,
    csr_rows_per_chunk,
    work_tile_tokens,
    steps,
    work_tile_ctas,
    batch_heads,
    num_queries,
    query_offset,
    base,
    span,
    chunk_tokens,
    chunk_heads,
    chunks_per_head,
    phases,
    phase_tokens,
    num_blocks,
    kinds_ptr,
    kv_heads,
    NUM_SLOTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ALL_ENTRIES: tl.constexpr,
):
    """Write each entry at the start of its counter's entries plus its rank.

    The first CTAs, `work_tile_ctas` for each query chunk, cut its CSR rows into work tiles.
    """
    PADDED_SLOTS: tl.constexpr = width_of(NUM_SLOTS)
    cta = tl.program_id(0)
    scatter_ctas = tl.cdiv(num_queries, INDEX_TOKENS) * batch_heads
    cut_ctas = tl.num_programs(0) - scatter_ctas
    if cta < cut_ctas:
        write_work_tiles(
            starts_ptr, work_tile_starts_ptr, work_tiles_ptr,
            cta % work_tile_ctas, cta // work_tile_ctas, bound, csr_rows_per_chunk,
            work_tile_tokens, steps, phases,
        )  # fmt: skip
        return
    cta -= cut_ctas
    batch_head = cta % batch_heads
    query_offset, base = row_offset(offsets_ptr, batch_head, query_offset, base, BLOCK_SIZE)
    index = cta // batch_heads * INDEX_TOKENS + tl.arange(0, INDEX_TOKENS)
    row_mask = index < num_queries  # [INDEX_TOKENS]
    row = batch_head * num_queries + index
    position = index + query_offset
    has_union = tiles_have_union(
        sizes_ptr, batch_head, row_mask, position, base, span, TILE_TOKENS
    )
    if ALL_ENTRIES or tl.min(has_union.to(tl.int32), 0) == 0:
        block, is_topk, slot, _ = split_blocks(
            blocks_ptr,
            row,
            row_mask,
            position,
            NUM_SLOTS,
            PADDED_SLOTS,
            BLOCK_SIZE,
            INITIAL,
            LOCAL,
        )
        counter = counter_of(  # [INDEX_TOKENS, PADDED_SLOTS]
            block, batch_head, position, has_union.to(tl.int32), base, chunk_tokens, chunk_heads,
            chunks_per_head, phases, phase_tokens, num_blocks,
        )  # fmt: skip
        if not ALL_ENTRIES:
            is_topk = is_topk & ~has_union[:, None]
        if kinds_ptr is not None:
            is_topk = are_indexed(
                is_topk, has_union, kinds_ptr, batch_head // kv_heads, index, num_queries,
                False, BLOCK_SIZE,
            )  # fmt: skip
        rank = tl.load(
            ranks_ptr + row[:, None] * NUM_SLOTS + slot, mask=is_topk, other=0
        )  # [INDEX_TOKENS, PADDED_SLOTS]
        start = tl.load(starts_ptr + counter, mask=is_topk, other=0)
        tl.store(entries_ptr + start + rank, index[:, None] * NUM_SLOTS + slot, mask=is_topk)


@recordable
@triton.jit(do_not_specialize=["phases", *WORK_TILE_LENGTHS])
def index_work_tiles_kernel(
    starts_ptr,
    work_tile_starts_ptr,
    work_tiles_ptr,
    bound,
    csr_rows_per_chunk,
    work_tile_tokens,
    steps,
    phases,
):
    """Cut the CSR rows of a query chunk into work tiles; records after the last one are empty."""
    write_work_tiles(
        starts_ptr, work_tile_starts_ptr, work_tiles_ptr, tl.program_id(0), tl.program_id(1),
        bound, csr_rows_per_chunk, work_tile_tokens, steps, phases,
    )  # fmt: skip


@triton.jit
def _load_counts(
    counts_ptr,
    first,
    num_csr_rows,
    work_tile_tokens,
    COUNTERS: tl.constexpr,
    PADDED_COUNTERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Of BLOCK_ROWS CSR rows: counts and their counters, what exists, and work tiles a row."""
    row = first + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, PADDED_COUNTERS)
    counter = row[:, None] * COUNTERS + column[None, :]  # [BLOCK_ROWS, PADDED_COUNTERS]
    mask = (row < num_csr_rows)[:, None] & (column < COUNTERS)[None, :]
    counts = tl.load(counts_ptr + counter, mask=mask, other=0)
    work_tiles = (tl.sum(counts, 1) + work_tile_tokens - 1) // work_tile_tokens  # [BLOCK_ROWS]
    return counts, counter, mask, row, work_tiles


@recordable
@triton.jit(do_not_specialize=["num_csr_rows", "work_tile_tokens"])
def index_totals_kernel(
    counts_ptr,
    totals_ptr,
    num_csr_rows,
    work_tile_tokens,
    COUNTERS: tl.constexpr,
    PADDED_COUNTERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """CTA (BLOCK_ROWS CSR rows): their entries and, behind those of all CTAs, their work tiles."""
    first = tl.program_id(0) * BLOCK_ROWS
    counts, _, _, _, work_tiles = _load_counts(
        counts_ptr, first, num_csr_rows, work_tile_tokens, COUNTERS, PADDED_COUNTERS, BLOCK_ROWS
    )
    tl.store(totals_ptr + tl.program_id(0), tl.sum(tl.sum(counts, 1), 0))
    tl.store(totals_ptr + tl.num_programs(0) + tl.program_id(0), tl.sum(work_tiles, 0))


@recordable
@triton.jit(do_not_specialize=["num_csr_rows", "work_tile_tokens"])
def index_starts_kernel(
    counts_ptr,
    totals_ptr,
    starts_ptr,
    work_tile_starts_ptr,
    num_csr_rows,
    work_tile_tokens,
    COUNTERS: tl.constexpr,
    PADDED_COUNTERS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOTALS: tl.constexpr,
):
    """Where each counter's entries begin, and each CSR row's work tiles.

    One CTA, or a CTA of BLOCK_ROWS CSR rows with the totals of those before it. COUNTERS of a CSR
    row lie side by side. Both results end with their total.
    """
    entries, work_tiles = 0, 0  # before this tile of CSR rows
    begin, end = 0, num_csr_rows
    if totals_ptr is not None:
        begin = tl.program_id(0) * BLOCK_ROWS
        end = tl.minimum(begin + BLOCK_ROWS, num_csr_rows)
        for start in range(0, tl.program_id(0), BLOCK_TOTALS):
            tile = start + tl.arange(0, BLOCK_TOTALS)
            before = tile < tl.program_id(0)
            entries += tl.sum(tl.load(totals_ptr + tile, mask=before, other=0), 0)
            tile += tl.num_programs(0)
            work_tiles += tl.sum(tl.load(totals_ptr + tile, mask=before, other=0), 0)
    for first in range(begin, end, BLOCK_ROWS):
        counts, counter, mask, row, needed = _load_counts(
            counts_ptr, first, num_csr_rows, work_tile_tokens,
            COUNTERS, PADDED_COUNTERS, BLOCK_ROWS,
        )  # fmt: skip
        running = tl.cumsum(tl.reshape(counts, [BLOCK_ROWS * PADDED_COUNTERS]), 0)
        running = tl.reshape(running, [BLOCK_ROWS, PADDED_COUNTERS])
        tl.store(starts_ptr + 1 + counter, entries + running, mask=mask)
        stops = work_tiles + tl.cumsum(needed, 0)
        tl.store(work_tile_starts_ptr + 1 + row, stops, mask=row < num_csr_rows)
        entries += tl.sum(tl.sum(counts, 1), 0)
        work_tiles += tl.sum(needed, 0)
    if tl.program_id(0) == 0:
        tl.store(starts_ptr, 0)
        tl.store(work_tile_starts_ptr, 0)


def _starts_of_counts(
    plan: SelectedPlan, counts: Tensor, work_tile_tokens: int
) -> tuple[Tensor, Tensor]:
    """As `_starts` of the counts and `_work_tile_starts` of that, in one launch or two."""
    options: dict[str, Any] = {"dtype": torch.int32, "device": counts.device}
    starts = torch.empty(counts.shape[0] + 1, **options)
    work_tile_starts = torch.empty(plan.num_csr_rows + 1, **options)
    padded = next_power_of_2(2 * plan.phases)
    block_rows = max(1, STARTS_TILE // padded)
    sizes = (plan.num_csr_rows, work_tile_tokens)
    constants = {
        "COUNTERS": 2 * plan.phases,
        "PADDED_COUNTERS": padded,
        "BLOCK_ROWS": block_rows,
        "num_warps": 8,
    }
    grid, totals = (1,), None
    if counts.shape[0] > ONE_CTA_COUNTERS:
        grid = (cdiv(plan.num_csr_rows, block_rows),)
        totals = torch.empty(2 * grid[0], **options)
        index_totals_kernel[grid](counts, totals, *sizes, **constants)
    results = (starts, work_tile_starts)
    index_starts_kernel[grid](
        counts, totals, *results, *sizes, **constants, BLOCK_TOTALS=TOTALS_TILE
    )
    return results


def _work_tile_starts(plan: SelectedPlan, starts: Tensor, work_tile_tokens: int) -> Tensor:
    """Exclusive running sum of the work tiles of each CSR row, with the total at the end."""
    lengths = starts[:: 2 * plan.phases].diff()
    return _starts((lengths + (work_tile_tokens - 1)) // work_tile_tokens)


def _starts(counts: Tensor) -> Tensor:
    """Exclusive running sum with the total at the end."""
    starts = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    return starts


def index_views(
    plan: SelectedPlan, work_tile_tokens: int, storage: Tensor | None, like: Tensor
) -> SelectedIndex:
    """The parts of an index in `storage`, int32 of `index_words`; None: in new memory."""
    batch_heads = plan.batch * plan.kv_heads
    shapes = (
        (batch_heads * plan.num_queries * plan.num_slots,),
        (plan.num_chunks, plan.work_tiles_per_chunk(work_tile_tokens), WORK_TILE_WORDS),
        (plan.batch, plan.kv_heads, plan.num_queries),
    )
    sizes = [math.prod(shape) for shape in shapes]
    if storage is None:
        storage = torch.empty(sum(sizes), dtype=torch.int32, device=like.device)
    assert storage.numel() >= sum(sizes)
    pieces = storage[: sum(sizes)].split(sizes)
    return SelectedIndex(*(x.view(shape) for x, shape in zip(pieces, shapes, strict=True)))


def empty_counts(plan: SelectedPlan, device: torch.device) -> Tensor:
    """Memory for the counters of an index: int32."""
    return torch.empty(plan.num_counters, dtype=torch.int32, device=device)


def build_index(
    plan: SelectedPlan,
    blocks: Tensor,
    work_tile_tokens: int,
    *,
    offsets: Tensor | None = None,
    unions: BlockUnions | None = None,
    counts: Tensor | None = None,
    all_entries: bool = True,
    storage: Tensor | None = None,
    kinds: Tensor | None = None,
) -> SelectedIndex:
    """Invert `blocks` (B, Hkv, Sq, n) on its device, without a look at its values on the host.

    Args:
        plan: sizes; `plan.num_initial` and `plan.num_local` say which blocks are no entries.
        blocks: int32, contiguous.
        work_tile_tokens: entries of a work tile.
        offsets: int32 (B, Hkv), of a plan with `offset_tensor`.
        unions: of the tiles. None: CSR rows ascend by query, the same in every run, which costs a
            sort of all entries; no tile counts as having a union.
        counts: of `empty_counts`, zeros; where `unions` are given.
        all_entries: index the entries of tiles with a union as well, which only a backward needs.
        storage: memory for the index, see `index_views`.
        kinds: of `block_kinds`; of short documents no backward reads entries.
    """
    index = index_views(plan, work_tile_tokens, storage, blocks)
    batch_heads = plan.batch * plan.kv_heads
    grid = (cdiv(plan.num_queries, INDEX_TOKENS.value) * batch_heads,)
    sizes = (
        batch_heads,
        plan.num_queries,
        plan.query_offset,
        plan.base,
        plan.span,
        plan.chunk_tokens,
        plan.chunk_heads,
        plan.chunks_per_head,
        plan.phases,
        cdiv(plan.chunk_tokens, plan.phases),
        plan.num_blocks,
        kinds,
        plan.kv_heads,
    )
    constants = {
        **plan.index_constants(),
        "TILE_TOKENS": plan.combine_tokens,
        "ALL_ENTRIES": all_entries,
    }
    if unions is None:
        num_counters = plan.num_counters
        counters = torch.full_like(blocks, num_counters)
        ordered = (blocks, offsets, counters, counters, index.bitmask, counters)
        index_count_kernel[grid](*ordered, *sizes, **constants, ORDERED=True)
        starts = _sort_entries(plan, counters, num_counters, index.entries)
        work_tile_starts = _work_tile_starts(plan, starts, work_tile_tokens)
        _cut_csr_rows(plan, starts, work_tile_starts, work_tile_tokens, index.work_tiles)
    else:
        assert counts is not None
        ranks = torch.empty_like(blocks)
        counted = (blocks, offsets, counts, ranks, index.bitmask, unions.sizes)
        index_count_kernel[grid](*counted, *sizes, **constants, ORDERED=False)
        if plan.num_counters <= MANY_COUNTERS:
            starts, work_tile_starts = _starts_of_counts(plan, counts, work_tile_tokens)
        else:
            starts = _starts(counts)
            work_tile_starts = _work_tile_starts(plan, starts, work_tile_tokens)
        scattered = (blocks, offsets, starts, ranks, index.entries, unions.sizes)
        work_tile_ctas = cdiv(index.work_tiles.shape[1], TILES_PER_CTA.value)
        index_scatter_kernel[(grid[0] + work_tile_ctas * plan.num_chunks,)](
            *scattered,
            work_tile_starts,
            *_work_tile_sizes(plan, index.work_tiles, work_tile_tokens),
            work_tile_ctas,
            *sizes,
            **constants,
        )
    return index


def _work_tile_sizes(
    plan: SelectedPlan, work_tiles: Tensor, work_tile_tokens: int
) -> tuple[Tensor, int, int, int, int]:
    """`work_tiles` and what `write_work_tiles` takes with them."""
    rows = plan.csr_rows_per_chunk
    return work_tiles, work_tiles.shape[1], rows, work_tile_tokens, rows.bit_length()


def _cut_csr_rows(
    plan: SelectedPlan,
    starts: Tensor,
    work_tile_starts: Tensor,
    work_tile_tokens: int,
    work_tiles: Tensor,
) -> None:
    """Records of all work tiles of the CSR rows whose counters' entries begin at `starts`."""
    bound = work_tiles.shape[1]
    index_work_tiles_kernel[(cdiv(bound, TILES_PER_CTA.value), plan.num_chunks)](
        starts,
        work_tile_starts,
        *_work_tile_sizes(plan, work_tiles, work_tile_tokens),
        plan.phases,
    )


def _sort_entries(
    plan: SelectedPlan, counters: Tensor, num_counters: int, entries: Tensor
) -> Tensor:
    """Fill `entries` from the counter of every entry, by a stable sort; starts of the counters."""
    in_order, entries_in_order = torch.sort(counters.flatten(), stable=True)
    entries.copy_(entries_in_order % (plan.num_queries * plan.num_slots))
    counter_ids = torch.arange(num_counters + 1, dtype=torch.int32, device=counters.device)
    return torch.searchsorted(in_order, counter_ids, out_int32=True)
