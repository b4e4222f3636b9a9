"""Facts in text: where they stand, what is asked, and what counts as right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_flex.bench.quality.needles import DIGITS, KINDS, hide, needles

TEXT = bytes(97 + i % 26 for i in range(2047))


@pytest.mark.parametrize("name", KINDS)
def test_the_end_of_a_text_asks_for_what_stands_before(name: str) -> None:
    kind = KINDS[name]
    hidden = hide(np.random.default_rng(0), TEXT, kind)
    assert len(hidden.text) == len(TEXT)
    tail = len(TEXT) - kind.asked * 16
    assert len(hidden.answers) == len(hidden.places) == kind.asked
    assert hidden.text.count(b" = ") == kind.facts + kind.asked
    names = {line.partition(b" = ")[0] for line in hidden.text.split(b"\n") if b" = " in line}
    assert len(names) == (1 if kind.one_name else kind.facts)
    for answer, place in zip(hidden.answers, hidden.places, strict=True):
        assert place + 16 <= tail <= answer
        line = hidden.text[place : place + 16]
        assert hidden.text[answer - 10 : answer + DIGITS + 2] == line
        assert line[10:14].isdigit()
    assert hidden.places == sorted(hidden.places)


def test_a_text_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="a text of 500 bytes has no room for 32 facts"):
        hide(np.random.default_rng(0), TEXT[:500], KINDS["multi_key"])


class Copies:
    """Knows of each next byte whether `knows` says so of its place in the row, from the end."""

    def __init__(self, knows: Any) -> None:
        self.knows, self.modes = knows, list[str]()

    def __call__(self, input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        length = input_ids.shape[1]
        left = length - 1 - torch.arange(length).roll(-1)  # of the byte that is predicted
        best = torch.where(self.knows(left), input_ids.roll(-1, 1), 0)
        return SimpleNamespace(logits=torch.nn.functional.one_hot(best, 256))

    def eval(self) -> None:
        self.modes.append("eval")

    def train(self) -> None:
        self.modes.append("train")


def test_shares_are_of_digits() -> None:
    rows = torch.tensor(list(TEXT + b"x"))[None].repeat(3, 1)

    def of(knows: Any) -> dict[str, float]:
        found = needles(Copies(knows), rows, 2048, 4096, torch.device("cpu"))
        assert found["single"]["questions"] == found["multi_key"]["questions"] == 128
        return {name: each["right"] for name, each in found.items()}

    # A line ends "4821;\n": its digits are the bytes from the sixth to the third from its end.
    digits = {"single": 1.0, "multi_key": 1.0, "multi_value": 1.0}
    assert of(lambda left: left % 16 >= 2) == digits
    assert of(lambda left: left % 16 >= 3) == dict.fromkeys(digits, 0.75)
    assert of(lambda left: left % 16 >= 6) == dict.fromkeys(digits, 0.0)
    last = of(lambda left: left < 16)  # only the last line
    assert last == {"single": 1.0, "multi_key": 0.25, "multi_value": 0.25}


def test_depths_are_where_the_facts_stand() -> None:
    rows = torch.tensor(list(TEXT + b"x"))[None]
    model = Copies(lambda left: left >= 0)
    found = needles(model, rows, 2048, 2048, torch.device("cpu"))
    assert found["multi_key"]["by_depth"] == [1.0] * 8
    assert model.modes[:2] == ["eval", "train"]
