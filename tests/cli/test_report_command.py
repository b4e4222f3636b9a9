"""`nsa-flex report`: the page of a run, of one without gates, of several, of none."""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from training.tiny_run import batch, patched
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.training import report as pages
from nsa_flex.training.telemetry.rows import RowFile, read_rows


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)], prog_name="nsa-flex")


def write_run(
    folder: Path,
    *,
    probe: bool = False,
    first_step: int = 0,
    tokens: int = 100,
    tokens_per_byte: float | None = None,
) -> None:
    with nsa_flex.telemetry(
        patched(),
        folder,
        probe=batch(1) if probe else None,
        every=1,
        gates_every=1,
        first_step=first_step,
        tokens_per_byte=tokens_per_byte,
    ) as run:
        run.tokens = first_step * tokens
        for step in range(3):
            run.step(torch.tensor(3.5 - step), tokens=tokens, learning_rate=0.1, grad_norm=2.0)
        run.record(loss=None, held_out_loss=1.25)


def append(folder: Path, artefact: str, *rows: dict[str, Any]) -> None:
    file = RowFile(folder, artefact)
    for row in rows:
        file.append(row)
    file.close()


def write_whole_run(folder: Path) -> None:
    """All that `nsa-flex train` leaves behind for the page, after two sessions; wide numbers."""
    for first_step in (0, 2):
        write_run(
            folder, probe=True, first_step=first_step, tokens=400_000_000, tokens_per_byte=0.25
        )
    (folder / "config.yaml").write_text("training: {learning_rate: 0.1}\ndata: {files: text}\n")
    append(folder, "samples", {"session": 2, "step": 5, "prompt": "Once", "text": " upon a time"})
    change = {"key": "training.learning_rate", "before": "0.2", "after": "0.1"}
    append(folder, "changes", {"time": 1.0, "step": 2, **change})
    record = folder / "checkpoint-5" / "run.json"
    record.parent.mkdir()
    files = [{"hash": "ab", "size": 3 * 2**20}, {"hash": "cd", "size": 2**20}]
    record.write_text(json.dumps({"files": files}))


