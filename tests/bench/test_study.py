"""The whole study: its runs, their commands, and what becomes of their rows."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from nsa_flex.bench.quality import conversion, one_run, recall, side_by_side, study
from nsa_flex.bench.quality.side_by_side import SECONDS, Job
from nsa_flex.bench.report.rows import read_rows

RESULTS = Path(__file__).parents[2] / "bench" / "results"
CORPUS = Path("corpus")


def test_runs_do_not_share_names_or_rows() -> None:
    runs = study.study(CORPUS, Path("work"))
    assert len({run.job.name for run in runs}) == len({run.rows for run in runs}) == len(runs)
    names = {run.job.name for run in runs}
    assert all({*run.job.after} <= names for run in runs)
    assert sum(bool(run.job.after) for run in runs) == 12


def test_commands_are_those_of_their_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = {module.__name__: module for module in (conversion, one_run, recall)}
    called: list[tuple[Any, ...]] = []

    def note(*given: Any) -> dict[str, Any]:
        called.append(given)
        return {"case": "", "status": "ok", "steps": 0, "seconds": 0.0}

    monkeypatch.setattr(one_run, "one_run", note)
    monkeypatch.setattr(recall, "recall", note)
    monkeypatch.setattr(conversion, "run", lambda *given: [note(*given)][:0])
    monkeypatch.setattr(conversion, "conversion", lambda rows: study.table("recall", []))
    for run in study.study(CORPUS, tmp_path):
        flag, module, *arguments = run.job.command
        assert flag == "-m"
        given = [each.replace(SECONDS, "500") for each in arguments]
        monkeypatch.setattr(sys, "argv", [module, *given])
        programs[module].main()
        if module == recall.__name__:
            variant, seed, folder, seconds, recipe, checkpoint = called[-1]
            assert folder / recall.ROW == run.rows
            assert seconds == 500
            assert run.job.name == f"{recipe.name}-{variant}-{seed}"
            needed = [] if checkpoint is None else [checkpoint.parent.name]
            assert list(run.job.after) == needed
        elif module == one_run.__name__:
            assert called[-1][4] / one_run.ROW == run.rows
        else:
            assert called[-1][1] == run.rows
    assert len(called) == len(study.study(CORPUS, tmp_path))


def test_rows_of_finished_runs_become_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rows of the page in place of what processes would write."""
    rows = [
        *read_rows(RESULTS / "recall_h200.json"),
        *read_rows(RESULTS / "conversion_stages_30m_h200.json"),
    ]
    by_rows = {run.job: run for run in study.study(CORPUS, tmp_path / "work")}
    started: list[str] = []

    class Done:
        def __init__(self, job: Job, gpu: int, seconds: float) -> None:
            started.append(job.name)
            part, (name, *rest) = by_rows[job].part, job.name.split("-")
            seed = int(rest[-1])
            found = [row for row in rows if (row["target"], row["seed"]) == (part, seed)]
            if part == "recall":
                variant = "-".join(rest[:-1])
                told = [r for r in found if r["case"].startswith(f"recall/{variant} {name} ")]
                found = told or [{**found[0], "case": f"recall/{variant} {name} seed {seed}"}]
            by_rows[job].rows.parent.mkdir(parents=True)
            by_rows[job].rows.write_text(json.dumps(found))

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(side_by_side, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(study, "start_in", lambda *given: Done)
    command = ["study", "--corpus=corpus", f"--work={tmp_path / 'work'}", f"--out={tmp_path}"]
    command += ["--parts", "recall", "conversion"]
    monkeypatch.setattr(sys, "argv", command)
    study.main()
    assert len(started) == len(set(started)) == 35
    assert started.index("scratch-dense-0") < started.index("conversion-mean-0")
    printed = capsys.readouterr().out
    assert "| small-blocks | aggregation | 3100 | share | 3 |" in printed
    assert "| one-dense | mean | 10.5 M | 3 |" in printed
    assert read_rows(tmp_path / "conversion.json")
    # Seeds 0 and 2 lack a piece: their rows are there, and they are still to do.
    monkeypatch.setattr(sys, "argv", [*command, "--list"])
    study.main()
    left = [line for line in capsys.readouterr().out.splitlines() if line.endswith("to do")]
    assert left == ["conversion  conversion-0  to do", "conversion  conversion-2  to do"]


def test_unknown_parts_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["study", "--corpus=corpus", "--parts", "texts"])
    with pytest.raises(SystemExit):
        study.main()
    assert "--parts texts: expected some of text-16k, recall, " in capsys.readouterr().err
