"""What shapes and dtypes decide about a decode step: tiles, splits, memory for split outputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import (
    SM90_SHARED_MEMORY,
    shared_memory_bytes,
    supports_pdl,
)
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2, tile_width

TARGET_CTAS = 264  # two on each of an H200's SMs hide memory latency
MAX_CTAS = 396  # at most three fit an SM
MAX_SPLITS = 32
MAX_CANDIDATES = 128  # of a unit, that a CTA reading top-k blocks merges in registers
MIN_CHUNK_BLOCKS = 128  # of one CTA of the top-k kernel
MAX_COUNTED = 256  # blocks of a chunk that are ranked by counting; larger ones one by one
SHARED_BYTES = 96 * 1024  # of one CTA, so that two fit an SM


@cache
def choose_num_splits(units: int, tiles: int, target_ctas: int, max_ctas: int) -> int:
    """CTAs that share a unit's tiles: the fewest that fill the device about as well as any do.

    Up to `target_ctas` equal CTAs run side by side, more run in waves of `max_ctas`. Occupancy is
    taken for a full cache.
    """

    def occupancy(ctas: int) -> float:
        if ctas <= target_ctas:
            return ctas / target_ctas
        return ctas / max_ctas / cdiv(ctas, max_ctas)

    candidates = range(1, min(MAX_SPLITS, tiles) + 1)
    found = [occupancy(units * cdiv(tiles, cdiv(tiles, n))) for n in candidates]
    return 1 + next(i for i, share in enumerate(found) if share >= 0.96 * max(found))


def in_one_allocation(device: torch.device, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """New float32 tensors, each of them dense, in one piece of memory."""
    sizes = [prod(shape) for shape in shapes]
    parts = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


class Workspace(NamedTuple):
    """Memory of one step between its kernels; a unit is a (batch row, KV head, new token).

    partial: float32 (units, G, splits, Dv), split outputs before normalisation.
    row_max, row_sum: float32 (units, G, splits), highest base-2 logit and sum of
        exp2(logit - row_max).
    score: float32 (units, G, padded_blocks + tiles), log2 of what each head adds to a block's
        score before normalisation, then of what each tile of keys adds to the next tile's first.
    candidates: int64 (units, chunks, padded_slots), the top-k blocks of each chunk, as ranks.
    blocks: int32 (B, Hkv, T, n): initial blocks, top-k blocks best first, local blocks.
    """

    partial: Tensor
    row_max: Tensor
    row_sum: Tensor
    score: Tensor
    candidates: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class DecodePlan:
    """Sizes of the kernels of one step. None depends on how many tokens are stored.

    `compressed_splits` CTAs share the compressed keys of a unit, `chunks` its top-k selection,
    `selected_splits` its selected blocks and `window_splits` its window. Initial and local blocks
    have splits of their own: only those of the top-k blocks wait for the top-k kernel.
    """

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int
    capacity: int
    num_compressed: int
    element_size: int
    config: NSAConfig
    compressed_splits: int
    topk_per_split: int
    tiles_per_split: int
    stages: int
    chunks: int = 1
    warps: int = 4
    pdl: bool = False
    shared_memory: int = SM90_SHARED_MEMORY  # bytes that one CTA may have

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, compressed_key: Tensor, config: NSAConfig
    ) -> DecodePlan:
        """The plan for these shapes; see `interface.decode_attention`."""
        sizes = (key.shape[1], value.shape[3], key.shape[2], compressed_key.shape[2])
        return cls.of_sizes(query, *sizes, config)

    @classmethod
    def of_sizes(
        cls,
        query: Tensor,
        kv_heads: int,
        value_dim: int,
        capacity: int,
        num_compressed: int,
        config: NSAConfig,
    ) -> DecodePlan:
        """The plan for these queries over so many tokens and compressed keys of each row."""
        batch, query_heads, tokens, head_dim = query.shape
        plan = cls(
            batch=batch,
            query_heads=query_heads,
            kv_heads=kv_heads,
            tokens=tokens,
            head_dim=head_dim,
            value_dim=value_dim,
            capacity=capacity,
            num_compressed=num_compressed,
            element_size=query.element_size(),
            config=config,
            compressed_splits=1,
            topk_per_split=1,
            tiles_per_split=1,
            stages=3,
            pdl=supports_pdl(query.device),
            shared_memory=shared_memory_bytes(query.device),
        )
        return plan.tuned()

    def tuned(self) -> DecodePlan:
        """Enough CTAs to fill the device, and no more split outputs than that takes."""
        splits = 0
        if self.config.compresses:
            tiles = cdiv(self.num_compressed, self.compressed_block_n)
            splits = choose_num_splits(self.units, tiles, TARGET_CTAS, MAX_CTAS)
        num_tiles = self.num_slots * self.tiles_per_block + self.window_tiles
        share = max(1, min(4, self.units * num_tiles // TARGET_CTAS))
        chunks = self._chunks()
        # Of one chunk the top-k blocks are in memory; of several they are in registers, at most
        # two of them.
        slots = cdiv(self.units * self.num_topk, TARGET_CTAS) if chunks > 1 else share
        return replace(
            self,
            compressed_splits=splits,
            chunks=chunks,
            topk_per_split=min(slots, self.config.num_selected_blocks),
            tiles_per_split=max(1, min(share, self.window_tiles)),
            stages=self._stages(),
        )

    def _chunks(self) -> int:
        """CTAs of the top-k kernel per unit: several where there are few units."""
        if not 0 < self.units * self.num_topk <= 2 * TARGET_CTAS:
            return 1
        most = max(1, MAX_CANDIDATES // self.padded_slots)
        return max(1, min(most, self.padded_blocks // max(MIN_CHUNK_BLOCKS, self.tile_blocks)))

    def _stages(self) -> int:
        tile = self.compressed_block_n * (self.block_d + self.block_dv) * self.element_size
        return max(1, min(3, min(2 * SHARED_BYTES, self.shared_memory) // tile))

    @cached_property
    def units(self) -> int:
        """(batch row, KV head, new token) triples."""
        return self.batch * self.kv_heads * self.tokens

    @cached_property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @cached_property
    def padded_group(self) -> int:
        """G, rounded up to a power of two."""
        return next_power_of_2(self.group)

    @cached_property
    def block_d(self) -> int:
        return tile_width(self.head_dim)

    @cached_property
    def block_dv(self) -> int:
        return tile_width(self.value_dim)

    @cached_property
    def halves_tiles(self) -> bool:
        """Whether tiles are halved to fit shared memory."""
        return self.element_size == 4 or max(self.head_dim, self.value_dim) > 128

    @cached_property
    def keys_per_block(self) -> int:
        """l'/d, compressed keys that start in one selectable block."""
        return self.config.select_block_size // self.config.compress_stride

    @cached_property
    def launches_after_wait(self) -> bool:
        """Whether the window is kept off memory until the compressed keys are read.

        That is faster where few units share the bandwidth, unless they are soon done.
        """
        tiles = cdiv(self.num_compressed, self.compressed_block_n)
        return 4 * self.units <= TARGET_CTAS and tiles > self.compressed_splits

    @cached_property
    def selected_stages(self) -> int:
        """No more of them than there are tiles in a CTA."""
        return min(self.stages, max(2, self.topk_per_split * self.tiles_per_block))

    @cached_property
    def compressed_block_n(self) -> int:
        """Compressed keys of a tile: whole selectable blocks."""
        return max(32 if self.halves_tiles else 64, self.keys_per_block)

    @cached_property
    def tile_blocks(self) -> int:
        """Selectable blocks of a tile of compressed keys."""
        return self.compressed_block_n // self.keys_per_block

    @cached_property
    def block_n(self) -> int:
        """Keys of a tile of the selected and the sliding branch."""
        return min(32 if self.halves_tiles else 64, tile_width(self.config.select_block_size))

    @cached_property
    def tiles_per_block(self) -> int:
        return cdiv(self.config.select_block_size, self.block_n)

    @cached_property
    def window(self) -> int:
        """w; 0 without a sliding branch."""
        return self.config.window_size if self.config.has("sliding") else 0

    @cached_property
    def window_tiles(self) -> int:
        return cdiv(min(self.window, self.capacity), self.block_n)

    @cached_property
    def num_slots(self) -> int:
        """n; 0 without a selected branch."""
        return self.config.num_selected_blocks if self.config.has("selected") else 0

    @cached_property
    def num_topk(self) -> int:
        """Selected blocks that the scores decide: n less initial and local blocks."""
        return max(0, self.num_slots - self.config.num_forced_blocks)

    @cached_property
    def padded_slots(self) -> int:
        return next_power_of_2(self.config.num_selected_blocks)

    @cached_property
    def chunk(self) -> int:
        """Blocks of one CTA of the top-k kernel."""
        return self.padded_blocks // self.chunks

    @cached_property
    def initial_local_splits(self) -> int:
        return cdiv(self.num_slots - self.num_topk, self.initial_local_per_split)

    @cached_property
    def initial_local_per_split(self) -> int:
        """More than top-k blocks: these splits run while the top-k kernel does."""
        return max(4, self.topk_per_split)

    @cached_property
    def selected_splits(self) -> int:
        return self.initial_local_splits + cdiv(self.num_topk, self.topk_per_split)

    @cached_property
    def window_splits(self) -> int:
        return cdiv(self.window_tiles, self.tiles_per_split)

    @cached_property
    def num_splits(self) -> int:
        """Split outputs of a unit: compressed, sliding, selected."""
        return self.compressed_splits + self.window_splits + self.selected_splits

    @cached_property
    def padded_compressed_splits(self) -> int:
        """Rounded up to a power of two; few different ones, since each compiles a kernel."""
        return max(16, next_power_of_2(self.compressed_splits))

    @cached_property
    def padded_splits(self) -> int:
        """All splits, rounded up likewise."""
        return max(16, next_power_of_2(self.num_splits))

    @cached_property
    def topk_warps(self) -> int:
        """Warps of the top-k kernel: one block a thread, four in large chunks."""
        each = 32 if self.chunk <= MAX_COUNTED else 128
        return max(1, min(16, self.chunk // each))

    @cached_property
    def topk_heads(self) -> int:
        """Heads whose scores are in registers at once: 64 of each thread."""
        per_thread = max(1, self.chunk // (32 * self.topk_warps))
        return max(1, min(self.padded_group, 64 // per_thread))

    @cached_property
    def combine_block_dv(self) -> int:
        """Slice of Dv of a CTA of the combine kernel: 64 elements in each thread of a warp."""
        return max(16, min(self.block_dv, 2048 // self.padded_splits))

    @cached_property
    def padded_blocks(self) -> int:
        """Blocks of a full cache, rounded up to a power of two: four for each thread of a warp."""
        return max(128, next_power_of_2(self.config.num_select_blocks(self.capacity)))

    def workspace(self, device: torch.device) -> Workspace:
        """New memory; nothing in it is read before it is written."""

        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        units, splits, group, slots = self.units, self.num_splits, self.group, self.num_slots
        tiles = self.padded_blocks // self.tile_blocks
        partial, row_max, row_sum, score = in_one_allocation(
            device,
            (units, group, splits, self.value_dim),
            (units, group, splits),
            (units, group, splits),
            (units, group, self.padded_blocks + tiles),
        )
        return Workspace(
            partial,
            row_max,
            row_sum,
            score,
            candidates=empty(units, self.chunks, self.padded_slots, dtype=torch.int64),
            blocks=empty(self.batch, self.kv_heads, self.tokens, slots, dtype=torch.int32),
        )

    def values(self) -> dict[str, Any]:
        """Sizes, by the names that the parameters of a step's kernels have."""
        config, selects = self.config, self.num_slots > 0
        return {
            "capacity": self.capacity,
            "num_compressed": self.num_compressed,
            "kv_heads": self.kv_heads,
            "num_tokens": self.tokens,
            "num_compressed_splits": self.compressed_splits,
            "num_splits": self.num_splits,
            "window_splits": self.window_splits,
            "initial_local_splits": self.initial_local_splits,
            "initial_local_per_split": self.initial_local_per_split,
            "topk_per_split": self.topk_per_split,
            "tiles_per_split": self.tiles_per_split,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "COMPRESS": config.compress_block_size,
            "STRIDE": config.compress_stride,
            "SELECT": config.select_block_size,
            "WINDOW": self.window,
            "NUM_SLOTS": self.num_slots,
            "INITIAL": config.num_initial_blocks if selects else 0,
            "LOCAL": config.num_local_blocks if selects else 0,
            "TILED": config.selection == "tiled_top_k" and selects,
            "BLOCK_N": self.block_n,
            "PADDED_BLOCKS": self.padded_blocks,
            "CHUNKS": self.chunks,
            "PDL": self.pdl,
        }
