"""Telemetry of a wrapped model on two ranks: rank 0 writes what one process would write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.problem import loss_of, new_model, own_rows, whole_batch
from distributed.ranks import on_ranks, on_two
from distributed.recipes import WRAPPERS
from torch.distributed.device_mesh import init_device_mesh
from training.tiny_run import rows_of

import nsa_flex
from nsa_flex.training import read_rows
from nsa_flex.training.telemetry.observe import STATISTICS

STEPS = 4


@on_two
def test_artefacts_of_wrapped_models(device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, run_all, tmp_path)
    alone = rows_of(tmp_path / "alone")
    for wrapper in WRAPPERS:
        told = rows_of(tmp_path / wrapper)
        assert [row["step"] for row in told["training"]] == [2, 4]
        assert [row["layer"] for row in told["gates"]] == [row["layer"] for row in alone["gates"]]
        for found, expected in zip(told["gates"], alone["gates"], strict=True):
            assert [found[name] for name in STATISTICS] == pytest.approx(
                [expected[name] for name in STATISTICS], rel=1e-2
            )
        assert told["fallback_counters"] == alone["fallback_counters"]


def run_all(device: torch.device, folder: Path) -> None:
    """In float32: in bfloat16 some gates near 1 % would be counted otherwise after two steps."""
    for wrapper, wrap in WRAPPERS.items():
        run(wrap(new_model(device, torch.float32), device), device, folder / wrapper)
    if dist.get_rank() == 0:
        model = new_model(device, torch.float32).to(device)
        run(model, device, folder / "alone", alone=True)


def run(
    model: torch.nn.Module, device: torch.device, folder: Path, *, alone: bool = False
) -> None:
    ids = whole_batch(device)
    own = ids if alone else own_rows(ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nsa_flex.telemetry(model, folder, probe=ids[:1], every=2, gates_every=2) as told:
        for _ in range(STEPS):
            loss = loss_of(model, own)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            told.step(loss, tokens=ids.numel())


def test_ranks_that_layers_were_told_of(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, open_all, tmp_path)
    for axis in ("context", "heads", "tensor"):
        assert read_rows(tmp_path / axis, "heartbeat")[-1]["mesh"] == {axis: 2}
    assert read_rows(tmp_path / "alone", "heartbeat")[-1]["mesh"] is None


def open_all(device: torch.device, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    models = {
        "alone": new_model(device),
        "context": nsa_flex.context_parallel(new_model(device), mesh),
        "heads": nsa_flex.sequence_parallel(new_model(device), mesh),
        "tensor": nsa_flex.tensor_parallel(new_model(device), mesh),
    }
    for name, model in models.items():
        with nsa_flex.telemetry(model, folder / name):
            pass
