"""Every causal language model of transformers: patched and right, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from nsa_flex.bench.tools.sweep_families import PAGE, RESULTS, page, row_of
from nsa_flex.testing.models import NOT_BUILT, model_types

COMMITTED = json.loads(RESULTS.read_text())
ROWS = {row["family"]: row for row in COMMITTED["rows"]}
MOST_NOT_BUILT = 3

as_committed = pytest.mark.skipif(
    transformers.__version__ != COMMITTED["transformers"],
    reason=f"the table is of transformers {COMMITTED['transformers']}",
)


def kind(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells one answer of the sweep from another, names of modules and classes aside."""
    reasons = [detail.split()[1:6] for detail in row.get("details", {}).values()]
    return *row.get("checks", {}).values(), str(reasons)


FIRST_OF_ITS_KIND = {kind(row): name for name, row in reversed(ROWS.items())}.values()


@pytest.mark.kept(lambda family: family in FIRST_OF_ITS_KIND)
@pytest.mark.parametrize("family", [name for name in model_types() if name not in NOT_BUILT])
def test_a_family_is_right_or_refused(family: str) -> None:
    row = row_of(family)
    assert row["verdict"] in ("right", "refused"), row["details"]
    if transformers.__version__ == COMMITTED["transformers"]:
        # `make families` writes the table anew.
        assert {**row, "details": None} == {**ROWS[family], "details": None}, row["details"]


@as_committed
def test_the_table_has_every_family() -> None:
    assert list(ROWS) == model_types()
    assert {name for name, row in ROWS.items() if row["verdict"] == "not built"} == set(NOT_BUILT)
    assert len(NOT_BUILT) <= MOST_NOT_BUILT


def test_the_page_shows_the_table() -> None:
    assert PAGE.read_text() == page(COMMITTED)
