"""Sizes of the sliding kernels' grids and tiles: shapes, dtypes and device in, integers out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa_flex.fallback_kernels.common.arch import (
    SM90_SHARED_MEMORY,
    shared_memory_bytes,
    supports_tma,
)
from nsa_flex.fallback_kernels.common.tiles import round_up, tile_width

SPARE_BYTES = 2048  # of shared memory, for barriers and what there is one of a row


class Tiles(NamedTuple):
    """Sizes of one kernel's tiles."""

    rows: int  # queries, counted with their heads
    keys: int
    warps: int
    stages: int  # tiles of what streams past, in shared memory at once


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
    shared_memory: int = SM90_SHARED_MEMORY  # bytes that one program may have

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
        )

    @property
    def group(self) -> int:
        """G, query heads per KV head."""
        return self.query_heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Columns of a key and its value, or of a query and its gradient."""
        return tile_width(self.head_dim) + tile_width(self.value_dim)

    def reach(self, window_size: int) -> int:
        """The window, no larger than it matters: 32 bits hold it."""
        return min(window_size, self.tokens)

    def forward_tiles(self) -> Tiles:
        """Of the forward; queries stay, keys and values stream."""
        wanted = [Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2)]
        return self._first_fitting(
            wanted, lambda t: t.rows * tile_width(self.head_dim) + t.stages * t.keys * self.columns
        )

    def query_gradient_tiles(self) -> Tiles:
        """Of dQ; queries and output gradients stay, keys and values stream."""
        return self._first_fitting(
            [Tiles(64, 64, 4, 2)], lambda t: (t.rows + t.stages * t.keys) * self.columns
        )

    def key_gradient_tiles(self) -> Tiles:
        """Of dK and dV; keys and values stay, queries and output gradients stream."""
        wide = max(self.head_dim, self.value_dim) > 128
        return self._first_fitting(
            [Tiles(64, 64, 8 if wide else 4, 2)],
            lambda t: (t.keys + t.stages * t.rows) * self.columns,
        )

    def _first_fitting(self, wanted: list[Tiles], elements: Callable[[Tiles], int]) -> Tiles:
        """The first of `wanted` whose `elements` fit shared memory, else smaller ones."""
        if self.element_size == 4:
            return Tiles(16, 32, 4, 1)  # multiplied in plain registers: these do not spill
        for tiles in [*wanted, Tiles(64, 32, 4, 2), Tiles(32, 32, 4, 1)]:
            if elements(tiles) * self.element_size + SPARE_BYTES <= self.shared_memory:
                return tiles
        return Tiles(16, 16, 4, 1)

    def heads_per_tile(self, tiles: Tiles) -> int:
        return min(self.group, tiles.rows)

    def tokens_per_tile(self, tiles: Tiles) -> int:
        return tiles.rows // self.heads_per_tile(tiles)

    def query_programs(self, tiles: Tiles) -> int:
        """One a tile of queries."""
        parts = triton.cdiv(self.group, self.heads_per_tile(tiles))
        count = triton.cdiv(self.tokens, self.tokens_per_tile(tiles))
        return self.batch * self.kv_heads * count * parts

    def key_programs(self, tiles: Tiles) -> int:
        """One a tile of keys."""
        return self.batch * self.kv_heads * triton.cdiv(self.tokens, tiles.keys)

    def edge_keys(self, tiles: Tiles) -> int:
        """Keys of the masked tiles at the left end of a window."""
        return min(tiles.keys, 64, tile_width(self.tokens_per_tile(tiles)))

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """Compile-time arguments that all kernels take."""
        return {
            "GROUP": self.group,
            "ROWS": tiles.rows,
            "KEYS": tiles.keys,
            "HEAD_DIM": self.head_dim,
            "HEAD_COLUMNS": tile_width(self.head_dim),
            "VALUE_DIM": self.value_dim,
            "VALUE_COLUMNS": tile_width(self.value_dim),
            "PRECISION": "ieee" if self.element_size == 4 else "tf32",
            "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }

    def query_constants(self, tiles: Tiles) -> dict[str, Any]:
        """Compile-time arguments of the kernels with one program a tile of queries."""
        return {
            **self.constants(tiles),
            "HEADS": self.heads_per_tile(tiles),
            "TOKENS": self.tokens_per_tile(tiles),
            "EDGE_KEYS": self.edge_keys(tiles),
        }


def descriptor(tensor: Tensor, tokens: int) -> TensorDescriptor | None:
    """Tiles (1, 1, tokens, columns) of a (B, H, S, D) tensor for Hopper's copy engine.

    None where that engine is missing or cannot step by the tensor's strides: bytes in multiples
    of 16, none zero. The kernel then computes addresses.
    """
    if not supports_tma(tensor.device):
        return None
    width, element = tensor.shape[3], tensor.element_size()
    # The stride of a dimension of one element is never stepped by, yet it is checked.
    spare = tile_width(width)
    steps = [
        spare if size == 1 else step
        for size, step in zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    ]
    if element != 2 or tensor.data_ptr() % 16 or any(s <= 0 or s * element % 16 for s in steps):
        return None
    block = [1, 1, tokens, tile_width(width)]
    return TensorDescriptor(tensor, list(tensor.shape), [*steps, 1], block)


def empty_numbers(batch: int, heads: int, tokens: int, device: torch.device) -> Tensor:
    """New float32 (batch, heads, tokens), every row of it on a boundary of 16 bytes."""
    shape = (batch, heads, round_up(tokens, 4))
    return torch.empty(shape, dtype=torch.float32, device=device)[..., :tokens]


def number_descriptor(numbers: Tensor, tokens: int) -> TensorDescriptor | None:
    """Pieces (1, 1, tokens) of what `empty_numbers` made; None without the copy engine."""
    if not supports_tma(numbers.device):
        return None
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), [1, 1, tokens])
