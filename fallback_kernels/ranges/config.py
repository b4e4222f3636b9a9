"""Tile sizes of range attention: shapes, dtype and device in, integers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import shared_memory_bytes
from nsa_flex.fallback_kernels.common.tiles import cdiv, tile_width


@dataclass(frozen=True)
class Tiles:
    """BLOCK_M queries of one head by BLOCK_N keys, and how a CTA works on them."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None  # that a thread may have; None: as many as it wants

    def constants(self) -> dict[str, Any]:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "maxnreg": self.registers,
        }


# Best first; the first that fits into shared memory is taken. Small tiles of one warp group win:
# two CTAs an SM hide one another's softmax, and more of them do so better. Hence the tiles by head
# dim, which are tried before: with few keys a thread needs no more registers than leave room for
# three CTAs at D 128 and for four at D 64.
FWD = (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1))
FWD_OF = {64: Tiles(64, 32, 4, 3, registers=128), 128: Tiles(64, 32, 4, 3, registers=168)}
BWD_DQ = (Tiles(64, 64, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1))
BWD_DQ_OF = {64: Tiles(64, 32, 4, 3, registers=128), 128: Tiles(64, 32, 4, 2, registers=168)}
BWD_DKDV = (Tiles(32, 64, 4, 3), Tiles(32, 64, 4, 2), Tiles(32, 64, 4, 1), Tiles(32, 32, 4, 1))
MOST_QUERIES, MOST_KEYS = 64, 64  # of a tile
# float32 is multiplied on FMA units. Larger tiles spill there, and ptxas takes 10 to 20 seconds.
FLOAT32, FLOAT32_WIDE = (Tiles(16, 32, 4, 1),), (Tiles(16, 32, 8, 1),)  # up to D 128, and beyond

MIN_CTAS = 1024  # of the dK/dV kernel: fewer, and each query head gets CTAs of its own
LEAST_CTAS = 256  # fewer still, and the queries of a head are shared
LEAST_QUERIES = 128  # of such a share
# Early keys are seen by most queries, and no CTA should outlast all others: shares of so many
# queries, as long as the sums to be added take no more memory than this.
MANY_QUERIES = 1024
SUM_BYTES = 64 << 20
MAX_QUERY_SPLITS = 8


@dataclass(frozen=True)
class RangesPlan:
    """What the launches need besides tensors. Tile sizes of a kernel are properties of shapes.

    head_splits: CTAs a tile of keys in the dK/dV kernel, each with so many of the group's heads.
    query_splits: CTAs that each of those is made of, each with some of the queries.
    """

    fwd: Tiles
    bwd_dq: Tiles
    bwd_dkdv: Tiles
    head_splits: int
    query_splits: int
    head_dim: int
    value_dim: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> RangesPlan:
        """The plan of one call, kept by all it depends on."""
        batch, query_heads, num_queries, head_dim = query.shape
        _, kv_heads, num_keys, value_dim = value.shape
        return _plan(
            *(batch, query_heads, kv_heads, num_queries, num_keys, head_dim, value_dim),
            *(query.dtype, shared_memory_bytes(query.device)),
        )

    def constants(self) -> dict[str, Any]:
        """What every kernel takes."""
        return {
            "HEAD_DIM": self.head_dim,
            "VALUE_DIM": self.value_dim,
        }


@lru_cache(maxsize=256)
def _plan(
    batch: int,
    query_heads: int,
    kv_heads: int,
    num_queries: int,
    num_keys: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    bytes_given: int,
) -> RangesPlan:
    widths = (tile_width(head_dim), tile_width(value_dim))
    width = max(64, *widths)

    def fitting(candidates: tuple[Tiles, ...], best: Tiles | None, held: str) -> Tiles:
        if dtype.itemsize == 4:
            candidates, best = FLOAT32 if width <= 128 else FLOAT32_WIDE, None
        if best is not None:
            candidates = (best, *candidates)
        return first_fitting(candidates, widths, dtype.itemsize, held, bytes_given)

    bwd_dkdv = fitting(BWD_DKDV, None, "keys")
    group = query_heads // kv_heads
    ctas = cdiv(num_keys, bwd_dkdv.block_n) * kv_heads * batch
    head_splits = group if ctas < MIN_CTAS else 1
    query_splits, ctas = 1, max(1, ctas) * head_splits
    of_few = min(num_queries // LEAST_QUERIES, LEAST_CTAS // ctas)
    cta_bytes = 4 * bwd_dkdv.block_n * sum(widths)
    of_long = min(num_queries // MANY_QUERIES, SUM_BYTES // (ctas * cta_bytes))
    while 2 * query_splits <= min(MAX_QUERY_SPLITS, max(of_few, of_long)):
        query_splits *= 2
    return RangesPlan(
        fwd=fitting(FWD, FWD_OF.get(width), "queries"),
        bwd_dq=fitting(BWD_DQ, BWD_DQ_OF.get(width), "both"),
        bwd_dkdv=bwd_dkdv,
        head_splits=head_splits,
        query_splits=query_splits,
        head_dim=head_dim,
        value_dim=value_dim,
    )


def first_fitting(
    candidates: Sequence[Tiles],
    widths: tuple[int, int],
    itemsize: int,
    held: str,
    bytes_given: int,
) -> Tiles:
    """The first that `bytes_given` of shared memory suffice for, else the last."""
    fitting = (x for x in candidates if shared_bytes(x, widths, itemsize, held) <= bytes_given)
    return next(fitting, candidates[-1])


def shared_bytes(tiles: Tiles, widths: tuple[int, int], itemsize: int, held: str) -> int:
    """What a CTA keeps in shared memory: tiles held through the loop, streamed ones, weights."""
    head, both = widths[0], sum(widths)
    queries, keys = tiles.block_m, tiles.block_n
    weights = queries * keys
    if held == "queries":
        numbers = queries * head + tiles.stages * keys * both
    elif held == "both":
        numbers = queries * both + tiles.stages * keys * both + weights
    else:
        numbers = keys * both + tiles.stages * queries * both + 2 * weights
    return numbers * itemsize
