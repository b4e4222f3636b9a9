"""What shapes and dtypes decide about a decode step: tiles, splits, room for partial results."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import supports_pdl
from nsa_flex.fallback_kernels.common.tiles import tile_width

PROGRAMS = 264  # two on each of an H200's multiprocessors hide memory's latency
MOST_PROGRAMS = 396  # three are the most that fit
MAX_SPLITS = 32
CANDIDATES = 128  # of a unit, at most, among which a reader of chosen blocks finds them
CHUNK = 128  # blocks, at least, of a program of the choice
COUNTED = 256  # blocks, at most, that are ranked by counting
SHARED_BYTES = 96 * 1024  # of one program, so that two fit a multiprocessor


def power_of_two(size: int) -> int:
    """Least power of two that is not below size."""
    return 1 << max(0, size - 1).bit_length()


@functools.cache
def splits_of(units: int, tiles: int, programs: int, most_programs: int) -> int:
    """Programs that share a unit's tiles: the fewest that use the device about as well as any do.

    Up to `programs` equal programs run side by side, more come in waves of `most_programs`: the
    share of the device that is used counts with a full cache.
    """

    def used(number: int) -> float:
        if number <= programs:
            return number / programs
        return number / most_programs / ceil_div(number, most_programs)

    splits = range(1, min(MAX_SPLITS, tiles) + 1)
    shares = [used(units * ceil_div(tiles, ceil_div(tiles, n))) for n in splits]
    return 1 + next(i for i, share in enumerate(shares) if share >= 0.96 * max(shares))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Scratch(NamedTuple):
    """Memory of one step between its kernels; a unit is a (batch row, KV head, new token).

    partial: float32 (units, G, parts, Dv), not yet normalised outputs.
    top, total: float32 (units, G, parts), highest base-2 logit and sum of exp2(logit - top).
    score: float32 (units, G, block_columns + tiles), log2 of what each head adds to a block's
        score, not yet normalised, then of what each tile of keys adds to the block behind it.
    candidates: int64 (units, chunks, slot_columns), the best free blocks of each chunk, as ranks.
    blocks: int32 (B, Hkv, T, n), the choice: initial blocks, free ones best first, local ones.
    """

    partial: Tensor
    top: Tensor
    total: Tensor
    score: Tensor
    candidates: Tensor
    blocks: Tensor


@dataclass(frozen=True)
class DecodePlan:
    """Sizes of the kernels of one step. None depends on how many tokens are stored.

    `splits` programs share the compressed keys of a unit, `chunks` the choice, `select_parts` its
    chosen blocks and `window_parts` its window; a part is a partial result in memory. Of chosen
    blocks, forced ones have parts of their own: only the free ones wait for the choice.
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
    splits: int
    slots_per_part: int
    tiles_per_part: int
    stages: int
    chunks: int = 1
    warps: int = 4
    early: bool = False

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, compressed_key: Tensor, config: NSAConfig
    ) -> DecodePlan:
        """The plan for these shapes; see `decode.decode_attention`."""
        batch, query_heads, tokens, head_dim = query.shape
        plan = cls(
            batch=batch,
            query_heads=query_heads,
            kv_heads=key.shape[1],
            tokens=tokens,
            head_dim=head_dim,
            value_dim=value.shape[3],
            capacity=key.shape[2],
            num_compressed=compressed_key.shape[2],
            element_size=query.element_size(),
            config=config,
            splits=1,
            slots_per_part=1,
            tiles_per_part=1,
            stages=3,
            early=supports_pdl(query.device),
        )
        return plan.tuned()

    def tuned(self) -> DecodePlan:
        """Enough programs to fill the device, no more partial results than that takes."""
        tiles = ceil_div(self.num_compressed, self.tile_keys)
        splits = splits_of(self.units, tiles, PROGRAMS, MOST_PROGRAMS)
        num_tiles = self.config.num_selected_blocks * self.tiles_per_block + self.window_tiles
        share = max(1, min(4, self.units * num_tiles // PROGRAMS))
        chunks = self._chunks()
        # Of one chunk the winners are in memory; of several they are in registers, at most two.
        slots = ceil_div(self.units * self.free_slots, PROGRAMS) if chunks > 1 else share
        return replace(
            self,
            splits=splits,
            chunks=chunks,
            slots_per_part=min(slots, self.config.num_selected_blocks),
            tiles_per_part=min(share, self.window_tiles),
            stages=self._stages(),
        )

    def _chunks(self) -> int:
        """Several programs choose for a unit where there are few units."""
        if not 0 < self.units * self.free_slots <= 2 * PROGRAMS:
            return 1
        most = max(1, CANDIDATES // self.slot_columns)
        return max(1, min(most, self.block_columns // max(CHUNK, self.tile_blocks)))

    def _stages(self) -> int:
        tile = self.tile_keys * (self.head_columns + self.value_columns) * self.element_size
        return max(1, min(3, 2 * SHARED_BYTES // tile))

    @property
    def units(self) -> int:
        """(batch row, KV head, new token) triples."""
        return self.batch * self.kv_heads * self.tokens

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def members(self) -> int:
        """G, rounded up to a power of two."""
        return power_of_two(self.group)

    @property
    def head_columns(self) -> int:
        return tile_width(self.head_dim)

    @property
    def value_columns(self) -> int:
        return tile_width(self.value_dim)

    @property
    def wide(self) -> bool:
        """Whether tiles are halved to fit shared memory."""
        return self.element_size == 4 or max(self.head_dim, self.value_dim) > 128

    @property
    def keys_per_block(self) -> int:
        """l'/d, compressed keys that start in one selectable block."""
        return self.config.select_block_size // self.config.compress_stride

    @property
    def late(self) -> bool:
        """Whether the window is kept from memory until the compressed keys are read.

        That is shorter where few units share them, unless they are soon done with.
        """
        tiles = ceil_div(self.num_compressed, self.tile_keys)
        return 4 * self.units <= PROGRAMS and tiles > self.splits

    @property
    def attend_stages(self) -> int:
        """No more of them than there are tiles in a program."""
        return min(self.stages, max(2, self.slots_per_part * self.tiles_per_block))

    @property
    def tile_keys(self) -> int:
        """Compressed keys of a tile: whole selectable blocks."""
        return max(32 if self.wide else 64, self.keys_per_block)

    @property
    def tile_blocks(self) -> int:
        """Selectable blocks of a tile of compressed keys."""
        return self.tile_keys // self.keys_per_block

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of the selected and the sliding branch."""
        return min(32 if self.wide else 64, tile_width(self.config.select_block_size))

    @property
    def tiles_per_block(self) -> int:
        return ceil_div(self.config.select_block_size, self.tile_tokens)

    @property
    def window_tiles(self) -> int:
        return ceil_div(min(self.config.window_size, self.capacity), self.tile_tokens)

    @property
    def free_slots(self) -> int:
        """Blocks of a choice that its scores decide."""
        config = self.config
        forced = config.num_initial_blocks + config.num_local_blocks
        return config.num_selected_blocks - forced

    @property
    def slot_columns(self) -> int:
        return power_of_two(self.config.num_selected_blocks)

    @property
    def chunk(self) -> int:
        """Blocks of a program of the choice."""
        return self.block_columns // self.chunks

    @property
    def forced_parts(self) -> int:
        forced = self.config.num_selected_blocks - self.free_slots
        return ceil_div(forced, self.forced_per_part)

    @property
    def forced_per_part(self) -> int:
        """More than of the free ones: there is time."""
        return max(4, self.slots_per_part)

    @property
    def select_parts(self) -> int:
        return self.forced_parts + ceil_div(self.free_slots, self.slots_per_part)

    @property
    def window_parts(self) -> int:
        return ceil_div(self.window_tiles, self.tiles_per_part)

    @property
    def parts(self) -> int:
        """Partial results of a unit: compressed, sliding, selected."""
        return self.splits + self.window_parts + self.select_parts

    @property
    def split_columns(self) -> int:
        """Splits, rounded up to a power of two; few different ones, since each is a kernel."""
        return max(16, power_of_two(self.splits))

    @property
    def part_columns(self) -> int:
        """Parts, rounded up likewise."""
        return max(16, power_of_two(self.parts))

    @property
    def choice_warps(self) -> int:
        """Warps of a program of the choice: a block in each thread, four of many."""
        each = 32 if self.chunk <= COUNTED else 128
        return max(1, min(16, self.chunk // each))

    @property
    def choice_heads(self) -> int:
        """Heads whose scores are in registers at once: 64 of each thread."""
        per_thread = max(1, self.chunk // (32 * self.choice_warps))
        return max(1, min(self.members, 64 // per_thread))

    @property
    def merge_columns(self) -> int:
        """Value columns of a program of the merge: 64 numbers in each thread of a warp."""
        return max(16, min(self.value_columns, 2048 // self.part_columns))

    @property
    def block_columns(self) -> int:
        """Blocks of a full cache, rounded up to a power of two: four for each thread of a warp."""
        return max(128, power_of_two(self.config.num_select_blocks(self.capacity)))

    def scratch(self, device: torch.device) -> Scratch:
        """New memory; nothing in it is read before it is written."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        units, parts, group = self.units, self.parts, self.group
        slots = self.config.num_selected_blocks
        return Scratch(
            partial=empty(units, group, parts, self.value_dim),
            top=empty(units, group, parts),
            total=empty(units, group, parts),
            score=empty(units, group, self.block_columns + self.block_columns // self.tile_blocks),
            candidates=empty(units, self.chunks, self.slot_columns, dtype=torch.int64),
            blocks=empty(self.batch, self.kv_heads, self.tokens, slots, dtype=torch.int32),
        )

    def constants(self) -> dict[str, Any]:
        """Compile-time arguments that every kernel of the step takes: no count of programs."""
        config = self.config
        return {
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "HEAD_COLUMNS": self.head_columns,
            "VALUE_DIM": self.value_dim,
            "VALUE_COLUMNS": self.value_columns,
            "COMPRESS": config.compress_block_size,
            "STRIDE": config.compress_stride,
            "SELECT": config.select_block_size,
        }

    @property
    def precision(self) -> str:
        """Of the matrix products: float32 is multiplied as such."""
        return "ieee" if self.element_size == 4 else "tf32"
