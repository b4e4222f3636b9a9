"""`check_ranks` passes models that attend over ranks, and names the ranks that attend alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import CONFIG, new_model, whole_batch
from distributed.ranks import on_ranks
from torch import Tensor

import nsa_flex
from nsa_flex.testing import check_ranks
from patching.tiny_models import tiny_model


def loss_of(model: Any, ids: Tensor, *, positions: bool = False) -> Callable[[Tensor], Tensor]:
    """A loss of shards of `ids`, with its labels."""
    batch = nsa_flex.shard_batch(ids, dist.group.WORLD, CONFIG["cpu"], labels=ids)
    del batch["input_ids"]
    if positions:  # right, so that attention alone is wrong
        places = torch.arange(ids.shape[1])[None]
        batch["position_ids"] = nsa_flex.shard_sequence(places, dist.group.WORLD)
    return lambda own: model(input_ids=own, use_cache=False, **batch).loss


def test_ranks(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, good_and_bad)


def good_and_bad(device: torch.device) -> None:
    ids = whole_batch(device)[:, :64]
    good = nsa_flex.context_parallel(new_model(device), dist.group.WORLD)
    check_ranks(loss_of(good, ids), ids, dist.group.WORLD)
    # Dense, and each rank by itself.
    dense = tiny_model()
    bad = loss_of(dense, ids, positions=True)
    both = "rank 0 does not see those of rank 1; rank 1 does not see those of rank 0"
    with pytest.raises(AssertionError, match=f"ranks attend their own tokens alone: {both}"):
        check_ranks(bad, ids, dist.group.WORLD)

    # In halves, rank 0 has no token after one of rank 1.
    def half(x: Tensor) -> Tensor:
        return x.chunk(2, 1)[dist.get_rank()]

    labels = half(ids)
    with pytest.raises(AssertionError, match=r"alone: rank 1 does not see those of rank 0\. Put"):
        check_ranks(
            lambda own: dense(input_ids=own, labels=labels).loss,
            ids,
            dist.group.WORLD,
            shard=half,
        )
    with pytest.raises(ValueError, match=r"input_ids has shape \(64,\); expected \(B, S\)"):
        check_ranks(bad, ids[0], dist.group.WORLD)


def test_one_rank_has_nobody_to_attend(tmp_path: Path) -> None:
    on_ranks(1, "cpu", tmp_path, one_rank)


def one_rank(device: torch.device) -> None:
    with pytest.raises(ValueError, match="the mesh has 1 rank; check_ranks needs several"):
        check_ranks(lambda ids: ids.sum(), torch.zeros(1, 8).long(), dist.group.WORLD)
