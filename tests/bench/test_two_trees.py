"""Two checkouts are timed in turn, each by its own code."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nsa_flex.bench.tools import two_trees

ROOT = Path(__file__).parents[2]


def test_medians_of_rounds_and_what_was_not_measured() -> None:
    rounds = [
        [[{"call": "a", "ms": ms, "peak_bytes": None}] for ms in times]
        for times in ((1.0, 9.0, 2.0), (4.0, 1.0, 9.0))
    ]
    (row,) = two_trees.summary("host", rounds)
    assert row == {"group": "host", "call": "a", "ms": [2.0, 4.0], "ms_ratio": 2.0}


def test_a_tree_that_fails() -> None:
    with pytest.raises(RuntimeError, match="ended with 2"):
        two_trees.rows_of(two_trees.start(ROOT, "no such group"))


@pytest.mark.exhaustive
def test_each_tree_runs_its_own_code(tmp_path: Path) -> None:
    other = tmp_path / "other"
    folders = ("nsa_flex", "masks", "fallback_kernels")
    for name in folders:
        shutil.copytree(ROOT / name, other / name, symlinks=True)
    (other / "bench").mkdir()
    attention = other / "nsa_flex" / "attention.py"
    attention.write_text(attention.read_text() + "\nprint('the other tree')\n")
    started = two_trees.start(other, "host", "--compile-only")
    printed, _ = started.communicate()
    assert started.returncode == 0
    assert "the other tree" in printed
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "nsa_flex.bench.tools.two_trees", "--rounds", "1"]
    command += ["--trees", str(other), str(ROOT), "--groups", "host", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = json.loads(out.read_text())["rows"]
    assert {len(row["host_ms"]) for row in rows} == {2}
    assert all(row["host_ms_ratio"] > 0 for row in rows)