class Page(HTMLParser):
    """Whatever would be loaded from elsewhere, and the numbers that are drawn."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.element = ""
        self.text, self.data = "", ""
        self.feed(file.read_text())
        self.text = " ".join(self.text.split())
        self.drawn: dict[str, Any] = json.loads(self.data)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.element = "data" if ("id", "data") in attributes else tag
        self.loaded += [
            value or "" for name, value in attributes if name in ("src", "href", "srcset")
        ]

    def handle_data(self, data: str) -> None:
        if self.element == "data":
            self.data += data
        elif self.element not in ("script", "style"):
            self.text += data
        self.element = "" if self.element == "data" and not data.strip() else self.element

    def handle_endtag(self, tag: str) -> None:
        self.element = ""


def tiles(file: Path) -> dict[str, str]:
    found = re.findall(r"<b>(.*?)</b><span>(.*?)</span>", file.read_text())
    return {name: value for value, name in found}


def test_the_page_tells_changes(tmp_path: Path) -> None:
    write_run(tmp_path)
    key = "training.x"
    append(
        tmp_path,
        "changes",
        {"time": 1.0, "step": 1, "key": key, "before": "0.1", "after": "0.2"},
        {"time": 1.0, "step": 2, "key": key, "before": "0.2", "after": "0.3"},
    )
    assert invoke(tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    row = "<td>{}</td><td><code>training.x</code></td><td>{}</td><td>{}</td>"
    assert row.format(1, "0.1", "0.2") in text
    assert row.format(2, "0.2", "0.3") in text


def test_the_page_tells_data_config_and_the_machine_of_each_session(tmp_path: Path) -> None:
    write_whole_run(tmp_path)
    assert invoke(tmp_path).exit_code == 0
    text = (tmp_path / "report.html").read_text()
    hashes = hashlib.sha256(b"abcd").hexdigest()[:16]
    for name, value in (("files", "2"), ("size", "4.0 MiB"), ("fingerprint", hashes)):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in text
    setting = '<td class="key"><code>{}</code></td><td><code>{}</code></td>'
    assert setting.format("training.learning_rate", "0.1") in text
    assert setting.format("data.files", "&#34;text&#34;") in text
    sessions = text[text.index("<h2>Sessions</h2>") :]
    sessions = sessions[: sessions.index("</table>")]
    assert "<th>device</th><th>ranks</th><th>parameters</th>" in sessions
    device = read_rows(tmp_path, "sessions")[0]["device"]
    assert sessions.count(f"<td>{device}</td><td>1</td>") == 2
    facts = tiles(tmp_path / "report.html")
    assert facts["tokens"] == "2,000,000,000"
    assert facts["bits per byte"] == f"{1.25 * 0.25 / math.log(2):.4f}"


def test_the_page_of_a_run(tmp_path: Path) -> None:
    write_run(tmp_path, probe=True)
    result = invoke(tmp_path)
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "report.html")
    assert page.loaded == []
    (run,) = page.drawn["runs"]
    assert run["lines"]["loss"] == [3.5, 2.5, 1.5, None]
    assert run["lines"]["held_out_loss"] == [None, None, None, 1.25]
    assert run["lines"]["tokens"] == [100, 200, 300, 300]
    assert run["layers"]["steps"] == [0, 1, 2, 3]
    assert len(run["layers"]["layers"]) == 2
    shares = run["layers"]["values"]["share_sliding"]
    assert [len(of_step) for of_step in shares] == [2] * 4
    recalls = run["layers"]["values"]["score_recall"]
    assert all(0 < recall < 1.001 for of_step in recalls for recall in of_step)
    assert page.drawn["captions"]["block_recall"].startswith("of the blocks with the most dense")
    assert page.drawn["captions"]["entropy"].startswith("of the shares, mean, nats")
    facts = tiles(tmp_path / "report.html")
    assert (facts["steps"], facts["loss"], facts["held-out loss"]) == ("3", "1.5000", "1.2500")
    assert (facts["tokens"], facts["perplexity"], facts["now"]) == ("300", "3.49", "done")
    text = (tmp_path / "report.html").read_text()
    assert "<td>on cpu: trains everywhere</td>" in text
    assert ">18 forward calls of layers" in text  # three branches of two layers, three steps
    assert f"<td>{torch.__version__}</td>" in text
    assert "http://" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)


def test_a_run_without_a_probe(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    result = invoke(tmp_path / "run", "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    page = Page(tmp_path / "page.html")
    assert "Backends" not in page.text
    assert page.drawn["runs"][0]["layers"] == {}


def test_sessions_are_marked_and_time_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_run(tmp_path, first_step=2)  # step 3 is repeated
    assert invoke(tmp_path).exit_code == 0
    (run,) = Page(tmp_path / "report.html").drawn["runs"]
    assert run["lines"]["step"] == [1, 2, 3, 4, 5, 5]
    assert run["lines"]["begins"] == [False, False, True, False, False, False]
    hours = run["lines"]["hours"]
    assert hours == sorted(hours)
    assert len(run["beats"]["gaps"]) == 1
    assert tiles(tmp_path / "report.html")["sessions"] == "2"


def test_several_runs_stand_beside_one_another(tmp_path: Path) -> None:
    for name, rate in (("a/out", 0.1), ("b/out", 0.2)):
        write_run(tmp_path / name)
        text = f"seed: 0\ntraining: {{learning_rate: {rate}}}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    result = invoke(tmp_path / "a/out", tmp_path / "b/out")
    assert result.exit_code == 0, result.output
    file = tmp_path / "a/out/report.html"
    page = Page(file)
    assert [run["name"] for run in page.drawn["runs"]] == ["a/out", "b/out"]
    text = file.read_text()
    assert '<th scope="row">b/out</th><td>3</td><td>1.5000</td>' in text
    assert "Settings that differ" in text
    assert "<td><code>0.1</code></td><td><code>0.2</code></td>" in text
    assert "<code>seed</code>" not in text


def test_what_a_model_writes_cannot_end_the_script(tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    folder = tmp_path / "<b>run"
    write_run(folder, probe=False)
    append(folder, "samples", {"session": 1, "step": 2, "prompt": "<p>", "text": evil})
    assert invoke(folder).exit_code == 0
    page = Page(folder / "report.html")
    assert evil in page.text
    assert page.drawn["runs"][0]["name"] == "<b>run"
    assert "alert(1)</script>" not in (folder / "report.html").read_text()


def test_many_rows_are_thinned_but_not_their_peaks() -> None:
    rows = [
        {"step": step, "session": 1, "seconds": 0.0, "loss": 1.0, "held_out_loss": None}
        for step in range(10_000)
    ]
    rows[4321]["loss"], rows[777]["held_out_loss"] = 9.0, 1.5
    lines = pages._lines(rows)
    assert len(lines["step"]) <= pages.MOST_POINTS + 1
    assert max(lines["loss"]) == 9.0
    assert 1.5 in lines["held_out_loss"]
    assert lines["step"][-1] == 9999


def test_watch_writes_until_the_run_is_over(tmp_path: Path) -> None:
    """The page reloads itself while the run goes on, and no more when it has ended."""
    write_run(tmp_path)
    heartbeat = tmp_path / "heartbeat.jsonl"
    ended = heartbeat.read_text()
    heartbeat.write_text(ended.replace('"done"', '"training"'))
    file, seen = tmp_path / "report.html", []

    def end_the_run() -> None:
        while not file.exists():
            time.sleep(0.01)
        seen.append(Page(file).drawn["refresh"])
        heartbeat.write_text(ended)

    thread = threading.Thread(target=end_the_run)
    thread.start()
    result = invoke(tmp_path, "--watch", "1")
    thread.join()
    assert result.exit_code == 0, result.output
    assert result.output.count("wrote") >= 2
    assert seen == [1.0]
    assert Page(file).drawn["refresh"] is None


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "holds no row of training.csv yet: name the folder of a run" in result.stderr


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "garbage: ["),
        ("config.yaml", "- 1"),
        ("checkpoint-2/run.json", "{}"),
        ("heartbeat.jsonl", "null\n"),
        ("training.csv", None),
    ],
)
def test_a_damaged_file_is_named_in_one_line(name: str, text: str | None, tmp_path: Path) -> None:
    write_run(tmp_path)
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(file.read_text().replace("3.5", "abc") if text is None else text)
    result = invoke(tmp_path)
    assert result.exit_code == 2
    [line] = result.stderr.splitlines()
    assert line.startswith(f"nsa-flex report: {file}: ")


@pytest.mark.parametrize("missing", ["jinja2", "yaml"])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    write_run(tmp_path)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    monkeypatch.setitem(__import__("sys").modules, missing, None)
    pages.environment.cache_clear()
    result = invoke(tmp_path)
    assert result.exit_code == 2
    name = {"yaml": "pyyaml"}.get(missing, missing)
    assert f"needs {name}, which is not installed" in result.stderr
