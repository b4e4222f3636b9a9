"""Sizes of the sliding kernels' grids and tiles: shapes, dtypes and device in, integers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import (
    SM90_SHARED_MEMORY,
    has_tensor_memory,
    shared_memory_bytes,
    supports_tma,
)
from nsa_flex.fallback_kernels.common.tiles import cdiv, round_up, tile_width

LEAST_CTAS = 264  # of dK and dV, two on each of 132 SMs; fewer share the heads of a group
NARROW = 64  # of head dims: up to it, tiles take half the shared memory that they take at 128
SPARE_BYTES = 2048  # of shared memory, for barriers and per-row values


class Tiles(NamedTuple):
    """Sizes of one kernel's tiles."""

    block_m: int  # query rows, (token, head in group)
    block_n: int  # keys
    warps: int
    stages: int  # streamed tiles in shared memory at once
    registers: int | None = None  # that a thread may have; None: as many as it wants


@dataclass(frozen=True)
class SlidingPlan:
    """Everything about a call that shapes, dtypes and the device decide."""

    batch: int
    query_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    value_dim: int
    element_size: int
    shared_memory: int = SM90_SHARED_MEMORY  # bytes that one CTA may have
    tensor_memory: bool = False  # sums are there, and pass through shared memory to be stored

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> SlidingPlan:
        batch, query_heads, tokens, head_dim = query.shape
        return cls(
            batch=batch,
            query_heads=query_heads,
            kv_heads=key.shape[1],
            tokens=tokens,
            head_dim=head_dim,
            value_dim=value.shape[3],
            element_size=query.element_size(),
            shared_memory=shared_memory_bytes(query.device),
            tensor_memory=has_tensor_memory(query.device),
        )

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def block_d(self) -> int:
        return tile_width(self.head_dim)

    @property
    def block_dv(self) -> int:
        return tile_width(self.value_dim)

    @property
    def row_width(self) -> int:
        """Elements of a key and its value in a tile, or of a query and its output gradient."""
        return self.block_d + self.block_dv

    def forward_tiles(self) -> Tiles:
        """Of the forward; queries stay in shared memory, keys and values stream."""
        # Narrow ones take so few registers that a third stage would cost the fourth CTA an SM.
        stages = (2,) if self._is_narrow else (3, 2)
        wanted = [Tiles(64, 64, 4, each) for each in stages]
        return self._first_fitting(
            wanted, lambda t: t.block_m * self.block_d + t.stages * t.block_n * self.row_width
        )

    def dq_tiles(self) -> Tiles:
        """Of dQ; queries and output gradients stay, keys and values stream."""
        return self._first_fitting(
            [Tiles(64, 64, 4, self._stages, self._registers)],
            lambda t: (t.block_m + t.stages * t.block_n) * self.row_width,
        )

    def dkdv_tiles(self) -> Tiles:
        """Of dK and dV; keys and values stay, queries and output gradients stream."""
        warps = 8 if max(self.head_dim, self.value_dim) > 128 else 4
        held = 2 if self.tensor_memory else 1  # keys and values, and their gradients
        return self._first_fitting(
            [Tiles(64, 64, warps, self._stages, self._registers)],
            lambda t: (held * t.block_n + t.stages * t.block_m) * self.row_width,
        )

    @property
    def _is_narrow(self) -> bool:
        return self.row_width <= 2 * NARROW

    @property
    def _stages(self) -> int:
        """Tiles in flight in the backward: a third where it leaves room for as many CTAs."""
        return 3 if self._is_narrow else 2

    @property
    def _registers(self) -> int | None:
        """Of the backward: three CTAs an SM where that spills little."""
        return 168 if self._is_narrow else None

    def _first_fitting(self, wanted: list[Tiles], elements: Callable[[Tiles], int]) -> Tiles:
        """The first of `wanted` whose `elements` fit shared memory, else smaller ones."""
        spare = SPARE_BYTES
        candidates = [*wanted, Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)]
        if self.element_size == 4:
            candidates = [Tiles(16, 32, 4, 1)]  # float32 MMAs run on FMA units: these do not spill
            spare += 4 * 16 * 32  # weights pass through shared memory
        for tiles in candidates:
            if elements(tiles) * self.element_size + spare <= self.shared_memory:
                return tiles
        return Tiles(16, 16, 4, 1)

    def heads_per_tile(self, tiles: Tiles) -> int:
        return min(self.group, tiles.block_m)

    def tokens_per_tile(self, tiles: Tiles) -> int:
        return tiles.block_m // self.heads_per_tile(tiles)

    def query_ctas(self, tiles: Tiles) -> int:
        """One per query tile."""
        tiles_per_group = cdiv(self.group, self.heads_per_tile(tiles))
        token_tiles = cdiv(self.tokens, self.tokens_per_tile(tiles))
        return self.batch * self.kv_heads * token_tiles * tiles_per_group

    def key_ctas(self, tiles: Tiles) -> int:
        """One per key tile."""
        return self.batch * self.kv_heads * cdiv(self.tokens, tiles.block_n)

    def head_splits(self, tiles: Tiles) -> int:
        """CTAs that share the query heads of a key tile: more where there are few tiles."""
        affordable = LEAST_CTAS // max(1, self.key_ctas(tiles))
        divisors = (x for x in range(1, self.group + 1) if self.group % x == 0)
        return max(x for x in divisors if x <= max(1, affordable))

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Compile-time arguments that all kernels take."""
        return {
            "GROUP": self.group,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
            "maxnreg": tiles.registers,
        }


def last_queries(document_start: Tensor, block_n: int) -> Tensor:
    """One past the last query whose document starts at or before a key tile's last key.

    Found on the device, by binary search: int32 (B, tiles) from int32 (B, S), contiguous.
    """
    batch, tokens = document_start.shape
    last = torch.arange(
        block_n - 1, tokens + block_n - 1, block_n, device=document_start.device, dtype=torch.int32
    )
    last = last.expand(batch, -1).contiguous()
    return torch.searchsorted(document_start, last, right=True, out_int32=True)


def empty_stats(batch: int, heads: int, tokens: int, device: torch.device) -> Tensor:
    """New float32 (batch, heads, tokens), every row of it on a boundary of 16 bytes."""
    shape = (batch, heads, round_up(tokens, 4))
    return torch.empty(shape, dtype=torch.float32, device=device)[..., :tokens]


def stats_descriptor(stats: Tensor, tokens: int) -> TensorDescriptor | None:
    """TMA descriptor of tiles (1, 1, tokens) of what `empty_stats` made; None without TMA."""
    if not supports_tma(stats.device):
        return None
    return TensorDescriptor(stats, list(stats.shape), list(stats.stride()), [1, 1, tokens])
