"""Two sets of rows, case by case: faster, slower or the same given how much times scatter."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from nsa_flex.bench.report.rows import Row

LEAST_CHANGE = 0.02  # below this two runs of one program differ: clocks, placement in memory
SPREADS = 2.0
UNREPEATED_NOISE = 0.1  # of what was measured once, such as a compilation


@dataclass(frozen=True)
class Verdict:
    """One case and pass.

    Args:
        ratio: new over old median; None where one of them is missing.
        threshold: a ratio outside 1 ± this is a change.
        verdict: faster, slower, same, or broken: it was measured and cannot be any more.
    """

    case: str
    which: str
    old_ms: float
    new_ms: float | None
    ratio: float | None
    threshold: float
    verdict: str

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(old: Iterable[Row], new: Iterable[Row]) -> list[Verdict]:
    """Verdicts on all cases that are in both and were measured in the old rows.

    Raises:
        ValueError: no row of the same device is in both.
    """
    before, after = _by_name(old), _by_name(new)
    both = [name for name in after if name in before]
    if not both:
        raise ValueError("the two files have no case on the same device in common")
    return [_verdict(before[name], after[name]) for name in both if _measured(before[name])]


def _by_name(rows: Iterable[Row]) -> dict[tuple[str, str, str], Row]:
    """The last row of each case, pass and device."""
    return {(row["case"], row["pass"], row["device"]): row for row in rows}


def _measured(row: Row) -> bool:
    return row["status"] == "ok"


def noise(row: Row) -> float:
    """Half the distance from the 20th to the 80th percentile, over the median."""
    if "p20_ms" not in row:
        return UNREPEATED_NOISE
    return (row["p80_ms"] - row["p20_ms"]) / 2 / row["median_ms"]


def _verdict(old: Row, new: Row) -> Verdict:
    case, which, old_ms = old["case"], old["pass"], old["median_ms"]
    if not _measured(new):
        return Verdict(case, which, old_ms, None, None, LEAST_CHANGE, "broken")
    threshold = max(LEAST_CHANGE, SPREADS * math.hypot(noise(old), noise(new)))
    ratio = new["median_ms"] / old_ms
    verdict = "same"
    if ratio > 1 + threshold:
        verdict = "slower"
    elif ratio < 1 - threshold:
        verdict = "faster"
    return Verdict(case, which, old_ms, new["median_ms"], ratio, threshold, verdict)
