"""Forms of parallelism side by side: all train the same model on the same batches."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import on_ranks

from nsa_flex.bench.report.losses import draw
from nsa_flex.bench.tools import parallel_runs


@pytest.mark.exhaustive
def test_losses_of_all_forms_and_their_plot(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, run, tmp_path)
    losses = json.loads((tmp_path / "losses.json").read_text())
    first = torch.tensor(losses["forms"]["one"]["losses"])
    assert first[-1] < first[0] - 0.005  # six steps of the warm-up
    assert list(losses["forms"]) == list(parallel_runs.FORMS)
    for name, form in losses["forms"].items():
        assert form["ranks"] == (1 if name == "one" else 2)
        torch.testing.assert_close(torch.tensor(form["losses"]), first, rtol=0, atol=2e-4)
    draw(losses, tmp_path / "losses.png")
    assert (tmp_path / "losses.png").stat().st_size > 10_000
    layers = json.loads((tmp_path / "layers.json").read_text())
    for name, rows in (("fsdp", 2), ("fsdp_cp", 1)):
        row = layers["forms"][name]
        assert (row["ranks"], row["rows"], len(row["seconds"])) == (2, rows, 1)
        assert row["tokens_per_second"] > 0


def run(device: torch.device, folder: Path) -> None:
    size = replace(parallel_runs.LOSSES["cpu"], steps=6)
    parallel_runs.measure(
        "losses", list(parallel_runs.FORMS), size, device, folder / "losses.json"
    )
    size = parallel_runs.LAYERS["cpu"]
    parallel_runs.measure("layers", ["fsdp", "fsdp_cp"], size, device, folder / "layers.json")
    assert dist.is_initialized()


def test_the_page() -> None:
    """What it tells of the losses on four processes, which fall to the end."""
    root = Path(__file__).parents[2]
    page = " ".join((root / "docs" / "guide" / "many-gpus.md").read_text().split())
    words = r"on four gloo .* fall from (\S+) to (\S+) and differ by at most (\d\.\d+)"
    told = re.search(words, page)
    assert told is not None
    rows = json.loads((root / "bench" / "results" / "parallel_losses_cpu.json").read_text())
    losses = {name: torch.tensor(form["losses"]) for name, form in rows["forms"].items()}
    assert set(losses) == set(parallel_runs.FORMS)
    one = losses["one"]
    assert one[-30:].mean() < one[-60:-30].mean() - 0.05
    gap = max(float((found - one).abs().max()) for found in losses.values())
    assert told.groups() == (f"{one[0]:.2f}", f"{one[-1]:.2f}", f"{gap:.4f}")
