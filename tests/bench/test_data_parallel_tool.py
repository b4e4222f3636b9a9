"""The tool that compares data parallel runs with one process, on two processes at a tiny size."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import on_ranks

from nsa_flex.bench.report.data_parallel import draw
from nsa_flex.bench.tools.data_parallel import KINDS, Layers, measure
from nsa_flex.cli.demo_model import QUICK
from patching.tiny_models import NSA

TEXT = replace(QUICK, steps=4, compiler="eager")
LAYERS = Layers(2, 32, 48, 4, 2, 8, NSA, 96, steps=2, dtype=torch.float32, compiler="eager")


@pytest.mark.exhaustive
def test_all_runs_beside_one(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, run, tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert [row["kind"] for row in found["speed"]] == list(KINDS)
    assert [row["ranks"] for row in found["speed"]] == [1, 2, 2]
    for row in found["speed"]:
        tokens = row["ranks"] * LAYERS.seq_len
        assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"])
        assert row["least"] <= row["seconds"] <= row["most"]
    one = found["losses"]["one"]
    assert len(one) == TEXT.steps
    assert one[-1] < one[0]
    for kind in KINDS[1:]:
        assert found["losses"][kind] == pytest.approx(one, rel=1e-4)
    draw(found, tmp_path / "found.png")
    assert (tmp_path / "found.png").stat().st_size > 10_000


def run(device: torch.device, path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = measure(
        LAYERS,
        TEXT,
        device,
        tell=lambda found: told.append((len(found["speed"]), len(found["losses"]))),
    )
    assert told == ([(2, 1), (3, 1), (3, 2), (3, 3)] if dist.get_rank() == 0 else [])
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
