"""The guide's way from a folder of text to a server, each command as it stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from training.small_config import write_texts
from training.tiny_run import rows_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "guide" / "train-command.md"
FASTER = {
    "training.steps": 10,
    "run.log_every": 5,
    "run.gates_every": 5,
    "run.eval_every": 10,
    "run.eval_rows": 4,
    "run.save_every": 10,
}


def commands() -> list[list[str]]:
    """Arguments of `nsa-flex`, of each command in the guide's section."""
    section = PAGE.read_text().split("## From a folder of text to a server")[1].split("\n## ")[0]
    lines = re.findall(r"^    nsa-flex (.*)$", section, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.exhaustive
def test_from_a_folder_of_text_to_a_server(tmp_path: Path) -> None:
    """In processes of their own, as a new user starts them; fewer steps than the guide's."""
    for path in write_texts(tmp_path / "my-text").iterdir():
        path.write_text(path.read_text() * 20)  # for some rows of 256 tokens held out
    environment: Any = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    *steps, serve = commands()
    names = [step[0] for step in steps]
    assert names == ["train", "train", "report", "generate", "export"]
    assert serve[0] == "serve"

    def start(arguments: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "nsa_flex.cli", *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    said = []
    for step in steps:
        if step[0] == "train":
            step += [part for key, x in FASTER.items() for part in ("--set", f"{key}={x}")]
        process = start(step)
        out, err = process.communicate()
        assert process.returncode == 0, (step, out, err)
        said.append(out)
    assert "longest document" in said[0]
    assert said[3].strip()
    run = tmp_path / "runs" / "mine"
    found = rows_of(run)
    assert [len(found[name]) for name in ("training", "samples")] == [3, 1]
    assert (run / "report.html").stat().st_size > 10_000
    assert "nsa-flex train training.yaml" in (tmp_path / "exported" / "README.md").read_text()
    assert "--port" in serve
    serve[serve.index("--port") + 1] = "0"
    server = start(serve)
    try:
        assert server.stderr is not None
        address = next(
            match[1] for line in server.stderr if (match := re.search(r"on (http://\S+)", line))
        )
        body = json.dumps({"model": "exported", "prompt": "the", "max_tokens": 4}).encode()
        request = urllib.request.Request(
            f"{address}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] >= 1
    finally:
        server.terminate()
        server.wait(60)
