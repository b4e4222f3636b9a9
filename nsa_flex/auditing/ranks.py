"""Ranks that share sequences: does each attend the tokens of the others?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from nsa_flex.auditing.batches import Values, split
from nsa_flex.auditing.report import AuditFinding, AuditReport
from nsa_flex.parallel.shards import SequenceShards, all_gather
from nsa_flex.testing.ranks import ranks_apart

KIND = "ranks-apart"


def of_all_ranks(reports: Sequence[AuditReport]) -> AuditReport:
    """Rank 0's report, and what others found that it did not: their phases name the ranks.

    Fingerprints stay those that a rank compares with a baseline.
    """
    first, *others = reports

    def joined(name: str) -> tuple[AuditFinding, ...]:
        own = getattr(first, name)
        seen = {_place(f) for f in own}
        found: dict[tuple[str, str], AuditFinding] = {}
        for rank, report in enumerate(others, 1):
            for place, f in {_place(f): f for f in getattr(report, name)}.items():
                phases = (*found.get(place, f).phases, f"rank {rank}")
                found[place] = replace(f, phases=phases)
        return (*own, *(f for place, f in found.items() if place not in seen))

    return replace(first, findings=joined("findings"), known=joined("known"))


def _place(finding: AuditFinding) -> tuple[str, str]:
    return finding.fingerprint, finding.location


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

    Raises:
        Exception: what `fn` raised; RuntimeError on the ranks where it did not, which would wait.
    """
    name = next((name for name, _ in _token_ids(values)), None)
    if name is None:
        return None
    own = values[name]
    ids = all_gather(shards, own).transpose(0, 1).flatten(1)  # [B, P * T]

    def run(of_rank: Tensor) -> Tensor:
        args, kwargs = split(_with(values, name, of_rank))
        found = [x for x in tree_leaves(fn(*args, **kwargs)) if isinstance(x, Tensor)]
        squares = [x.double().square().sum() for x in found if x.is_floating_point()]
        return torch.stack(squares).sum()

    _try(run, own, shards)
    alone = ranks_apart(run, ids, shards, lambda x: x.chunk(shards.size, 1)[shards.rank])
    mend = (
        "put the model in nsa_flex.context_parallel(model, mesh), or give every rank whole "
        "sequences"
    )
    return [AuditFinding(KIND, each, f"{shards.size} ranks", mend) for each in alone]


def _try(run: Callable[[Tensor], Tensor], own: Tensor, shards: SequenceShards) -> None:
    """One call on every rank, and an error on every rank where one of them has one."""
    error: Exception | None = None
    try:
        with torch.no_grad():
            run(own)
    except Exception as raised:
        error = raised
    failed = all_gather(shards, own.new_full((1,), error is not None, dtype=torch.int32))
    if error is not None:
        raise error
    others = [rank for rank, each in enumerate(failed.flatten().tolist()) if each]
    if others:
        raise RuntimeError(f"rank {others[0]} raised an error, which its own report has")


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
