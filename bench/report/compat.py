"""The table of tested versions, from the rows of `bench.tools.compat`."""

from __future__ import annotations

import pandas as pd

from nsa_flex.bench.report.rows import Row

_VERSIONS = {
    "python": "Python",
    "torch": "torch",
    "triton": "Triton",
    "transformers": "transformers",
}


def tested(rows: list[Row]) -> pd.DataFrame:
    """One line an environment: versions, and how many tests passed, failed and were skipped."""
    return pd.DataFrame([_line(row) for row in rows])


def _line(row: Row) -> dict[str, str]:
    numbers = [str(row.get(name, "-")) for name in ("passed", "failed", "skipped")]
    return {
        "environment": f"`{row['case']}`",
        **{title: row.get(name, "-") for name, title in _VERSIONS.items()},
        "passed / failed / skipped": " / ".join(numbers) if "passed" in row else row["status"],
        "date": row["date"],
        "commit": row["commit"] or "-",
    }
