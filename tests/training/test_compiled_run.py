"""Compiled runs: the same numbers, one graph for all layers and batches; on CUDA the kernels."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from training.small_config import CUDA, NSA, small_config, write_texts
from training.tiny_run import batch, loss_of, patched, rows_of

import nsa_flex
from nsa_flex.training import run
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows
from reference.modes import no_synchronization

EMPTY = {"changes", "recall"}  # of nothing changed, and of no conversion


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def losses(folder: Path) -> list[float]:
    rows = read_rows(folder, "training")
    return [row["loss"] or row["held_out_loss"] for row in rows]


@pytest.mark.kept(
    lambda documents, checkpointing: (documents, checkpointing) == ("joined", "selective")
)
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_one_graph_serves_all_layers_and_batches(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    documents: str,
    checkpointing: str,
) -> None:
    """Packed documents differ from batch to batch, their shapes do not."""
    monkeypatch.setattr(run, "prepare", functools.partial(prepare, compiler="aot_eager"))
    options: dict[str, Any] = {"data": {"documents": documents}, "training": {"steps": 6}}
    train(small_config(tmp_path / "eager", texts, **options))
    torch.compiler.reset()
    counters.clear()
    engine = {"compile": True, "checkpointing": checkpointing}
    train(small_config(tmp_path / "compiled", texts, engine=engine, **options))
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 2  # the layer, and the loss
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), rel=1e-4)


def test_dense_layers_share_a_graph_of_their_own(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "prepare", functools.partial(prepare, compiler="aot_eager"))
    sizes = CUDA["model"]["config"] | {"hidden_size": 32, "num_hidden_layers": 4}
    config = small_config(
        tmp_path / "run",
        texts,
        model={"preset": None, "config": sizes, "nsa": NSA, "dense_layers": [0, 2]},
        engine={"compile": True},
        training={"steps": 4},
    )
    torch.compiler.reset()
    counters.clear()
    train(config)
    assert dict(counters["graph_break"]) == {}
    assert counters["stats"]["unique_graphs"] == 3  # NSA's layers, the dense ones, the loss


def saved_bytes(checkpointing: str) -> int:
    """Of activations that a compiled forward keeps for its backward."""
    torch.compiler.reset()
    model, tokens = patched(), batch(2)
    prepare(model, EngineSection(checkpointing=checkpointing), compiler="aot_eager")
    known = {parameter.data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in known:
            sizes[x.data_ptr()] = x.nbytes
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss_of(model, tokens)
    return sum(sizes.values())


def test_checkpointing_keeps_less_in_compiled_layers() -> None:
    none, selective, full = (saved_bytes(kind) for kind in ("none", "selective", "full"))
    assert full < selective < none


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_a_run_on_cuda(tmp_path: Path, texts: Path, documents: str) -> None:
    """Compiled, bfloat16, on kernels; resumed, with all artefacts."""
    data = {"documents": documents, "seq_len": 512}
    first = small_config(tmp_path / "run", texts, data=data, training={"steps": 20}, **CUDA)
    result = train(first)
    assert result["loss"] < result["first_loss"] - 0.5
    found = rows_of(tmp_path / "run")
    assert {name for name, rows in found.items() if not rows} == EMPTY
    assert {row["backend"] for row in found["fallback_counters"]} <= {"sdpa", "triton"}
    assert found["heartbeat"][-1]["device_peak_bytes"] > 0
    assert nsa_flex.load(result["model"]).config.nsa_flex["config"]["window_size"] == 64


@pytest.mark.gpu
def test_steps_between_rows_do_not_wait_for_the_device(tmp_path: Path) -> None:
    model = nsa_flex.NSAAttention(128, 4, 1).cuda()
    x = torch.randn(1, 200, 128, device="cuda")
    loss = torch.ones((), device="cuda")
    with (
        nsa_flex.telemetry(model, tmp_path, probe=lambda: model(x), every=3) as told,
        no_synchronization(),
    ):
        told.step(loss, tokens=200, grad_norm=loss)
        told.step(loss, tokens=200, grad_norm=loss)
        with pytest.raises(RuntimeError, match="synchroniz"):
            told.step(loss, tokens=200, grad_norm=loss)


@pytest.mark.gpu
def test_the_probe_is_launched_without_waiting_for_the_device(tmp_path: Path) -> None:
    model = nsa_flex.NSAAttention(128, 4, 1).cuda()
    x = torch.randn(1, 600, 128, device="cuda")
    options = {"probe": lambda: model(x), "gates_every": 1}
    with nsa_flex.telemetry(model, tmp_path, **options) as told:
        told.step_ended(1)
        with no_synchronization():
            told.measure()
        told.record(loss=1.0)
    assert [row["step"] for row in rows_of(tmp_path)["gates"]] == [0, 1]


@pytest.mark.gpu
def test_strict_passes_where_the_table_s_first_backends_run(tmp_path: Path) -> None:
    model = nsa_flex.NSAAttention(256, 4, 1, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(1, 512, 256, device="cuda", dtype=torch.bfloat16)
    with nsa_flex.telemetry(model, tmp_path, probe=lambda: model(x), strict=True):
        pass
    counters = rows_of(tmp_path)["fallback_counters"]
    assert {row["branch"]: row["backend"] for row in counters} == {
        "compressed": "sdpa",
        "selected": "triton",
        "sliding": "triton",
    }
