"""The benchmark of decode steps: its gate takes steps that are right, and no others."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nsa_flex.bench.cases import decode, decode_inputs
from nsa_flex.bench.cases.decode_inputs import Shape, check, make_inputs, step
from nsa_flex.config import CompressionKind

SHAPE = Shape(2, 4, 2, 2048)


@pytest.mark.parametrize("kind", ["mean", "linear", "mlp"])
def test_right_steps_pass(kind: CompressionKind) -> None:
    check(make_inputs(SHAPE, kind, "cpu"))


def test_the_timed_step_completes_a_block_and_an_earlier_one_does_not() -> None:
    inputs = make_inputs(SHAPE, "mean", "cpu")
    blocks = [
        [
            decode_inputs.CONFIG.num_compressed_blocks(int(x.cache.lengths[0]) + new)
            for new in (0, 1)
        ]
        for x in (inputs, inputs.earlier(3))
    ]
    assert blocks == [[126, 127], [126, 126]]


def wrong_output(inputs: Any, out: Any, aux: Any) -> None:
    out[-1] *= 1.02


def wrong_first_row(inputs: Any, out: Any, aux: Any) -> None:
    out[0, 1] = 0


def wrong_compressed(inputs: Any, out: Any, aux: Any) -> None:
    inputs.cache.buffers.compressed_key[:, :, -1] += 0.05


def wrong_key(inputs: Any, out: Any, aux: Any) -> None:
    inputs.cache.buffers.key[1, 0, -1] = 0


def wrong_choice(inputs: Any, out: Any, aux: Any) -> None:
    chosen = set(aux.blocks[0, 0, 0].tolist())
    left = [x for x in range(1, 30) if x not in chosen]
    aux.blocks[0, 0, 0, 2] = left[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_output, r"the step's output is off by (1\.9|2)"),  # 2 %, rounded
        (wrong_first_row, "the step's output is off"),
        (wrong_compressed, "the compressed row is off"),
        (wrong_key, "a token was not stored"),
        (wrong_choice, "a better block was left out|the step's output is off"),
    ],
)
def test_wrong_steps_fail(monkeypatch: pytest.MonkeyPatch, spoil: Any, message: str) -> None:
    torch.manual_seed(0)  # a right step errs by up to 0.8 % itself, which some draws would show
    inputs = make_inputs(SHAPE, "mlp", "cpu")

    def spoiled(*arguments: Any, return_aux: bool) -> Any:
        out, aux = step(*arguments, return_aux=return_aux)
        spoil(inputs, out, aux)
        return out, aux

    monkeypatch.setattr(decode_inputs, "step", spoiled)
    with pytest.raises(AssertionError, match=message):
        check(inputs)


class FakeClock(decode.Clock):
    """Runs each call once on the CPU; no time passes."""

    def in_a_graph(self, calls: Any) -> dict[str, float]:
        for call in calls:
            call()
        return {"median_us": 2.0}

    one_by_one = in_a_graph


def test_a_short_run_measures_steps_and_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "make_inputs", lambda *args: make_inputs(*args, device="cpu"))
    monkeypatch.setattr(Shape, "copies", 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    total = argparse.Namespace(total_memory=1e12)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: total)
    options = argparse.Namespace(kinds=["mlp"])
    rows = [*decode.rows_of(SHAPE, FakeClock(), options)]
    ours = [(row["implementation"], row["mode"]) for row in rows if "nsa" in row["implementation"]]
    assert ours == [
        *(("nsa", "graph"), ("nsa", "eager"), ("nsa, mean of 16 steps", "graph")),
        *(("nsa, mlp", "graph"), ("nsa, mlp", "eager"), ("nsa, mlp, mean of 16 steps", "graph")),
    ]
    dense = {row["implementation"] for row in rows} - {name for name, _ in ours}
    assert dense == {"sdpa-cudnn", "sdpa-flash"}
