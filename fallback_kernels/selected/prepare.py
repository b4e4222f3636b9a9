"""What every launch of the selected branch's forward needs: lists, unions, tensors, sizes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_flex.fallback_kernels.selected.block_union import UnionLists, build_unions
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.inverted_index import SelectedIndex, build_index


class Selection(NamedTuple):
    """What the launches of one forward share; tensors as `forward` takes them."""

    plan: SelectedPlan
    lists: SelectedIndex
    unions: UnionLists
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float


def prepare(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    scale: float,
    *,
    storage: Tensor | None,
) -> Selection:
    """Index of the lists and unions of the tiles; arguments as of `forward`."""
    unions = build_unions(plan, blocks)
    every = storage is not None
    index = build_index(
        plan, blocks, plan.chunk_tokens, unions=unions, every=every, storage=storage
    )
    return Selection(plan, index, unions, query, key, value, scale)
