"""Tile sizes of short rows' kernels: those of range attention, but for the backward."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from nsa_flex.fallback_kernels.common.tiles import cdiv, tile_width
from nsa_flex.fallback_kernels.ranges.config import RangesPlan, Tiles

# As measured on an H100, whose tiles of queries and keys come by TMA.
BWD_DQ = Tiles(64, 32, 4, 3)  # up to D 64, of many CTAs; else those of range attention
BWD_DKDV = Tiles(64, 64, 4, 2)
MANY_CTAS = 1024
NARROW = 64
WIDEST = 128  # beyond, as in float32, what range attention takes


def plan_of(query: Tensor, key: Tensor, value: Tensor) -> RangesPlan:
    """The plan of a call of short rows."""
    batch, heads, tokens, _ = query.shape
    ctas = batch * heads * cdiv(tokens, BWD_DQ.block_m)
    return _with_tiles(RangesPlan.of(query, key, value), query.element_size(), ctas >= MANY_CTAS)


@lru_cache(maxsize=256)
def _with_tiles(plan: RangesPlan, element_size: int, many: bool) -> RangesPlan:
    width = max(tile_width(plan.head_dim), tile_width(plan.value_dim))
    if element_size == 4 or width > WIDEST or plan.bwd_dkdv.block_n != BWD_DKDV.block_n:
        return plan
    bwd_dq = BWD_DQ if width <= NARROW and many else plan.bwd_dq
    return replace(plan, bwd_dq=bwd_dq, bwd_dkdv=BWD_DKDV)
