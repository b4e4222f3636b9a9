"""`nsa-flex bench`: one smoke run on the CPU, what it leaves, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from nsa_flex.bench.cases.registry import preset
from nsa_flex.bench.measure import runner
from nsa_flex.bench.report.rows import read_rows, write_rows
from nsa_flex.cli.app import app


def invoke(*arguments: str | Path) -> Result:
    command = ["bench", *map(str, arguments)]
    return CliRunner().invoke(app, command, prog_name="nsa-flex", env={"COLUMNS": "200"})


SMOKE = ("--preset", "smoke", "--device", "cpu", "--compiler", "eager")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """One run of every smoke case, and its file of rows."""
    out = tmp_path_factory.mktemp("bench") / "new" / "rows.json"
    # Traced but not compiled: that costs most of the time and has tests of its own.
    return invoke(
        *SMOKE, "--milliseconds", 2, "--json", "--out", out, "--plot", out.with_suffix(".png")
    ), out


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*arguments: Any) -> None:
        raise AssertionError("something was measured again")

    monkeypatch.setattr(runner, "rows_of", measured)


def test_smoke_measures_every_case(smoke):
    result, out = smoke
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert {row["case"] for row in rows} == {case.key for case in preset("smoke")}
    assert {row["status"] for row in rows} == {"ok"}
    assert rows == read_rows(out)


def test_rows_say_what_ran_where(smoke):
    for row in read_rows(smoke[1]):
        for name in ("device", "torch", "python", "nsa_flex", "sources", "date", "dtype"):
            assert row[name], name
        assert row["p20_ms"] <= row["median_ms"] <= row["p80_ms"]
        if row["target"] == "layer":
            continue  # its projections are not counted, and it is compared before it is timed
        assert row["floor_ms"] > 0
        if row["target"] != "model":
            assert 0 <= max(row["error_over_allowed"].values()) <= 1


def test_picture_is_a_png(smoke):
    picture = smoke[1].with_suffix(".png")
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_finished_run_measures_nothing_again(smoke, no_measuring):
    result = invoke(*SMOKE, "--out", smoke[1], "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["rows"] == read_rows(smoke[1])
    kept = len(preset("smoke"))
    assert f"{kept} of {kept} cases are in {smoke[1]}; --fresh measures" in result.stderr


@pytest.mark.parametrize("other", [("--seed", "7"), ("--compiler", "aot_eager")])
def test_other_settings_are_measured(other, smoke, tmp_path, monkeypatch):
    write_rows(tmp_path / "rows.json", read_rows(smoke[1]))
    measured: list[str] = []

    def note(case: Any, *arguments: Any) -> list[dict[str, Any]]:
        measured.append(case.key)
        return [{**case.fields(), "pass": "forward", "status": "skipped", "reason": "x"}]

    monkeypatch.setattr(runner, "rows_of", note)
    invoke(*SMOKE, *other, "--out", tmp_path / "rows.json", "--only", "choice")
    assert measured


def test_interrupted_run_measures_the_rest(smoke, tmp_path, monkeypatch):
    rows, out = read_rows(smoke[1]), tmp_path / "rows.json"
    last = preset("smoke")[-1].key
    write_rows(out, [row for row in rows if row["case"] != last])
    measured: list[str] = []

    def note(case: Any, *arguments: Any) -> list[dict[str, Any]]:
        measured.append(case.key)
        skipped = {"status": "skipped", "reason": "x"}
        return [{"case": case.key, "target": "core", "pass": "forward", **skipped}]

    monkeypatch.setattr(runner, "rows_of", note)
    invoke(*SMOKE, "--out", out, "--json")
    assert measured == [last]
    invoke(*SMOKE, "--out", out, "--json", "--fresh")
    assert measured == [last, *(case.key for case in preset("smoke"))]


def test_shows_rows_without_running(smoke, no_measuring):
    text = invoke("--no-run", "--out", smoke[1]).output
    assert "core" in text
    assert "tokens/s" in text
    assert "heads 4/2, D 16, tokens 128" in text  # once, above the table
    assert "…" not in text, "a number is cut off"
    text = invoke("--no-run", "--out", smoke[1], "--markdown", "--only", "core/nsa ").stdout
    assert text.splitlines()[0].startswith("| part | on | heads |")
    assert "merge" not in text


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (0.1, 1), (10.0, 0)])
def test_compare_decides_the_exit_code(smoke, tmp_path, factor, code, no_measuring):
    old = read_rows(smoke[1])
    for row in old:  # without spread, so that ten times is ten times
        row["p20_ms"] = row["median_ms"] = row["p80_ms"] = factor * row["median_ms"]
    write_rows(tmp_path / "old.json", old)
    options = ("--no-run", "--out", smoke[1], "--json")
    result = invoke(*options, "--compare", tmp_path / "old.json", "--only", "training_step")
    assert result.exit_code == 2  # --only left nothing to compare
    result = invoke(*options, "--compare", tmp_path / "old.json")
    verdicts = {verdict["verdict"] for verdict in json.loads(result.stdout)["verdicts"]}
    expected = {1.0: "same", 0.1: "slower", 10.0: "faster"}[factor]
    assert expected in verdicts
    assert result.exit_code == code, result.output


def test_a_failed_case_is_exit_code_one(tmp_path, monkeypatch):
    def fail(case: Any, *arguments: Any) -> list[dict[str, Any]]:
        why = {"status": "failed", "reason": "errors over what is allowed: out 3.00"}
        return [{**case.fields(), "pass": "forward", **why}]

    monkeypatch.setattr(runner, "rows_of", fail)
    result = invoke("--device", "cpu", "--out", tmp_path / "rows.json", "--only", "choice")
    assert result.exit_code == 1
    assert "errors over what is allowed: out 3.00" in result.output


def test_list_names_the_cases():
    lines = invoke("--preset", "smoke", "--device", "cpu", "--list").stdout.splitlines()
    listed = invoke("--preset", "smoke", "--device", "cpu", "--list", "--json").stdout
    assert json.loads(listed) == lines
    assert lines == [case.key for case in preset("smoke")]
    options = ("--preset", "headline", "--device", "cpu", "--dtype", "fp16", "--list")
    lines = invoke(*options).stdout.splitlines()
    assert lines
    assert all(" float16 " in line for line in lines)


def test_shapes_replace_those_of_the_preset():
    options = ("--heads", "8/4", "--heads", "6/2", "--seq-len", 96, "--head-dim", "32/16")
    lines = invoke(
        "--device", "cpu", "--list", "--only", "core/nsa ", *options
    ).stdout.splitlines()
    assert len(lines) == 4
    assert all(" S96 D32/16 " in line for line in lines)
    assert {line.split()[2] for line in lines} == {"1x8/4", "1x6/2"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "other"), "'other' is none of smoke, quick, headline"),
        (("--preset", "headline", "--device", "cpu"), "headline needs a CUDA device, got cpu"),
        (("--device", "nowhere"), "'nowhere' is no device"),
        (("--device", "meta"), "benchmarks run on cpu and cuda"),
        (("--heads", "8/3"), "3 key-value heads must divide 8 query heads"),
        (("--dtype", "int8"), "'int8' is none of bfloat16"),
        (("--only", "nothing like it"), "no case of smoke holds"),
        (("--no-run", "--out", "missing.json"), "there is no file missing.json"),
        (("--no-run", "--seq-len", "64"), "shows all rows of --out; --only chooses"),
        (("--preset", "compile", "--heads", "8/2"), "cases of compile have no shapes to choose"),
        (("--compare", "missing.json"), "there is no file missing.json"),
    ],
)
def test_wrong_usage_is_exit_code_two(arguments, message):
    given = arguments if "--device" in arguments else ("--device", "cpu", *arguments)
    result = invoke(*given)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    result = invoke("--device", "cpu", "--out", tmp_path / "other.json")
    assert result.exit_code == 2
    assert "holds no rows of nsa-flex bench" in result.output
    assert (tmp_path / "other.json").read_text() == "{}"
    (tmp_path / "other.json").write_text('[{"case": "a"}]')
    result = invoke("--no-run", "--out", tmp_path / "other.json")
    assert result.exit_code == 2
    assert "has rows of another benchmark: a" in result.output


def test_help_has_examples_that_parse():
    text = invoke("--help").output
    assert "nsa-flex bench --preset headline" in text
    for name in ("smoke:", "headline:", "full:"):
        assert name in text
    listed = invoke("--device", "cpu", "--heads", "12/2", "--head-dim", "64", "--list")
    assert listed.exit_code == 0
