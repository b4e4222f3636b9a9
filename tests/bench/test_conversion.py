"""The study of conversion at a tiny size: every piece, what a second call does, the table."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from training.small_corpus import write_corpus

from nsa_flex import load
from nsa_flex.bench.quality import conversion as study_of
from nsa_flex.bench.quality import conversion_report as report_of
from nsa_flex.bench.quality import needles as needles_of
from nsa_flex.bench.quality.conversion import Recipe, Study, pieces, run
from nsa_flex.bench.quality.conversion_report import behind, conversion
from nsa_flex.bench.quality.needles import Kind
from nsa_flex.bench.report.rows import Row, read_rows
from nsa_flex.training.dense_choice import CHOICE_FILE

TINY = Recipe(
    size="tiny",
    tokens_per_step=256,
    length=64,
    long_length=128,
    steps=4,
    align=1,
    sparse=2,
    lengthen=1,
    held_out_tokens=512,
    fact_rows=0,
)
PIECES = [piece for piece in pieces(TINY) if piece.keep_dense < 2]  # the model has two layers
NAMES = [piece.name for piece in PIECES]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("downloads"))


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, list[Row]]:
    """All pieces, run once."""
    work = tmp_path_factory.mktemp("work")
    study = Study(corpus, work, seed=0, recipe=TINY)
    return study, run(study, work / "rows.json", NAMES)


def test_every_piece_of_the_study_is_a_row(finished: tuple[Study, list[Row]]) -> None:
    study, rows = finished
    assert rows == read_rows(study.work / "rows.json")
    assert [row["piece"] for row in rows] == NAMES
    for row, piece in zip(rows, PIECES, strict=True):
        assert row["status"] == "ok"
        assert [stage["name"] for stage in row["stages"]] == [each.name for each in piece.stages]
        assert row["seconds"] > 0
        for length in ("64", "128"):
            found = row["losses"][length]
            assert found["held_out_rows"] == 512 // int(length)
            assert found["loss"] == row["stages"][-1]["losses"][length] < 6
        is_nsa = row["variant"] != "dense"
        assert all(("block_recall" in stage) == is_nsa for stage in row["stages"])
    with_patched = [row["piece"] for row in rows if "patched" in row]
    others = ["max-pool", "more-blocks", "small-blocks", "half-dense", "small-fifth"]
    assert with_patched == ["converted", "converted-mlp", *others]
    by_name = {row["piece"]: row for row in rows}
    start = {length: found["loss"] for length, found in by_name["dense"]["losses"].items()}
    assert all(row["started_from"] == start for row in rows if row["piece"] != "dense")
    # Gates that let the selected branch alone through, which at this length sees half the row.
    patched, dense = by_name["converted"]["patched"], by_name["dense"]["losses"]
    assert patched["64"]["loss"] == pytest.approx(dense["64"]["loss"], abs=0.1)
    assert patched["64"]["loss"] != dense["64"]["loss"]


def test_all_that_follow_have_as_many_tokens_and_the_same_text(
    finished: tuple[Study, list[Row]],
) -> None:
    study, rows = finished
    assert rows[0]["tokens"] == 4 * 256
    assert {row["tokens"] for row in rows[1:]} == {4 * 256}
    cut = study.work / "cut"
    whole = (cut / "train-64.jsonl").read_text().splitlines()

    def part(first: int, count: int) -> list[str]:
        return (cut / f"train-64-{first}-{count}.jsonl").read_text().splitlines()

    pretrained, control = part(0, 16), part(16, 12)
    assert pretrained == whole[:16]
    assert not set(pretrained) & set(control)
    assert part(16, 4) + part(20, 8) == control  # of 1-align and 2-sparse
    assert (cut / "train-128-0-2.jsonl").exists()


def test_layers_that_lose_most_stay_dense_and_some_rows_have_facts(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = {"single": Kind(1, 1), "multi_value": Kind(2, 2, one_name=True)}
    for module in (study_of, needles_of, report_of):
        monkeypatch.setattr(module, "KINDS", kinds)
    recipe = dataclasses.replace(TINY, length=128, long_length=256, fact_rows=3)
    study = Study(corpus, tmp_path, seed=0, recipe=recipe)
    rows = run(study, tmp_path / "rows.json", ["one-dense"])
    assert [row["piece"] for row in rows] == ["dense", "one-dense"]
    for row in rows:
        assert list(row["needles"]) == ["128", "256"]
        for found in row["needles"]["256"].values():
            assert 0 <= found["right"] < 0.6  # of ten digits, after four steps
            assert found["questions"] == 128
    model = load(tmp_path / "one-dense-0" / "3-long" / "model")
    lost = json.loads((tmp_path / "one-dense-0" / CHOICE_FILE).read_text())["lost"]
    worst = int(max(lost, key=lambda layer: lost[layer]))
    assert rows[1]["dense_layers"] == [worst]
    is_dense = [not hasattr(layer.self_attn, "nsa") for layer in model.model.layers]
    assert is_dense == [number == worst for number in range(len(lost))]
    lines = (tmp_path / "cut" / "train-128-0-8.jsonl").read_text().splitlines()
    whole = (tmp_path / "cut" / "train-128.jsonl").read_text().splitlines()
    assert [a == b for a, b in zip(lines, whole, strict=False)] == [i % 3 > 0 for i in range(8)]
    cells = conversion(rows).set_index("model")["needles, 256"]
    assert all(re.fullmatch(r"\d+ / \d+", cell) for cell in cells)


def test_text_that_ends_begins_anew(corpus: Path, tmp_path: Path) -> None:
    study = Study(corpus, tmp_path, seed=0, recipe=TINY)
    whole = study.cut(64)["train"].read_text().splitlines()
    found = study.text(64, len(whole) - 1, 3).read_text().splitlines()
    assert found == [whole[-1], *whole[:2]]


def test_what_is_finished_is_not_run_again(
    finished: tuple[Study, list[Row]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study, rows = finished
    for name in ("_trained", "_measured"):
        monkeypatch.setattr(study_of, name, lambda *given, name=name: pytest.fail(name))
    assert run(study, tmp_path / "rows.json", NAMES) == rows
    other = dataclasses.replace(study, recipe=dataclasses.replace(TINY, rate=1e-5))
    with pytest.raises(ValueError, match="holds rows of another recipe; choose another --out"):
        run(other, tmp_path / "rows.json")
    with pytest.raises(ValueError, match="holds a run of another recipe; choose another --work"):
        run(other, tmp_path / "others.json")


def test_a_study_whose_time_is_up_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within the sparse stage, it keeps its steps and says nothing of the stage."""
    study = Study(corpus, tmp_path / "work", seed=0, recipe=TINY)
    out, trained = tmp_path / "rows.json", study_of._trained
    results: list[dict[str, Any]] = []

    def ends_in_sparse(now: Study, piece: Any, stage: Any, *rest: Any) -> dict[str, Any]:
        until = time.monotonic() - 1 if stage.name == "2-sparse" else now.until
        results.append(trained(dataclasses.replace(now, until=until), piece, stage, *rest))
        return results[-1]

    with monkeypatch.context() as patched:
        patched.setattr(study_of, "_trained", ends_in_sparse)
        rows = run(study, out, ["converted"])
    assert [result["stopped"] for result in results] == [False, False, True]
    assert results[-1]["steps"] == 1
    assert [row["status"] for row in rows] == ["ok", "running"]
    assert [stage["name"] for stage in rows[1]["stages"]] == ["1-align"]
    assert list(conversion(rows)["model"]) == ["patched", "dense"]
    over = dataclasses.replace(study, until=time.monotonic() - 1)
    assert run(over, out, ["converted"]) == rows
    (row,) = [row for row in run(study, out, ["converted"]) if row["piece"] == "converted"]
    assert row["status"] == "ok"
    assert [stage["steps"] for stage in row["stages"]] == [1, 2, 1]
    assert row == json.loads((study.work / "converted-0" / "row.json").read_text())


