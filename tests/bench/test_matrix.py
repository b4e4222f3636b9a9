"""Kernels compile for every architecture; the table of it holds what dispatch would launch."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from reference.interpreter import INTERPRETED

pytest.importorskip("triton")
import triton

from nsa_flex.bench.tools import matrix
from nsa_flex.bench.tools.kernel_table import kernels
from nsa_flex.bench.tools.matrix_bounds import Tile, bound_of, is_within, tile_of, unbounded
from nsa_flex.bench.tools.matrix_calls import sweep
from nsa_flex.bench.tools.matrix_entries import DEVICES, entries, source_of

HELD = json.loads(matrix.TABLE.read_text())
MOST = 24  # kernels that are compiled here: more are `make matrix`
FOR_HOPPER = sorted(kernel.name for kernel in kernels() if kernel.gluon)
FOLDERS = sorted({kernel.folder for kernel in kernels()})

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are compiled, not interpreted")
launched = functools.cache(entries)
of_its_triton = pytest.mark.skipif(
    HELD["triton"] != triton.__version__, reason=f"the table is of Triton {HELD['triton']}"
)
of_another_triton = pytest.mark.skipif(
    HELD["triton"] == triton.__version__, reason="the table is of this Triton"
)


@of_its_triton
@pytest.mark.kept(lambda sm: sm == 90)
@pytest.mark.parametrize("sm", DEVICES)
def test_what_changed_compiles(sm: int) -> None:
    """Everything that dispatch would launch is in the table, or compiles here and now."""
    held = matrix.table()
    missing = [entry for entry in launched(sm) if entry.key not in held]
    assert len(missing) <= MOST, f"{len(missing)} kernels are not in the table: run make matrix"
    rows, allowed = map(matrix.row_of, missing), matrix.allowed_spills()
    assert [text for row in rows if (text := matrix.problem(row, allowed))] == []


@of_another_triton
@pytest.mark.parametrize("kernel", FOR_HOPPER)
def test_kernels_for_hopper_compile_with_another_triton(kernel: str) -> None:
    found = [entry for entry in launched(90) if entry.kernel == kernel]
    assert found
    assert [text for entry in found if (text := matrix.problem(matrix.row_of(entry)))] == []


@of_another_triton
@pytest.mark.parametrize("folder", FOLDERS)
def test_the_largest_kernel_of_each_folder_compiles_with_another_triton(folder: str) -> None:
    """The one that takes the most registers, and then the most spills."""
    names = {kernel.name for kernel in kernels() if kernel.folder == folder}
    rows = [row for row in HELD["rows"] if row["sm"] == 90 and row["kernel"] in names]
    largest = max(rows, key=lambda row: (row["registers"], row["spills"]))["kernel"]
    entry = next(entry for entry in launched(90) if entry.kernel == largest)
    assert matrix.problem(matrix.row_of(entry)) is None


def test_the_table_has_no_problem() -> None:
    held = json.loads(matrix.SPILLS.read_text())
    assert held["triton"] == HELD["triton"]
    rows = HELD["rows"]
    assert [text for row in rows if (text := matrix.problem(row, held["sm_90"]))] == []
    assert held["sm_90"] == matrix.spills_of(rows), "the list allows more than kernels spill"


@pytest.mark.parametrize("sm", DEVICES)
def test_every_kernel_is_in_the_table(sm: int) -> None:
    held = {row["kernel"] for row in HELD["rows"] if row["sm"] == sm}
    assert held & set(FOR_HOPPER) == (set(FOR_HOPPER) if sm == 90 else set())
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
        ({"spills": 9}, "spills 9 bytes; matrix_spills.json allows 8"),
        ({"spills": 8, "call": "c"}, "spills 8 bytes; matrix_spills.json allows 0"),
        ({"spills": 8, "kernel": "other_kernel"}, "spills 8 bytes; matrix_spills.json allows 0"),
        ({"spills": 9, "sm": 80}, None),
    ],
)
def test_problems(changes: dict[str, Any], text: str | None) -> None:
    row = GOOD | changes
    found = matrix.problem(row, {"a_kernel": {"b": 8, "d": 99}})
    assert found is None if text is None else text in str(found)
    if text is not None and "spills" in text:
        assert matrix.problem(row) is None


def test_spills_are_the_most_of_a_call() -> None:
    rows = [GOOD, GOOD | {"spills": 12}, GOOD | {"call": "c", "spills": 0}, GOOD | {"sm": 80}]
    assert matrix.spills_of(rows) == {"a_kernel": {"b": 12}}


def test_an_entry_compiles_without_a_gpu(tmp_path: Path) -> None:
    entry = next(entry for entry in launched(120) if entry.kernel == "add_splits_kernel")
    row = matrix.row_of(entry)
    assert row["registers"] > 0
    assert matrix.problem(row) is None
    matrix.write([row], tmp_path / "table.json")
    assert matrix.table(tmp_path / "table.json") == {entry.key: row}
    broken = copy.copy(entry)
    object.__setattr__(broken, "wanted", entry.wanted.replace("add_splits", "add_nothing"))
    assert "add_nothing_kernel" in str(matrix.problem(matrix.row_of(broken)))


def test_the_key_follows_what_is_compiled() -> None:
    from nsa_flex.fallback_kernels.common import add_splits
    from nsa_flex.fallback_kernels.common.tiles import load_rows

    text = source_of(add_splits.add_splits_kernel)
    assert "def add_splits_kernel" in text
    assert "#" not in text
    assert '"""' not in text
    assert "def load_rows" in source_of(load_rows)


