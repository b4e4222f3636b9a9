"""The page of kernels: complete, up to date, and noticing what is neither."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from nsa_flex.bench.tools.kernel_table import Kernel, kernels, page, problems, timing

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "design" / "kernels.md"
RESULTS = ROOT / "bench" / "results"


@pytest.fixture
def facts() -> dict[str, Any]:
    return json.loads(PAGE.with_suffix(".json").read_text())


def test_every_kernel_has_an_entry_and_none_is_stale(facts: dict[str, Any]) -> None:
    found = list(kernels())
    assert problems(found, facts) == []
    assert {kernel.folder for kernel in found} == facts["folders"].keys()


def test_the_page_is_what_the_tool_writes(facts: dict[str, Any]) -> None:
    written = page(list(kernels()), facts, RESULTS)
    assert PAGE.read_text() == written, "run python -m nsa_flex.bench.tools.kernel_table"


def test_each_folder_has_tests_in_the_interpreter(facts: dict[str, Any]) -> None:
    for about in facts["folders"].values():
        assert "interpreted(__file__)" in (ROOT / about["test"]).read_text()


def test_kernels_are_found_in_sources(tmp_path: Path) -> None:
    folder = tmp_path / "topk"
    folder.mkdir()
    source = (
        '@gluon.jit(do_not_specialize=["n"])\ndef score_kernel(n):\n    """Scores\n    of n."""\n'
    )
    helper = "@triton.jit\ndef helper(x):\n    return x\n"
    (folder / "scores.py").write_text(source + helper + "def launch_kernel():\n    pass\n")
    (kernel,) = kernels(tmp_path)
    assert kernel == Kernel("score_kernel", Path("topk/scores.py"), "Scores of n.", gluon=True)
    assert kernel.folder == "topk"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda facts: facts["kernels"].pop("ranges_fwd_kernel"),
            "ranges_fwd_kernel has no entry",
        ),
        (
            lambda facts: facts["kernels"].update(gone_kernel={"why": "it was"}),
            "gone_kernel is no kernel any more",
        ),
        (
            lambda facts: facts["kernels"]["ranges_fwd_kernel"].update(row="fast"),
            "row 'fast' is not described",
        ),
        (
            lambda facts: facts["rows"].update(spare=facts["rows"]["residues"]),
            "row 'spare' is not used",
        ),
        (
            lambda facts: facts["kernels"]["ranges_fwd_kernel"].update(why="both"),
            "ranges_fwd_kernel needs a row or a reason why it has none",
        ),
        (
            lambda facts: facts["kernels"]["topk_scores_sm90_kernel"].pop("else"),
            "topk_scores_sm90_kernel needs the kernel that takes its calls elsewhere",
        ),
    ],
)
def test_what_is_missing_or_stale_is_named(
    facts: dict[str, Any], change: Any, problem: str
) -> None:
    changed = copy.deepcopy(facts)
    change(changed)
    assert problem in problems(list(kernels()), changed)


def test_a_kernel_without_docstring_is_named(facts: dict[str, Any]) -> None:
    silent = Kernel("ranges_fwd_kernel", Path("ranges/fwd.py"), "", gluon=False)
    assert "ranges_fwd_kernel has no docstring" in problems([silent], facts)


def test_timing_is_the_median_of_the_sum_of_fields(tmp_path: Path) -> None:
    rows = [
        {"case": "new", "a_ms": 1.0, "b_ms": 2.0, "commit": "0123456789"},
        {"case": "new", "a_ms": 3.0, "b_ms": 2.0, "commit": "0123456789"},
        {"case": "old", "a_ms": 7.0, "b_ms": 1.0, "commit": "89abcdef01"},
    ]
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    row = {"file": "rows.json", "list": "rows", "field": "a_ms+b_ms", "both": {}}
    sides = {"this": {"case": "new"}, "next": {"case": "old"}}
    assert timing({**row, **sides}, tmp_path) == (4.0, 8.0, "0123456, 89abcde")
    with pytest.raises(ValueError, match=r"rows.json has no rows .*'new'.* and .*'lost'"):
        timing({**row, **sides, "next": {"case": "lost"}}, tmp_path)
