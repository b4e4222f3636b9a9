"""Tile sizes of short rows' kernels: shapes, dtype and device in, integers out."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import shared_memory_bytes
from nsa_flex.fallback_kernels.common.tiles import cdiv, tile_width
from nsa_flex.fallback_kernels.ranges import config as ranges
from nsa_flex.fallback_kernels.ranges.config import RangesPlan, Tiles, first_fitting, shared_bytes

# As measured on an H100, whose tiles of queries and keys come by TMA. With fewer registers three
# and four CTAs fit on an SM. Up to D 64, before those of range attention that hold for any D: what
# that prefers by head dim is slower here.
FWD = Tiles(64, 64, 4, 3, registers=168)  # of many CTAs, or where blocks are selected
FWD_SELECTED_WIDE = Tiles(64, 64, 4, 2)  # beyond D 64: two sums of values
BWD_DQ = Tiles(64, 32, 4, 3, registers=128)  # of many CTAs
BWD_DKDV = Tiles(64, 64, 4, 2)
MANY_CTAS = 1024
NARROW = 64
WIDEST = 128  # beyond, as in float32, what range attention takes


def plan_of(query: Tensor, key: Tensor, value: Tensor) -> RangesPlan:
    """The plan of a call of short rows."""
    batch, heads, tokens, _ = query.shape
    many = batch * heads * cdiv(tokens, BWD_DQ.block_m) >= MANY_CTAS
    plan = RangesPlan.of(query, key, value)
    return _with_tiles(plan, query.element_size(), many, shared_memory_bytes(query.device))


def num_key_tiles(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Tiles of keys and values in the backward, of all KV heads and rows."""
    batch, heads, tokens, _ = key.shape
    return batch * heads * cdiv(tokens, plan_of(query, key, value).bwd_dkdv.block_n)


def masked_tiles(query: Tensor, key: Tensor, value: Tensor) -> Tiles:
    """Tiles of the forward of a call of short rows whose queries selected blocks."""
    plan = RangesPlan.of(query, key, value)
    widths = (tile_width(plan.head_dim), tile_width(plan.value_dim))
    itemsize, bytes_given = query.element_size(), shared_memory_bytes(query.device)
    tiles = FWD if max(widths) <= NARROW else FWD_SELECTED_WIDE
    if itemsize == 4 or max(widths) > WIDEST:
        return plan.fwd
    return first_fitting((tiles, *ranges.FWD), widths, itemsize, "queries", bytes_given)


@lru_cache(maxsize=256)
def _with_tiles(plan: RangesPlan, itemsize: int, many: bool, bytes_given: int) -> RangesPlan:
    widths = (tile_width(plan.head_dim), tile_width(plan.value_dim))
    if itemsize == 4 or max(widths) > WIDEST:
        return plan
    fwd, bwd_dq = list(ranges.FWD), list(ranges.BWD_DQ)
    if many and max(widths) <= NARROW:
        fwd.insert(0, FWD)
        bwd_dq.insert(0, BWD_DQ)
    plan = replace(
        plan,
        fwd=first_fitting(fwd, widths, itemsize, "queries", bytes_given),
        bwd_dq=first_fitting(bwd_dq, widths, itemsize, "both", bytes_given),
    )
    if shared_bytes(BWD_DKDV, widths, itemsize, "keys") <= bytes_given:
        plan = replace(plan, bwd_dkdv=BWD_DKDV)
    return plan
