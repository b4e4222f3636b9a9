"""Paths that cannot be written are refused before the work, in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nsa_flex.cli.app import app
from nsa_flex.cli.outputs import check_file, check_folder, print_json


def test_files(tmp_path: Path) -> None:
    check_file(None, "--out")
    check_file(tmp_path / "new.json", "--out")
    for path, message in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "new.json", "there is no folder"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            check_file(path, "--out")


def test_folders(tmp_path: Path) -> None:
    check_folder(tmp_path, "--out")
    check_folder(tmp_path / "new" / "newer", "--out")
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(typer.BadParameter, match="file is no folder"):
            check_folder(path, "--out")


@pytest.mark.parametrize(
    "arguments",
    [
        ["audit", "llama", "--html", "{}/no/page.html"],
        ["audit", "llama", "--write-baseline", "{}"],
        ["report", "{}", "--out", "{}/no/page.html"],
        ["bench", "--preset", "smoke", "--out", "{}"],
        ["bench", "--preset", "smoke", "--out", "{}/file/rows.json"],
        ["bench", "--preset", "smoke", "--out", "{}/rows.json", "--plot", "{}/file/plot.png"],
        ["demo", "--out", "{}/file"],
        ["train", "tiny", "--set", "out={}/file"],
        ["generate", "{}", "text", "--seed", "99999999999999999999999"],
        ["check", "llama", "--seed", "-1"],
        ["generate", "{}", "text", "--device", "meta"],
    ],
)
def test_commands_say_so_first(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = [each.format(tmp_path) for each in arguments]
    result = CliRunner().invoke(app, given, prog_name="nsa-flex")
    assert result.exit_code == 2, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), 1.0, (float("inf"),)], "b": {"c": -0.5}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.0, [None]], "b": {"c": -0.5}}
