"""Ranks that share sequences: does each attend the tokens of the others?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nsa_flex.auditing.batches import Values, split
from nsa_flex.auditing.report import AuditFinding
from nsa_flex.parallel.shards import SequenceShards, all_gather
from nsa_flex.testing.ranks import ranks_apart

KIND = "ranks-apart"


def find_ranks_apart(
    fn: Callable, values: Values, shards: SequenceShards
) -> list[AuditFinding] | None:
    """Changes a token of each rank in turn, and looks whether outputs of later tokens move.

    Args:
        fn: called with this rank's part of a batch; every rank calls it as often.
        values: that part. Ranks have runs of tokens one behind the other, or any shards of which
            rank 0 has the first token: the first of lower ranks are before some of higher ones.

    Returns:
        None where the batch has no token ids, integers (B, T).
    """
    name = next((name for name, _ in _token_ids(values)), None)
    if name is None:
        return None
    own = values[name]
    ids = all_gather(shards, own)[0].transpose(0, 1).flatten(1)  # [B, P * T]

    def run(of_rank: Tensor) -> Tensor:
        args, kwargs = split(_with(values, name, of_rank))
        found = [x for x in tree_leaves(fn(*args, **kwargs)) if isinstance(x, Tensor)]
        squares = [x.double().square().sum() for x in found if x.is_floating_point()]
        return torch.stack(squares).sum()

    alone = ranks_apart(run, ids, shards, lambda x: x.chunk(shards.size, 1)[shards.rank])
    mend = (
        "put the model in nsa_flex.context_parallel(model, mesh), or give every rank whole "
        "sequences"
    )
    return [AuditFinding(KIND, each, f"{shards.size} ranks", mend) for each in alone]


def _token_ids(values: Values) -> Iterator[tuple[Any, Tensor]]:
    """Integers (B, T) by name or place, `input_ids` first."""
    named = values.items() if isinstance(values, dict) else enumerate(values)
    found = [
        (name, x)
        for name, x in named
        if isinstance(x, Tensor) and x.dim() == 2 and x.dtype in (torch.int64, torch.int32)
    ]
    yield from sorted(found, key=lambda item: item[0] != "input_ids")


def _with(values: Values, name: Any, x: Tensor) -> Values:
    if isinstance(values, tuple):
        return (*values[:name], x, *values[name + 1 :])
    return {**values, name: x}
