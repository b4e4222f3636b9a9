"""Turns pytest's JUnit XML into the JSON summary that is committed under bench/results.

Example: python -m nsa_flex.bench.tools.pytest_summary junit.xml bench/results/pytest_h200.json
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


def summarize(junit: Path) -> dict[str, Any]:
    """Counts, wall time, tests that did not pass, and the number of passed tests of each file.

    Of tests that were under way when the run was stopped the file has no name: they count as none.
    """
    suite = ET.parse(junit).getroot().find("testsuite")
    assert suite is not None, f"{junit} holds no testsuite"
    not_passed, passed = [], Counter[str]()
    for case in suite.iter("testcase"):
        if case.get("name") is None:
            continue
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = next((child.tag for child in case if child.tag in OUTCOMES), None)
        if outcome is None:
            passed[str(case.get("classname"))] += 1
        else:
            not_passed.append({"test": name, "outcome": outcome})
    return {
        "tests": int(suite.get("tests", 0)),
        "passed": sum(passed.values()),
        "not_passed": not_passed,
        "passed_by_file": dict(sorted(passed.items())),
        "wall_seconds": float(suite.get("time", 0)),
        "timestamp": suite.get("timestamp"),
    }


OUTCOMES = ("failure", "error", "skipped")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("junit", type=Path, help="file that pytest --junitxml wrote")
    parser.add_argument("json", type=Path, help="where the summary goes")
    parser.add_argument(
        "--machine", type=Path, help="JSON of what ran the tests, if it was another machine"
    )
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ran = json.loads(arguments.machine.read_text()) if arguments.machine else describe(device)
    row = {**ran, **summarize(arguments.junit)}
    arguments.json.write_text(json.dumps(row, indent=2) + "\n")
    print(f"{row['passed']} of {row['tests']} passed")


if __name__ == "__main__":
    main()
