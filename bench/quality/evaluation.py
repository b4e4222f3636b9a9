"""Held-out losses: in all, by position, and on names that came before."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

BUCKETS = 32
# A name: at least so many letters, of which the first ones tell which name it is.
NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{9,}")
TELLING = 3
# How many tokens ago the name came last; the first bound is the window of the study.
NEAR, FAR = 512, 4096


class Place(NamedTuple):
    """One occurrence of a name: tokens `start` up to `end` of a row, `ago` after the last one.

    ago: None for the first occurrence in its row.
    """

    row: int
    start: int
    end: int
    ago: int | None

    @property
    def kind(self) -> str:
        """The class that its loss counts for."""
        if self.ago is None:
            return "first"
        return "near" if self.ago < NEAR else "middle" if self.ago < FAR else "far"


def names_again(rows: np.ndarray) -> Iterator[Place]:
    """Occurrences of names that only one of the rows holds, and more than once.

    A name of one row alone was hardly learnt from other texts: the context tells it.

    Args:
        rows: uint8 (rows, S).
    """
    found = [list(NAME.finditer(row.tobytes())) for row in rows]
    holders: dict[bytes, set[int]] = defaultdict(set)
    for number, matches in enumerate(found):
        for match in matches:
            holders[match.group()].add(number)
    for number, matches in enumerate(found):
        counts: dict[bytes, int] = defaultdict(int)
        for match in matches:
            counts[match.group()] += 1
        last: dict[bytes, int] = {}
        for match in matches:
            name = match.group()
            if len(holders[name]) > 1 or counts[name] < 2:
                continue
            ago = match.start() - last[name] if name in last else None
            last[name] = match.start()
            yield Place(number, match.start() + TELLING, match.end(), ago)


def summary(losses: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Columns of a row of results.

    Args:
        losses: float (rows, S); nats of token i at i - 1, the last column is not read.
        rows: uint8 (rows, S).
    """
    known = losses[:, :-1]
    of_rows = known.mean(1)
    names: dict[str, list[float]] = defaultdict(list)
    for place in names_again(rows):
        names[place.kind].append(float(losses[place.row, place.start - 1 : place.end - 1].mean()))
    return {
        "loss": _rounded(known.mean()),
        "loss_error": _rounded(of_rows.std() / len(of_rows) ** 0.5),
        "by_position": [_rounded(x.mean()) for x in np.array_split(known.mean(0), BUCKETS)],
        "names": {
            kind: {"loss": _rounded(np.mean(each)), "count": len(each)}
            for kind, each in sorted(names.items())
        },
        "held_out_rows": len(rows),
    }


def losses_by_length(
    model: Any, held_out: Tensor, lengths: Sequence[int], tokens: int, device: torch.device
) -> dict[str, Any]:
    """`summary` of the same tokens in rows of each length, by the length.

    Args:
        held_out: int64 (rows, S), S divisible by the lengths.
        tokens: of a forward, at least one row.
    """
    found = {}
    for length in lengths:
        rows = held_out.reshape(-1, length)
        losses = token_losses(model, rows, max(1, tokens // length), device)
        found[str(length)] = summary(losses.numpy(), rows.numpy().astype(np.uint8))
    return found


@torch.no_grad()
def token_losses(model: Any, rows: Tensor, batch_size: int, device: torch.device) -> Tensor:
    """Float32 (rows, S) on the CPU: nats of the next token; the last column is 0.

    Computed eagerly and in the precision of the training, the model in evaluation mode.

    Args:
        rows: int64 (rows, S).
    """
    model.eval()
    with torch.compiler.set_stance("force_eager"):
        found = [_losses(model, ids.to(device)) for ids in rows.split(batch_size)]
    model.train()
    return torch.cat(found).cpu()


def _losses(model: Any, ids: Tensor) -> Tensor:
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model(input_ids=ids, use_cache=False).logits
    wanted = F.pad(ids[:, 1:], (0, 1), value=-100)
    return F.cross_entropy(logits.float().transpose(1, 2), wanted, reduction="none")


def _rounded(value: Any) -> float:
    return round(float(value), 5)
