"""Two sets of rows, case by case: faster, slower or the same given how much times scatter."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd

from nsa_flex.bench.report.cells import frame
from nsa_flex.bench.report.rows import Row

LEAST_CHANGE = 0.02  # below this two runs of one program differ: clocks, placement in memory
SPREADS = 2.0
UNREPEATED_NOISE = 0.1  # of what was measured once, such as a compilation
NAMES = ["case", "pass", "device"]


def compare(old: Iterable[Row], new: Iterable[Row]) -> pd.DataFrame:
    """All cases that are in both and were measured in the old rows, the last row of each.

    Returns:
        columns case, pass, old_ms, new_ms, ratio (new over old median, NaN where the new one is
        missing), threshold (a ratio outside 1 ± this is a change) and verdict: faster, slower,
        same, or broken, which was measured and cannot be any more.

    Raises:
        ValueError: no row of the same device is in both.
    """
    before, after = (frame(list(rows)).drop_duplicates(NAMES, keep="last") for rows in (old, new))
    both = after.merge(before, on=NAMES, suffixes=("", "_before"))
    if both.empty:
        raise ValueError("the two files have no case on the same device in common")
    both = both[both.status_before == "ok"].reset_index(drop=True)
    measured = both.status == "ok"
    ratio = (both.median_ms / both.median_ms_before).where(measured)
    scatter = np.hypot(_noise(both, ""), _noise(both, "_before")) * SPREADS
    threshold = scatter.clip(lower=LEAST_CHANGE).where(measured, LEAST_CHANGE)
    verdict = pd.Series("same", index=both.index)
    verdict = verdict.mask(ratio > 1 + threshold, "slower").mask(ratio < 1 - threshold, "faster")
    return pd.DataFrame(
        {
            "case": both.case,
            "pass": both["pass"],
            "old_ms": both.median_ms_before,
            "new_ms": both.median_ms.where(measured),
            "ratio": ratio,
            "threshold": threshold,
            "verdict": verdict.where(measured, "broken"),
        }
    )


def _noise(both: pd.DataFrame, which: str) -> pd.Series:
    """Half the distance from the 20th to the 80th percentile, over the median."""
    high, low, median = (both[f"{name}{which}"] for name in ("p80_ms", "p20_ms", "median_ms"))
    return ((high - low) / 2 / median).fillna(UNREPEATED_NOISE)
