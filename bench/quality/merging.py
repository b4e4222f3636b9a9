"""Rows of several pieces as one list."""

from __future__ import annotations

from nsa_flex.bench.report.rows import Row


def merged(before: list[Row], new: list[Row]) -> list[Row]:
    """One row a case and device: the one with more steps, of two with as many the new one.

    >>> few, many = ({"case": "a", "device": "x", "steps": steps} for steps in (1, 2))
    >>> merged([many], [few]) == [many]
    True
    """
    best: dict[tuple[str, str], Row] = {}
    for row in [*before, *new]:
        key = row["case"], row["device"]
        if key not in best or row["steps"] >= best[key]["steps"]:
            best[key] = row
    return list(best.values())
