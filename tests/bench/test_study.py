"""The whole study: its runs, their commands, and what becomes of their rows."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training.small_corpus import write_corpus

from nsa_flex.bench.quality import conversion, one_run, recall, side_by_side, study
from nsa_flex.bench.quality.build import digest
from nsa_flex.bench.quality.side_by_side import SECONDS, Job
from nsa_flex.bench.report.rows import Row, read_rows

RESULTS = Path(__file__).parents[2] / "bench" / "results"


def test_runs_do_not_share_names_or_rows() -> None:
    runs = study.study(Path("corpus"), Path("work"), Path("rows"))
    assert len({run.job.name for run in runs}) == len({run.path for run in runs}) == len(runs)
    for part in {run.part for run in runs}:
        names = {run.job.name for run in runs if run.part == part}
        needed = {name for run in runs if run.part == part for name in run.job.after}
        assert needed <= names
        assert len(needed) == (3 if part == study.RECALL else 0)


def test_commands_are_those_of_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {module.__name__: module for module in (conversion, one_run, recall)}
    called: list[tuple[Any, ...]] = []

    def note(*given: Any) -> Row:
        called.append(given)
        return {"case": "", "status": "ok", "steps": 0, "seconds": 0.0}

    monkeypatch.setattr(one_run, "one_run", note)
    monkeypatch.setattr(recall, "recall", note)
    monkeypatch.setattr(conversion, "run", lambda *given: [note(*given)][:0])
    monkeypatch.setattr(conversion, "conversion", lambda rows: rows)
    monkeypatch.setattr(conversion, "markdown", str)
    runs = study.study(Path("corpus"), tmp_path, tmp_path)
    for run in runs:
        flag, module, *arguments = run.job.command
        assert flag == "-m"
        given = [each.replace(SECONDS, "500") for each in arguments]
        monkeypatch.setattr(sys, "argv", [module, *given])
        programs[module].main()
        if module == recall.__name__:
            variant, seed, folder, seconds, recipe, checkpoint = called[-1]
            assert folder / recall.ROW == run.path
            assert seconds == 500
            assert run.job.name == f"{recipe.name}-{variant}-{seed}"
            needed = [] if checkpoint is None else [checkpoint.parent.name]
            assert list(run.job.after) == needed
        elif module == one_run.__name__:
            assert called[-1][4] / one_run.ROW == run.path
        else:
            assert called[-1][1] == run.path
    assert len(called) == len(runs)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("downloads"))


def rows_of(job: Job, corpus: Path) -> list[Row]:
    """Rows of the page in other names, with the recipes as they are now."""
    name, _, seed = job.name.rpartition("-")
    if name == "conversion":
        (row, *_) = read_rows(RESULTS / "conversion_stages_30m_h200.json")
        recipe = dataclasses.asdict(conversion.Recipe())
        row |= {"seed": int(seed), "recipe": recipe, "corpus": digest(corpus)}
        pieces = (conversion.DENSE, *study.PIECES)
        return [{**row, "piece": name, "case": f"{name} seed {seed}"} for name in pieces]
    rows = read_rows(RESULTS / "recall_h200.json")
    row = next(row for row in rows if row["case"].startswith("recall/mean scratch"))
    kind = next(each for each in study.RECIPES if name.startswith(each))
    variant = name.removeprefix(f"{kind}-")
    recipe = dataclasses.asdict(study.RECIPES[kind])
    return [{**row, "case": job.name, "variant": variant, "seed": int(seed), "recipe": recipe}]


def run_study(
    corpus: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *more: str,
    change: Callable[[Job, list[Row]], list[Row]] = lambda job, rows: rows,
) -> list[str]:
    """Runs two parts, whose processes write rows and end at once; returns what was started."""
    runs = {run.job: run for run in study.study(corpus, folder, folder / "rows")}
    started: list[str] = []

    class Done:
        def __init__(self, job: Job, gpu: int, seconds: float) -> None:
            started.append(job.name)
            runs[job].path.parent.mkdir(parents=True, exist_ok=True)
            runs[job].path.write_text(json.dumps(change(job, rows_of(job, corpus))))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(side_by_side, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(study, "start_in", lambda *given: Done)
    command = ["study", f"--corpus={corpus}", f"--work={folder}", "--parts"]
    monkeypatch.setattr(sys, "argv", [*command, study.RECALL, study.CONVERSION, *more])
    study.main()
    return started


def test_rows_become_tables_and_what_is_finished_is_not_run_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    started = run_study(corpus, tmp_path, monkeypatch)
    assert len(started) == len(set(started)) == 47
    printed = capsys.readouterr().out
    assert "| small-blocks | aggregation | 3100 | share | 3 |" in printed
    assert "| mean | one-dense | 400 | 3 | 8k / 16k / 32k / 64k / 128k |" in printed
    assert "| one-dense | dense | 52.4 M | 3 |" in printed
    assert (tmp_path / "rows" / "recall.png").stat().st_size > 10_000
    assert len(read_rows(tmp_path / "rows" / "conversion.json")) == 3 * (1 + len(study.PIECES))
    monkeypatch.setattr(study.recall_report, "draw", lambda rows, path: None)
    assert run_study(corpus, tmp_path, monkeypatch) == []
    capsys.readouterr()
    assert run_study(corpus, tmp_path, monkeypatch, "--list") == []
    assert set(capsys.readouterr().out.split()) & {"finished", "to"} == {"finished"}


def test_rows_that_were_written_earlier_count_by_their_recipe(tmp_path: Path) -> None:
    """Those of the page are of older code, which chose layers on rows of 4k."""
    runs = {run.job.name: run for run in study.study(tmp_path, tmp_path, tmp_path)}
    finished: dict[str, set[bool]] = {}
    for name in ("recall_h200", "recall_conversion_h200"):
        for row in read_rows(RESULTS / f"{name}.json"):
            job = f"{row['recipe']['name']}-{row['variant']}-{row['seed']}"
            path = runs[job].path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([row]))
            finished.setdefault(row["recipe"]["name"], set()).add(runs[job].is_finished())
    assert finished["aggregation"] == {True}
    assert finished["one-dense"] == {False}


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study.recall_report, "draw", lambda rows, path: None)


@pytest.mark.usefixtures("no_plots")
def test_what_is_not_finished_is_run_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A piece is missing, a run was stopped, another had another recipe."""
    changed = {"conversion-1", "scratch-dense-2", "aggregation-mean-0"}

    def change(job: Job, rows: list[Row]) -> list[Row]:
        (first, *others) = rows
        return {
            "conversion-1": others,
            "scratch-dense-2": [{**first, "status": "stopped", "steps": 7}],
            "aggregation-mean-0": [{**first, "recipe": {**first["recipe"], "warmup_steps": 1}}],
        }.get(job.name, rows)

    waiting = {name for name in run_study(corpus, tmp_path, monkeypatch) if name in changed}
    assert waiting == changed
    other = tmp_path / "other"
    started = run_study(corpus, other, monkeypatch, change=change)
    runs = study.study(corpus, other, other)
    needs_it = {run.job.name for run in runs if "scratch-dense-2" in run.job.after}
    assert len(needs_it) == 8
    assert len(started) == 47 - len(needs_it)
    assert not needs_it & {*started}
    assert "| dense | scratch | 3100 | single | 2 |" in capsys.readouterr().out
    assert {*run_study(corpus, other, monkeypatch)} == changed | needs_it


@pytest.mark.usefixtures("no_plots")
def test_a_folder_of_another_corpus_and_unknown_parts_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", f"--corpus={corpus}", "--parts", "texts"])
    with pytest.raises(SystemExit):
        study.main()
    assert "--parts texts: expected some of text-16k, recall, " in capsys.readouterr().err

    def change(job: Job, rows: list[Row]) -> list[Row]:
        return [{**row, "corpus": "0123456789ab"} for row in rows]

    run_study(corpus, tmp_path, monkeypatch, change=change)
    with pytest.raises(ValueError, match=r"conversion\.json holds rows of another corpus"):
        run_study(corpus, tmp_path, monkeypatch)
