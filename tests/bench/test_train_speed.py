"""The tool that compares `nsa-flex train` with the bare step, at a tiny size on the CPU."""

from __future__ import annotations

import gc
import pstats
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from training.small_config import write_texts

from nsa_flex.bench.cases.models import MODELS
from nsa_flex.bench.report.rows import read_rows
from nsa_flex.bench.tools import train_speed
from nsa_flex.bench.tools.host_costs import HostCosts
from nsa_flex.bench.tools.train_speed import (
    Plan,
    Profile,
    case_of,
    compare,
    ratios,
    train_config,
    trained,
)

NSA = (
    "{compress_block_size: 8, compress_stride: 4, select_block_size: 8,"
    " num_selected_blocks: 4, window_size: 16}"
)


def tiny_plan(folder: Path) -> Plan:
    overrides = (
        f"data.files=[{write_texts(folder / 'texts')}]",
        "data.seq_len=64",
        f"model.nsa={NSA}",
        "engine.device=cpu",
    )
    return Plan("tiny", overrides, warm_up=1, windows=2, window=2, compiler="eager")


def test_every_run_has_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "tiny, bytes", replace(MODELS["tiny"], vocab_size=256))
    monkeypatch.setattr(train_speed, "ORDER", (*train_speed.ORDER[:3], ("train", "bytes")))
    plan, out, before = tiny_plan(tmp_path), tmp_path / "rows.json", list(gc.callbacks)
    assert compare(plan, torch.device("cpu"), out, limit_s=600.0) == read_rows(out)
    rows = read_rows(out)
    assert [(row["kind"], row["repeat"]) for row in rows] == [
        ("silent", 0),
        ("bare", 0),
        ("train", 0),
        ("train", 1),
    ]
    spent = {row["kind"]: row["host"].get("telemetry_ms") for row in rows}
    assert min(spent["train"]) > max(spent["silent"])
    assert max(spent["train"]) > 1  # one window has the probe
    assert gc.callbacks == before
    for row in rows:
        assert row["steps"] == 4
        assert len(row["windows"]) == 2
        assert min(row["windows"]) <= row["tokens_per_s"] <= max(row["windows"])
        assert row["first_step_s"] > 0
        assert row["sources"]
        assert len(row["ahead_ms"]) == 2
        assert {len(values) for values in row["host"].values()} == {2}
        assert all(x >= 0 for values in row["host"].values() for x in values)
        assert min(row["host"]["process_ms"]) > 0
        assert ("batches_ms" in row["host"]) == (row["kind"] != "bare")
        for name in ("tokens_per_s_of_rows", "probe_ms"):
            assert (name in row) == (row["kind"] == "train")
    told = rows[-1]
    assert len(told["probe_ms"]) == 2
    assert told["tokens_per_s_of_rows"] == pytest.approx(told["median"], rel=0.5)
    assert ratios(rows).keys() == {
        "train/silent, bytes",
        "train/bare, bytes",
        "silent/bare, bytes",
    }


def test_host_costs_are_of_one_window() -> None:
    class Sleeper:
        def sleep(self, seconds: float) -> float:
            time.sleep(seconds)
            return seconds

    with HostCosts() as costs, costs.timed("slept_ms", Sleeper, "sleep"):
        costs.since_last()
        assert Sleeper().sleep(0.02) == 0.02
        gc.collect()
        busy, idle = costs.since_last(), costs.since_last()
    assert busy["slept_ms"] >= 20
    assert busy["gc_ms"] > 0
    assert (idle["slept_ms"], idle["gc_ms"]) == (0, 0)
    assert idle["process_ms"] <= busy["process_ms"]


def test_repeats_wait_for_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_speed, "ORDER", (("silent", "bytes"), ("silent", "bytes")))
    rows = compare(tiny_plan(tmp_path), torch.device("cpu"), tmp_path / "rows.json", limit_s=0.0)
    assert len(rows) == 1


def test_the_profile_is_of_one_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tiny_plan(tmp_path)
    profile = Profile(plan)
    trained(plan, "bytes", torch.device("cpu"), silent=True, callbacks=[profile])
    profile.tell(400)
    assert "training_step" in capsys.readouterr().out
    calls = {
        name: stats[0] for (_, _, name), stats in pstats.Stats(profile.profiler).stats.items()
    }
    assert calls["training_step"] == plan.window


@pytest.mark.parametrize("vocabulary", ["bytes", "32000"])
def test_both_train_the_same_model(tmp_path: Path, vocabulary: str) -> None:
    from nsa_flex.bench.cases.models import build
    from nsa_flex.training.models import build_model
    from nsa_flex.training.packing import BYTES

    plan = Plan()
    config, case = train_config(plan, vocabulary, tmp_path), case_of(plan, vocabulary)
    assert config.training.batch_size == case.batch == 16
    assert config.data.seq_len == case.seq_len == 2048
    ours = build_model(config.model, config.data, BYTES, values="none")
    bare = build(case.size, case.seq_len, torch.device("meta"), patched=True)
    shapes = {name: x.shape for name, x in bare.named_parameters()}
    assert {name: x.shape for name, x in ours.named_parameters()} == shapes
