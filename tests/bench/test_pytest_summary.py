"""The summary of runs of the tests: of one that was stopped, repeated, and of another machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from nsa_flex.bench.tools.pytest_summary import summarize

JUNIT = """<testsuites><testsuite tests="3" time="1.5" timestamp="2026-01-01T00:00:00">
<testcase classname="tests.a" name="one" time="0.1" />
<testcase classname="tests.a" name="two" time="0.1"><failure message="no">no</failure></testcase>
<testcase classname="tests.a" name="two" time="0.1"><error message="teardown">no</error></testcase>
<testcase classname="tests.b" name="three" time="0"><skipped message="no GPU" /></testcase>
<testcase time="0.003" />
</testsuite></testsuites>"""


def test_a_run_that_was_stopped_on_another_machine(tmp_path: Path) -> None:
    junit, machine, out = (tmp_path / name for name in ("junit.xml", "machine.json", "out.json"))
    junit.write_text(JUNIT)
    machine.write_text('{"device": "a GPU"}')
    command = [sys.executable, "-m", "nsa_flex.bench.tools.pytest_summary", junit, out]
    subprocess.run([*command, "--machine", machine], check=True, timeout=120)
    found = json.loads(out.read_text())
    assert found["device"] == "a GPU"
    assert "torch" not in found
    assert (found["tests"], found["passed"]) == (3, 1)
    assert found["passed_by_file"] == {"tests.a": 1}
    outcomes = [x["outcome"] for x in found["not_passed"]]
    assert outcomes == ["failure", "skipped"]


def test_what_was_repeated_counts_once(tmp_path: Path) -> None:
    first, again = tmp_path / "first.xml", tmp_path / "again.xml"
    first.write_text(JUNIT)
    again.write_text(
        '<testsuites><testsuite tests="1" time="2"><testcase classname="tests.a" name="two" />'
        "</testsuite></testsuites>"
    )
    found = summarize(first, again)
    assert (found["tests"], found["passed"], found["wall_seconds"]) == (3, 2, 3.5)
    assert [each["outcome"] for each in found["not_passed"]] == ["skipped"]