COUNTERS = 4096  # bytes of shared memory
SOME = {"groups": (1,), "dims": ((128, 128), (192, 128), (256, 256))}


@of_its_triton
@pytest.mark.kept(lambda calls: calls is SOME)
@pytest.mark.parametrize("calls", [SOME, {}], ids=["some", "all"])
def test_what_dispatch_picks_is_bounded_by_what_compiled(calls: dict[str, Any]) -> None:
    """Beyond the calls of the table: groups, head dims, dtypes, block sizes and kinds of rows.

    On sm_90: elsewhere tiles within others were found to ask for up to 32 KiB more.
    """
    sm = 90
    held, swept = matrix.table(), entries(sm, sweep(**calls))
    compiled: dict[Tile, int] = {}
    for entry in (*launched(sm), *swept):
        if entry.key in held:
            tile, shared = tile_of(entry), held[entry.key]["shared"]
            compiled[tile] = max(shared, compiled.get(tile, 0))
    assert unbounded(map(tile_of, swept), compiled, sm) == []
    # What bounds them holds for what compiled: formulas, and that tiles within others ask for no
    # more, but for the counters of an index, which are no tiles.
    for tile, shared in compiled.items():
        assert shared <= (bound_of(tile, sm) or shared), f"{tile} has {shared} bytes"
        larger = (most for other, most in compiled.items() if is_within(tile, other))
        assert shared <= min(larger) + COUNTERS, f"{tile} has {shared} bytes"


def test_what_nothing_bounds_is_found() -> None:
    def tile(rows: int, kernel: str = "ranges_fwd_kernel", **others: int) -> Tile:
        sizes = {"BLOCK_M": rows, "BLOCK_N": 64, "STAGES": 3, "element_size": 2, "warps": 4}
        sizes |= {"HEAD_DIM": 128, "VALUE_DIM": 128, **others}
        return kernel, tuple(sorted(sizes.items()))

    assert bound_of(tile(128), 90) == 2 * (128 * 128 + 3 * 64 * 256 + 128 * 64) + 2048
    assert unbounded([tile(64), tile(128)], set(), 90) == []  # by their formula
    assert unbounded([tile(64), tile(128)], set(), 86) == [tile(128)]
    assert unbounded([tile(64), tile(128)], {tile(64)}, 86) == [tile(128)]
    assert unbounded([tile(64), tile(128)], {tile(128)}, 86) == []
    large, small = (tile(rows, "topk_scores_kernel") for rows in (64, 32))
    assert unbounded([small, large], set(), 90) == [large]
    assert unbounded([small, large], {small}, 90) == [large]
    assert unbounded([small, large], {large}, 90) == []
    assert unbounded([tile(32, "topk_scores_kernel", warps=8)], {large}, 90) != []


def test_entries_are_each_once() -> None:
    found = launched(90)
    assert len({entry.key for entry in found}) == len(found)
    assert {entry.sm for entry in found} == {90}
