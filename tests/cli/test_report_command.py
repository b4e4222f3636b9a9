"""`nsa-flex report`: the page of a run, of one without gates, of none."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from training.tiny_run import batch, patched
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.training.telemetry.rows import RowFile


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], prog_name="nsa-flex")


def write_run(folder: Path, *, probe: bool) -> None:
    with nsa_flex.telemetry(
        patched(), folder, probe=batch(1) if probe else None, every=1, gates_every=1
    ) as run:
        for step in range(3):
            run.step(torch.tensor(3.5 - step), tokens=100, learning_rate=0.1, grad_norm=2.0)
        run.record(loss=None, held_out_loss=1.25)


class Page(HTMLParser):
    """Headings, and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [
            value or ""
            for name, value in attributes
            if name in ("src", "href")
            or (name == "xlink:href" and not (value or "").startswith("#"))
        ]


def test_the_page_tells_changes(tmp_path: Path) -> None:
    write_run(tmp_path, probe=False)
    file = RowFile(tmp_path, "changes")
    for step, before, after in ((1, "0.1", "0.2"), (2, "0.2", "0.3")):
        file.append(
            {"time": 1.0, "step": step, "key": "training.x", "before": before, "after": after}
        )
    file.close()
    assert invoke(tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    assert "<b>0.1, 0.2 from 1, 0.3 from 2</b><span>training.x</span>" in text


def test_the_page_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, probe=True)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert page.loaded == []
    assert page.tags.count("svg") == 10
    tiles = {name: value for value, name in re.findall(r"<b>(.*?)</b><span>(.*?)</span>", text)}
    assert (tiles["steps"], tiles["loss"], tiles["held-out loss"]) == ("3", "1.5000", "1.2500")
    assert (tiles["tokens"], tiles["now"]) == ("300", "done")
    assert "<td>on cpu: trains everywhere</td>" in text
    assert ">18 forward calls of layers" in text  # three branches of two layers, three steps


def test_a_run_without_a_probe(tmp_path: Path) -> None:
    write_run(tmp_path / "run", probe=False)
    result = invoke(tmp_path / "run", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    assert "Backends" not in (tmp_path / "page.html").read_text()


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "holds no row of training.csv yet: name the folder of a run" in result.stderr


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    write_run(tmp_path, probe=False)
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert f"needs {missing}, which is not installed" in result.stderr