def row_of(piece: str, seed: int, loss: float, **columns: Any) -> Row:
    losses = {"loss": loss, "by_position": [loss] * 4}
    return {
        "target": "conversion",
        "piece": piece,
        "variant": "mean" if piece == "converted" else "dense",
        "seed": seed,
        "status": "ok",
        "recipe": dataclasses.asdict(TINY),
        "tokens": 2_000_000,
        "seconds": 3.0,
        "stages": [],
        "losses": {"64": losses, "128": losses},
        "commit": "c",
        **columns,
    }


def test_losses_are_told_relative_to_the_control_of_the_same_seed() -> None:
    stages = [
        {"seq_len": 64, "block_recall": [0.4, 0.5], "score_recall": [0.7, 0.8]},
        {"seq_len": 64, "block_recall": [0.6, 0.75], "score_recall": [0.9, 0.91]},
        {"seq_len": 128, "block_recall": [0.1, 0.2], "score_recall": [0.1, 0.2]},
    ]
    patched = {length: {"loss": 1.5, "by_position": [1.5] * 4} for length in ("64", "128")}
    rows = [
        row_of("continued", 0, 1.0),
        row_of("continued", 1, 2.0),
        row_of("converted", 0, 1.01, stages=stages, patched=patched),
        row_of("converted", 1, 2.06, stages=stages, started_from={"64": 2.0}),
        row_of("no-align", 7, 3.0),
        {"target": "quality"},
    ]
    assert behind(rows[2], rows[0], 64) == pytest.approx(1.0)
    table = conversion(rows).set_index("model")
    assert list(table.index) == ["patched", "continued", "converted", "no-align"]
    assert list(table["after continued, 64"]) == ["+50.0 %", "+0.0 ± 0.0 %", "+2.0 ± 1.0 %", "-"]
    assert list(table["over dense, 64"]) == ["-", "-", "+3.0 %", "-"]
    assert "over dense, 128" not in table
    assert table["loss at 128"]["converted"] == "1.535 ± 0.525"
    assert table["block recall"]["converted"] == "40 → 75 %"
    assert table["score recall"]["continued"] == "-"
    assert list(table["tokens"]) == ["0.0 M", "2.0 M", "2.0 M", "2.0 M"]


def test_a_conversion_takes_at_most_a_fifth_of_the_pretraining() -> None:
    recipe = Recipe()
    dense, *others = pieces(recipe)
    for piece in others:
        assert 5 * sum(stage.steps for stage in piece.stages) <= dense.stages[0].steps


def test_lengths_that_do_not_fit_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"length=60 must divide long_length=128, and that"):
        dataclasses.replace(TINY, length=60)
