"""The comparison of NSA with dense attention after training, and its corpus, at a tiny size."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nsa_flex.bench.report.quality import summarize
from nsa_flex.bench.tools import text_corpus
from nsa_flex.bench.tools.quality import (
    CHOICES,
    KINDS,
    Evaluation,
    Plan,
    compare,
    run_all,
    run_one,
)

ROOT = Path(__file__).resolve().parents[2]
NSA = (
    "{compress_block_size: 8, compress_stride: 4, select_block_size: 8,"
    " num_selected_blocks: 4, window_size: 12}"
)
PLAN = Plan(
    steps=8,
    seconds=600.0,
    eval_every=4,
    rows=3,
    buckets=4,
    overrides=(
        "model.preset=tiny",
        f"model.nsa={NSA}",
        "data.seq_len=64",
        "training.batch_size=2",
        "training.warmup_steps=2",
        "training.learning_rate=0.01",
        "engine.device=cpu",
        "engine.compile=false",
        "run.log_every=2",
        "run.gates_every=4",
        "run.eval_every=0",
        "run.save_every=0",
    ),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    trees = [(ROOT / "docs", None), (ROOT / "masks", None)]
    counts = text_corpus.write(trees, out, held_out_share=0.3, seed=0)
    assert min(counts.values()) > 0
    return out


def documents(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def test_folders_are_documents(corpus: Path) -> None:
    training = "".join(documents(corpus / "train.jsonl.xz"))
    held_out = documents(corpus / "held_out.jsonl.xz")
    heads = [text.splitlines()[0] for text in held_out]
    assert all(head.startswith("==> ") and head.endswith(" <==") for head in heads)
    for head in heads:
        assert head not in training
    assert all(len(text) <= text_corpus.HELD_OUT_DOCUMENT for text in held_out)


def test_a_tree_gives_no_more_than_asked(tmp_path: Path) -> None:
    found = list(text_corpus.folders(ROOT / "docs", 1e-6, 0))
    assert len(found) == 1


def test_both_runs_side_by_side(tmp_path: Path, corpus: Path) -> None:
    class Done:
        def __init__(self, kind: str) -> None:
            run_one(kind, corpus, tmp_path / kind, PLAN)

        def wait(self) -> int:
            return 0

    found = run_all(corpus, tmp_path, PLAN, lambda kind, gpu: Done(kind))
    assert json.loads((tmp_path / "quality.json").read_text()) == found
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    for kind in KINDS:
        model = found["models"][kind]
        assert [each["step"] for each in model["evaluations"]] == [4, 8]
        assert model["evaluations"][1]["loss"] < model["evaluations"][0]["loss"]
        for each in model["evaluations"]:
            assert each["tokens"] == each["step"] * 2 * 64
            assert np.mean(each["by_position"]) == pytest.approx(each["loss"], rel=1e-2)
    assert {row["step"] for row in found["models"]["nsa"]["gates"]} == {0, 4, 8}
    assert len(found["models"]["nsa"]["overlap_by_layer"]) == 2
    assert found["models"]["dense"]["gates"] == []
    assert found["equal_tokens"]["tokens"] == 8 * 2 * 64
    with np.load(tmp_path / "nsa" / CHOICES) as file:
        assert file["blocks"].shape == (2, 64, 4)


def test_a_run_ends_in_time(tmp_path: Path, corpus: Path) -> None:
    plan = Plan(**{**vars(PLAN), "steps": 10_000, "seconds": 0.01})
    found = run_one("dense", corpus, tmp_path, plan)
    assert found["evaluations"][-1]["step"] < 100


def test_a_run_that_is_killed_leaves_what_it_measured(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_one("dense", corpus, tmp_path / "dense", PLAN)

    def killed(self: Evaluation, *args: Any, **kwargs: Any) -> None:
        if self.found:
            raise KeyboardInterrupt
        evaluate(self, *args, **kwargs)

    evaluate = Evaluation._evaluate
    monkeypatch.setattr(Evaluation, "_evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        run_one("nsa", corpus, tmp_path / "nsa", PLAN)
    found = compare(tmp_path)
    assert found["equal_tokens"]["step"] == whole["evaluations"][0]["step"] == 4
    assert (tmp_path / "quality.png").stat().st_size > 10_000


def result(name: str, seconds: list[float], losses: list[float]) -> dict[str, Any]:
    rows = [
        {"step": i, "tokens": 10 * i, "seconds": t, "loss": x, "by_position": [x + 1, x, x, x - 1]}
        for i, (t, x) in enumerate(zip(seconds, losses, strict=True), 1)
    ]
    return {"attention": name, "evaluations": rows}


def test_equal_tokens_and_equal_seconds() -> None:
    found = summarize(
        [result("nsa", [1.0, 2.0, 3.0], [5.0, 4.0, 3.0]), result("dense", [2.0, 4.0], [5.0, 3.0])]
    )
    assert found["equal_tokens"] == {
        "step": 2,
        "tokens": 20,
        "nsa_loss": 4.0,
        "nsa_seconds": 2.0,
        "nsa_last_quarter": 3.0,
        "dense_loss": 3.0,
        "dense_seconds": 4.0,
        "dense_last_quarter": 2.0,
    }
    assert found["equal_seconds"] == {
        "seconds": 3.0,
        "nsa_loss": 3.0,
        "nsa_tokens": 30,
        "dense_loss": 4.0,
        "dense_tokens": 15,
    }


def test_nothing_is_known_before_the_first_measurement() -> None:
    found = summarize(
        [result("nsa", [5.0, 6.0], [5.0, 4.0]), result("dense", [1.0, 2.0], [5.0, 3.0])]
    )
    assert found["equal_seconds"]["nsa_loss"] is None
    assert found["equal_seconds"]["dense_loss"] == 3.0
