"""Facts hidden in text and asked for at its end: what a model of bytes finds of what it read.

A fact is a line, "name = 4821;". A row ends with some of its facts once more, and what counts is
the share of their digits that the model predicts, each with the right ones before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LETTERS, DIGITS = 6, 4  # of a name, of a value
SLOT = 32  # bytes between places of facts
LEAST_QUESTIONS = 128
DEPTHS = 8


@dataclass(frozen=True)
class Kind:
    """`facts` of different names, or of one, of which the last `asked` lines of a row ask."""

    facts: int
    asked: int
    one_name: bool = False


KINDS = {
    "single": Kind(1, 1),
    "multi_key": Kind(32, 4),
    "multi_value": Kind(4, 4, one_name=True),  # in the order in which they stand
}


class Hidden(NamedTuple):
    """A text with facts, and where in it the digits of its answers begin and the facts stand."""

    text: bytes
    answers: list[int]
    places: list[int]


def hide(rng: np.random.Generator, text: bytes, kind: Kind) -> Hidden:
    """As many bytes as `text`, some overwritten.

    Raises:
        ValueError: there is no room.
    """
    line = len(_line(b"a" * LETTERS, b"0" * DIGITS))
    tail = len(text) - kind.asked * line
    if tail // SLOT < kind.facts:
        raise ValueError(f"a text of {len(text)} bytes has no room for {kind.facts} facts")
    slots = np.sort(rng.choice(tail // SLOT, kind.facts, replace=False)) * SLOT
    names = [_drawn(rng, b"abcdefghijklmnopqrstuvwxyz", LETTERS) for _ in slots]
    if kind.one_name:
        names = names[:1] * kind.facts
    lines = [_line(name, _drawn(rng, b"0123456789", DIGITS)) for name in names]
    found = bytearray(text)
    for slot, fact in zip(slots.tolist(), lines, strict=True):
        found[slot : slot + line] = fact
    order = np.sort(rng.choice(kind.facts, kind.asked, replace=False))
    found[tail:] = b"".join(lines[i] for i in order)
    answers = [tail + n * line + line - len(b";\n") - DIGITS for n in range(kind.asked)]
    return Hidden(bytes(found), answers, slots[order].tolist())


def _line(name: bytes, value: bytes) -> bytes:
    return b"\n" + name + b" = " + value + b";\n"


def _drawn(rng: np.random.Generator, among: bytes, count: int) -> bytes:
    return bytes(rng.choice(np.frombuffer(among, np.uint8), count).tolist())


def needles(
    model: Any, rows: Tensor, length: int, tokens: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """By kind: share of the digits that are right, in all and by depth, and how many questions.

    Args:
        rows: int64 (rows, S) of bytes, S divisible by `length`.
        tokens: of a forward, at least one row.
    """
    texts = [bytes(row.tolist()) for row in rows.to(torch.uint8).reshape(-1, length)]
    at_once = max(1, tokens // length)
    found = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        rng = np.random.default_rng((length, number))
        count = -(-LEAST_QUESTIONS // kind.asked)
        hidden = [hide(rng, texts[i % len(texts)], kind) for i in range(count)]
        right = []
        for first in range(0, count, at_once):
            right += _right(model, hidden[first : first + at_once], device)
        depth = np.array([place for each in hidden for place in each.places]) * DEPTHS // length
        shares = np.array(right)
        found[name] = {
            "right": round(float(shares.mean()), 4),
            "by_depth": [
                round(float(shares[depth == i].mean()), 4) if (depth == i).any() else None
                for i in range(DEPTHS)
            ],
            "questions": len(right),
        }
    return found


@torch.no_grad()
def _right(model: Any, hidden: list[Hidden], device: torch.device) -> list[float]:
    """Of each answer the share of its digits."""
    model.eval()
    ids = torch.tensor([list(each.text) for each in hidden], device=device)
    with (
        torch.compiler.set_stance("force_eager"),
        torch.autocast(device.type, torch.bfloat16, enabled=ids.is_cuda),
    ):
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    is_right = (best[:, :-1] == ids[:, 1:]).cpu().numpy()
    model.train()
    return [
        float(row[start - 1 : start - 1 + DIGITS].mean())
        for row, each in zip(is_right, hidden, strict=True)
        for start in each.answers
    ]
