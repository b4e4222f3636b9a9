"""Exhaustive tests of the kernels in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.interpreter import run_in_the_interpreter

pytest.importorskip("triton")

HERE = Path(__file__)
FILES = [
    path.name
    for path in sorted({*HERE.parent.glob("test_*.py")} - {HERE})
    if "interpreted(__file__)" in (text := path.read_text())
    and ("mark.kept(" in text or "mark.exhaustive" in text)
]


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FILES)
def test_kernels_under_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    run_in_the_interpreter(str(HERE.with_name(name)), request.config, marks="exhaustive")
