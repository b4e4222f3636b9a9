"""The guide's way from a folder of text to a server, in an environment of its own.

    python -m nsa_flex.bench.tools.persons_path

makes the environment by the guide's line, runs the guide's commands in it, and writes the seconds
of each to `bench/results/persons_path.json`, of which the guide's table is made anew.
"""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.bench.report.table import fill
from nsa_flex.bench.tools.environments import ROOT, fresh

PAGE = ROOT / "docs" / "guide" / "train-command.md"
RESULTS = ROOT / "bench" / "results" / "persons_path.json"
LIMIT = 900  # seconds that all commands together may take


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "my-text")
        begun = time.monotonic()
        python = fresh(folder / "environment", (), sys.executable, pinned=True, extras=extras())
        rows: list[Row] = [{"case": "pip install", "seconds": round(time.monotonic() - begun, 1)}]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        environment.pop("PYTHONPATH", None)
        for row in walk([str(python.parent / "nsa-flex")], folder, environment):
            del row["said"]
            rows.append(row)
    shared = {**describe(torch.device("cpu")), "cores": len(os.sched_getaffinity(0))}
    write_rows(RESULTS, [row | shared for row in rows])
    PAGE.write_text(fill(PAGE.read_text(), ROOT))


def section() -> str:
    """The part of the guide that has the commands."""
    return PAGE.read_text().split("## From a folder of text to a server")[1].split("\n## ")[0]


def extras() -> str:
    """That the guide's line installs, as pip takes them."""
    (found,) = re.findall(r'^    pip install .*\[([\w,]+)\]"', section(), re.MULTILINE)
    return found


def commands() -> list[list[str]]:
    """Arguments of `nsa-flex`, of each of the guide's commands; the server takes any free port."""
    lines = re.findall(r"^    nsa-flex (.*)$", section(), re.MULTILINE)
    return [shlex.split(line.replace("--port 8000", "--port 0"), comments=True) for line in lines]


def write_text(folder: Path) -> None:
    """Some megabytes: sources of the standard library."""
    folder.mkdir()
    for path in Path(sysconfig.get_path("stdlib")).glob("*.py"):
        shutil.copy(path, folder)


def walk(program: Sequence[str], folder: Path, environment: dict[str, str]) -> list[Row]:
    """Run the commands in `folder`, where my-text is, and ask the server once.

    Args:
        program: that takes the arguments of `nsa-flex`.

    Returns:
        the command, its seconds on the clock and of the processor, and its output, of each; the
        server's until it has answered.

    Raises:
        RuntimeError: a command failed; the message is its output.
    """
    rows: list[Row] = []
    for arguments in commands():
        begun, used = time.monotonic(), _processor()
        with subprocess.Popen(
            [*program, *arguments], cwd=folder, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ) as process:  # fmt: skip
            said = _asked(process) if arguments[0] == "serve" else _ended(process, arguments)
        rows.append(
            {
                "case": " ".join(x for x in arguments if x in (arguments[0], "--data-report")),
                "seconds": round(time.monotonic() - begun, 1),
                "processor_seconds": round(_processor() - used, 1),
                "said": said,
            }
        )
    return rows


def _processor() -> float:
    """Seconds of the processes that this one has waited for: those of others do not count."""
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


def _ended(process: subprocess.Popen[str], arguments: list[str]) -> str:
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(arguments)} exits with {process.returncode}: {out}{err}")
    return out


def _asked(process: subprocess.Popen[str]) -> str:
    """What the server answers to a prompt; it is ended then."""
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if address := re.search(r"listening on (http://\S+)", line):
                body = json.dumps({"model": "exported", "prompt": "the", "max_tokens": 4})
                request = urllib.request.Request(
                    f"{address[1]}/v1/completions",
                    body.encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request) as answer:
                    return answer.read().decode()
    finally:
        process.terminate()
    raise RuntimeError(f"serve listens nowhere: {''.join(lines)}")


if __name__ == "__main__":
    main()
