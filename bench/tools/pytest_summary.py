"""Turns pytest's JUnit XML into the JSON summary that is committed under bench/results.

Example: python -m nsa_flex.bench.tools.pytest_summary junit.xml bench/results/pytest_h200.json

Of a test that several files hold the last one counts: a run, and what of it was repeated. A module
that could not be collected is an error, without a test.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe


def summarize(*junits: Path) -> dict[str, Any]:
    """Counts, wall time, tests that did not pass, and the number of passed tests of each file.

    Of tests that were under way when the run was stopped the file has no name: they count as none.
    """
    found: dict[tuple[str, str], str] = {}
    suites = [_suite(junit) for junit in junits]
    for suite in suites:
        found |= _outcomes(suite)
    passed = Counter(file for (file, _), outcome in found.items() if outcome == "passed")
    return {
        "tests": len(found),
        "passed": passed.total(),
        "not_passed": [
            {"test": f"{file}::{name}", "outcome": outcome}
            for (file, name), outcome in found.items()
            if outcome != "passed"
        ],
        "passed_by_file": dict(sorted(passed.items())),
        "wall_seconds": sum(float(suite.get("time", 0)) for suite in suites),
        "timestamp": suites[0].get("timestamp"),
    }


def _outcomes(suite: ET.Element) -> dict[tuple[str, str], str]:
    """By file and name; of a test that failed and left an error behind, the failure."""
    found: dict[tuple[str, str], str] = {}
    for case in suite.iter("testcase"):
        if (name := case.get("name")) is not None:
            outcome = next((child.tag for child in case if child.tag in OUTCOMES), "passed")
            key = str(case.get("classname")), name
            if found.get(key, "passed") == "passed":
                found[key] = outcome
    return found


def _suite(junit: Path) -> ET.Element:
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite is not None, f"{junit} holds no testsuite"
    return suite


OUTCOMES = ("failure", "error", "skipped")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("junit", nargs="+", type=Path, help="files that pytest --junitxml wrote")
    parser.add_argument("json", type=Path, help="where the summary goes")
    parser.add_argument(
        "--machine", type=Path, help="JSON of what ran the tests, if it was another machine"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ran = json.loads(arguments.machine.read_text()) if arguments.machine else describe(device)
    row = {**ran, **summarize(*arguments.junit)}
    arguments.json.write_text(json.dumps(row, indent=2) + "\n")
    print(f"{row['passed']} of {row['tests']} passed")


if __name__ == "__main__":
    main()
