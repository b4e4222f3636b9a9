"""What every launch of the selected branch's forward needs: index, unions, tensors, sizes."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_flex.fallback_kernels.selected.block_union import BlockUnions, build_block_unions
from nsa_flex.fallback_kernels.selected.config import SelectedPlan
from nsa_flex.fallback_kernels.selected.inverted_index import (
    SelectedIndex,
    build_index,
    empty_counts,
)


class Selection(NamedTuple):
    """What the launches of one forward share; see `prepare`."""

    plan: SelectedPlan
    csr: SelectedIndex
    unions: BlockUnions
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    offsets: Tensor | None = None  # int32 (B, Hkv), of a plan with `offset_tensor`


def prepare(
    plan: SelectedPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    scale: float,
    *,
    storage: Tensor | None = None,
    offsets: Tensor | None = None,
    kinds: Tensor | None = None,
) -> Selection:
    """Inverted index and unions of the query tiles.

    Args:
        plan: sizes of the call.
        query: (B, Hq, Sq, D), memory (B, Sq, Hq, D).
        key: (B, Hkv, Sk, D), last dimension contiguous; value likewise (B, Hkv, Sk, Dv).
        blocks: int32 (B, Hkv, Sq, n), contiguous.
        scale: factor of the logits.
        storage: int32 (`index_words`,) that receives the index for the backward; without one,
            only entries that the forward reads are indexed.
        offsets: int32 (B, Hkv), of a plan with `offset_tensor`: position of each batch row's
            query 0, the same for all KV heads, at most Sk - Sq.
        kinds: of `block_kinds`. Results of short queries are left to other kernels, and the
            backward does not read entries of short documents.
    """
    counts = empty_counts(plan, blocks.device)
    unions = build_block_unions(plan, blocks, offsets, counts, kinds)
    all_entries = storage is not None
    csr = build_index(
        plan,
        blocks,
        plan.work_tile_tokens,
        offsets=offsets,
        unions=unions,
        counts=counts,
        all_entries=all_entries,
        storage=storage,
        kinds=kinds if all_entries else None,
    )
    return Selection(plan, csr, unions, query, key, value, scale, offsets)
