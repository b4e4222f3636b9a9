"""Training runs whose ranks share the tokens of rows are those of one process.

To float32's precision over twelve steps of Adam; stopped and resumed, to the bit.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.ranks import TWO_GPUS
from training.small_config import CUDA, small_config, write_texts
from training.test_parallel import AtStep, check_same_model, curve, in_processes, on_a_cpu
from training.tiny_run import rows_of

from nsa_flex import NSAConfig
from nsa_flex.parallel import sent_bytes
from nsa_flex.training.dry_run import dry_run
from nsa_flex.training.report import report
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows

CHANGED = {"engine.context_parallel"}


def options_of(documents: str, parallel: str = "ddp", ranks: int = 2) -> dict[str, Any]:
    return {
        "data": {"documents": documents},
        "engine": {"parallel": parallel, "context_parallel": ranks},
    }


def runs_on_ranks(rank: int, folder: Path, texts: Path, parallel: str) -> None:
    """One without a stop, one stopped and resumed, one that goes on from one process's."""
    on_a_cpu()
    train(small_config(folder / "packed", texts, **options_of("separate", parallel)))
    options = options_of("joined", parallel)
    train(small_config(folder / "whole", texts, **options))

    def stop_in_the_middle(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped = small_config(folder / "stopped", texts, **options)
    assert train(stopped, callbacks=[AtStep(stop_in_the_middle)])["stopped"]
    train(stopped, resume=True)
    if parallel == "ddp":
        train(small_config(folder / "more", texts, **options), resume_from="8", changes=CHANGED)


def run_alone(rank: int, out: Path, texts: Path, parallel: str) -> None:
    """From a checkpoint of two ranks, on one."""
    on_a_cpu()
    config = small_config(out, texts, **options_of("joined", parallel, 1))
    train(config, resume_from="8", changes=CHANGED)


@pytest.mark.kept(lambda parallel: parallel == "ddp")
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_ranks_share_rows(tmp_path: Path, parallel: str) -> None:
    texts = write_texts(tmp_path / "texts")
    for documents in ("joined", "separate"):
        options = options_of(documents, ranks=1)
        train(small_config(tmp_path / f"one-{documents}", texts, **options))
    shutil.copytree(tmp_path / "one-joined", tmp_path / "more")
    in_processes(runs_on_ranks, tmp_path, texts, parallel)
    one, whole = tmp_path / "one-joined", tmp_path / "whole"

    assert curve(tmp_path / "stopped") == curve(whole)
    assert_same_curve(whole, one)
    assert_same_curve(tmp_path / "packed", tmp_path / "one-separate")
    check_same_model(whole, one)
    assert_artefacts(rows_of(whole), rows_of(one))
    assert "1 data, 2 context" in report(whole)
    assert "2 context" not in report(one)

    # The other mesh's checkpoints: one rank goes on with two's, and two with one's.
    in_processes(run_alone, tmp_path / "stopped", texts, parallel, ranks=1)
    others = [tmp_path / "stopped", *([tmp_path / "more"] if parallel == "ddp" else [])]
    for run in others:
        assert_same_curve(run, one)
        changed = {row["key"]: row["after"] for row in read_rows(run, "changes")}
        assert changed == {"engine.context_parallel": "1" if run == others[0] else "2"}


def assert_same_curve(run: Path, other: Path) -> None:
    ours, theirs = curve(run), curve(other)
    assert len(ours) == len(theirs) == 8
    for each, expected in zip(ours, theirs, strict=True):
        assert each == pytest.approx(expected, rel=1e-4)


def assert_artefacts(found: dict[str, Any], alone: dict[str, Any]) -> None:
    """Tokens count once; gates and blocks are of whole rows; the ranks and bytes are told.

    Recall is of rows that one rank has.
    """
    tokens = [[row["tokens"] for row in each["training"]] for each in (found, alone)]
    assert tokens[0] == tokens[1]
    assert len(found["gates"]) == len(alone["gates"]) > 0
    for row, expected in zip(found["gates"], alone["gates"], strict=True):
        assert row["layer"] == expected["layer"]
        recalls = ("block_recall", "score_recall")
        assert [row[name] for name in recalls] == [None, None]
        numbers = {name: x for name, x in expected.items() if name not in ("layer", *recalls)}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-3)
    for row, expected in zip(found["fallback_counters"], alone["fallback_counters"], strict=True):
        assert (row["backend"], row["layers"]) == (expected["backend"], expected["layers"])
    config = NSAConfig(**small_config(Path("run"), Path("texts")).to_dict()["model"]["nsa"])
    layer = sent_bytes(64, 2, 2, 16, config=config, batch_size=2, dtype=torch.float32)
    last = found["heartbeat"][-1]
    assert last["mesh"] == {"data": 1, "context": 2}
    assert last["sent_bytes"] == 2 * sum(layer)
    last = alone["heartbeat"][-1]
    assert (last["mesh"], last["sent_bytes"]) == ({"data": 1, "context": 1}, 0)


def run_on_four(rank: int, out: Path, texts: Path) -> None:
    config = small_config(out, texts, training={"batch_size": 1}, **options_of("joined"))
    train(config)


@pytest.mark.exhaustive
def test_rows_over_one_axis_and_tokens_over_the_other(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    train(small_config(tmp_path / "one", texts, **options_of("joined", ranks=1)))
    in_processes(run_on_four, tmp_path / "four", texts, ranks=4)
    assert_same_curve(tmp_path / "four", tmp_path / "one")
    found, alone = rows_of(tmp_path / "four"), rows_of(tmp_path / "one")
    assert found["heartbeat"][-1]["mesh"] == {"data": 2, "context": 2}
    assert [x["tokens"] for x in found["training"]] == [x["tokens"] for x in alone["training"]]


def test_meshes_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write_texts(tmp_path / "texts")
    config = small_config(tmp_path / "run", texts, **options_of("joined"))
    for call in (train, dry_run):
        with pytest.raises(ValueError, match="parallel is 2, and the job has 1 processes: start "):
            call(config)
        assert not (tmp_path / "run").exists()
    dense = small_config(
        tmp_path / "run", texts, model={"attention": "dense"}, **options_of("joined")
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"parallel is 2, and model\.attention dense: only"):
        dry_run(dense)
    with pytest.raises(ValueError, match="context_parallel=0 must be at least 1"):
        small_config(tmp_path / "run", texts, **options_of("joined", ranks=0))


def run_on_cuda(rank: int, out: Path, texts: Path, options: dict[str, Any]) -> None:
    train(small_config(out, texts, **options))


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_gpus_share_rows(tmp_path: Path, parallel: str) -> None:
    """As one, to bfloat16's precision over twelve steps of Adam."""
    texts = write_texts(tmp_path / "texts")
    options = {**CUDA, "data": {"documents": "joined", "seq_len": 512}}
    train(small_config(tmp_path / "one", texts, **options))
    options["engine"] = {**CUDA["engine"], "parallel": parallel, "context_parallel": 2}
    in_processes(run_on_cuda, tmp_path / "two", texts, options, device="cuda")
    ours, theirs = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert len(ours) == len(theirs) == 8
    for each, other in zip(ours, theirs, strict=True):
        assert each[:2] == pytest.approx(other[:2], rel=0.05)  # the step, and a loss
