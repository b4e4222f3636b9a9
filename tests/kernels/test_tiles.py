"""Numbers that kernels compute from their arguments, as plans compute them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import triton.language as tl

from nsa_flex.fallback_kernels.common.tiles import precision_of, tile_width, width_of
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan
from nsa_flex.fallback_kernels.sliding.tiles import edge_block_n, heads_of_tile
from nsa_flex.fallback_kernels.topk.scores import first_columns, other_columns


def test_widths_are_those_of_plans() -> None:
    assert [width_of(size) for size in range(1, 300)] == [tile_width(x) for x in range(1, 300)]


def test_two_tiles_hold_a_head_dim_with_little_to_spare() -> None:
    for dim in range(1, 257):
        first, other = first_columns(dim), other_columns(dim)
        assert first == 16 or first <= dim < 2 * first
        assert other == (width_of(dim - first) if dim > first else 0)


def test_only_float32_is_multiplied_as_such() -> None:
    kinds = (tl.float32, tl.float16, tl.bfloat16)
    assert [precision_of(kind) for kind in kinds] == ["ieee", "tf32", "tf32"]


@pytest.mark.parametrize("group", [1, 3, 16, 80])
def test_rows_of_a_query_tile(group: int) -> None:
    plan = SlidingPlan(1, group, 1, 4096, 64, 64, 2)
    tiles = plan.forward_tiles()
    assert heads_of_tile(group, tiles.block_m) == plan.heads_per_tile(tiles)
    tokens = plan.tokens_per_tile(tiles)
    assert edge_block_n(tokens, tiles.block_n) == min(tiles.block_n, tile_width(tokens))
