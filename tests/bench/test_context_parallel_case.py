"""The benchmark of one sequence on several ranks: rows, their efficiency, and wrong results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from distributed.ranks import on_ranks

from nsa_flex.bench.cases import context_parallel as case

OPTIONS = ["--ranks", "1", "2", "--heads", "4/2", "--tokens", "512", "--repeats", "1"]


def measure(device: torch.device, out: str, wrong: bool) -> None:
    if wrong:  # every rank has the first chunks of the sequence
        tensors_of = case.tensors_of
        case.tensors_of = lambda heads, chunks, *rest: tensors_of(heads, range(len(chunks)), *rest)
    assert case.main([*OPTIONS, "--device", device.type, "--out", out]) == wrong * (
        torch.distributed.get_rank() == 0
    )


@pytest.mark.kept(lambda wrong: not wrong)
@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_rows_of_one_and_two_ranks(wrong: bool, tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    on_ranks(2, "cpu", tmp_path, measure, str(out), wrong)
    alone, both = json.loads(out.read_text())
    assert (alone["ranks"], both["ranks"]) == (1, 2)
    assert alone["status"] == "ok"
    assert both["status"] == ("failed" if wrong else "ok")
    assert alone["sent_forward_bytes"] == 0
    assert both["sent_backward_bytes"] == 2 * both["sent_forward_bytes"] > 0
    ideal = both["one_gpu_forward_backward_ms"] / 2
    efficiency = ideal / both["forward_backward_ms"]
    assert both["forward_backward_efficiency"] == pytest.approx(efficiency, abs=2e-3)
