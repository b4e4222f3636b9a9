"""Kernels compile for every architecture; the table of it holds what dispatch would launch."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from reference.interpreter import INTERPRETED

pytest.importorskip("triton")
import triton

from nsa_flex.bench.tools import matrix
from nsa_flex.bench.tools.kernel_table import kernels
from nsa_flex.bench.tools.matrix_entries import DEVICES, Entry, entries, source_of

HELD = json.loads(matrix.TABLE.read_text())
MOST = 24  # kernels that are compiled here: more are `make matrix`

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are compiled, not interpreted")
of_its_triton = pytest.mark.skipif(
    HELD["triton"] != triton.__version__, reason=f"the table is of Triton {HELD['triton']}"
)


@of_its_triton
@pytest.mark.kept(lambda sm: sm == 90)
@pytest.mark.parametrize("sm", DEVICES)
def test_what_changed_compiles(sm: int) -> None:
    """Everything that dispatch would launch is in the table, or compiles here and now."""
    held = matrix.table()
    missing = [entry for entry in entries(sm) if entry.key not in held]
    assert len(missing) <= MOST, f"{len(missing)} kernels are not in the table: run make matrix"
    rows = map(matrix.row_of, missing)
    assert [text for row in rows if (text := matrix.problem(row, held.values()))] == []


def test_the_table_has_no_problem() -> None:
    assert [text for row in HELD["rows"] if (text := matrix.problem(row, HELD["rows"]))] == []


@pytest.mark.parametrize("sm", DEVICES)
def test_every_kernel_is_in_the_table(sm: int) -> None:
    for_hopper = {kernel.name for kernel in kernels() if kernel.gluon}
    held = {row["kernel"] for row in HELD["rows"] if row["sm"] == sm}
    assert held & for_hopper == (for_hopper if sm == 90 else set())
    everywhere = {row["kernel"] for row in HELD["rows"]}
    assert everywhere == {kernel.name for kernel in kernels()}


GOOD = {"sm": 90, "kernel": "a_kernel", "call": "b", "shared": 99 << 10, "spills": 8}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, None),
        ({"error": "OutOfResources"}, "a_kernel on sm_90 (b) does not compile: OutOfResources"),
        ({"sm": 86, "shared": (99 << 10) + 1}, "bytes of shared memory; a CTA may have 101376"),
        ({"sm": 100, "kernel": "a_sm90_kernel"}, "is for Hopper, and would be launched elsewhere"),
        ({"spills": 9}, "spills 9 bytes, before at most 8"),
        ({"spills": 9, "sm": 80}, None),
    ],
)
def test_problems(changes: dict[str, Any], text: str | None) -> None:
    found = matrix.problem(GOOD | changes, [GOOD])
    assert found is None if text is None else text in str(found)


def test_an_entry_compiles_without_a_gpu(tmp_path: Path) -> None:
    entry = next(entry for entry in entries(120) if entry.kernel == "add_splits_kernel")
    row = matrix.row_of(entry)
    assert row["registers"] > 0
    assert matrix.problem(row, []) is None
    matrix.write([row], tmp_path / "table.json")
    assert matrix.table(tmp_path / "table.json") == {entry.key: row}
    broken = copy.copy(entry)
    object.__setattr__(broken, "wanted", entry.wanted.replace("add_splits", "add_nothing"))
    assert "add_nothing_kernel" in str(matrix.problem(matrix.row_of(broken), []))


def test_the_key_follows_what_is_compiled() -> None:
    from nsa_flex.fallback_kernels.common import add_splits
    from nsa_flex.fallback_kernels.common.tiles import load_rows

    text = source_of(add_splits.add_splits_kernel)
    assert "def add_splits_kernel" in text
    assert "#" not in text
    assert '"""' not in text
    assert "def load_rows" in source_of(load_rows)


def test_entries_are_each_once() -> None:
    found: list[Entry] = entries(90)
    assert len({entry.key for entry in found}) == len(found)
    assert {entry.sm for entry in found} == {90}
