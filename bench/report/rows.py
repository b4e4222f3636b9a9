"""The file of rows: one JSON list, one row a line, rewritten whenever a row is added."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nsa_flex.bench.measure.machine import IDENTITY

Row = dict[str, Any]
SETTINGS = ("compiler", "seed")  # that rows of a run may share


def read_rows(path: Path) -> list[Row]:
    """Rows of a file that this package wrote.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        rows = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} holds no JSON: {error}") from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and "case" in row for row in rows
    ):
        raise ValueError(f"{path} holds no rows of nsa-flex bench")
    return rows


def earlier_rows(path: Path) -> list[Row]:
    """`read_rows`, and none if there is no such file yet."""
    return read_rows(path) if path.exists() else []


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replaces the file in one step: who interrupts loses at most the row being measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    draft = path.with_name(path.name + ".new")
    draft.write_text(f"[\n{lines}\n]\n" if rows else "[]\n")
    draft.replace(path)


def is_of(told: dict[str, Any], recipe: Any) -> bool:
    """Whether the recipe that a row tells is this one.

    A field that is younger than the row counts as by default.

    Args:
        told: fields, as JSON has them.
        recipe: a dataclass.
    """
    default, now = (json.loads(json.dumps(asdict(each))) for each in (type(recipe)(), recipe))
    return bool({**default, **told} == now)


def merged(before: list[Row], new: list[Row]) -> list[Row]:
    """One row a case and device: the one with more steps, of two with as many the new one.

    Rows of what is not trained have none: the new one counts.

    >>> few, many = ({"case": "a", "device": "x", "steps": steps} for steps in (1, 2))
    >>> merged([many], [few]) == [many]
    True
    >>> merged([{"case": "a", "device": "x"}], [{"case": "a", "device": "x", "ms": 3}])
    [{'case': 'a', 'device': 'x', 'ms': 3}]
    """
    best: dict[tuple[str, str], Row] = {}
    for row in [*before, *new]:
        key = row["case"], row["device"]
        if key not in best or row.get("steps", 0) >= best[key].get("steps", 0):
            best[key] = row
    return list(best.values())


class Notebook:
    """Rows of a run, on disk at all times.

    Args:
        path: the file; rows that are there and of this machine, versions, sources and settings
            count as done.
        shared: the columns of `machine.describe`, and settings.
        fresh: forget what is there.
    """

    def __init__(self, path: Path, shared: Row, *, fresh: bool = False) -> None:
        self.path = path
        self.shared = shared
        self.rows: list[Row] = [] if fresh else earlier_rows(path)

    def done(self, key: str) -> list[Row]:
        """Rows of this case that need not be measured again; failures are."""
        rows = [row for row in self.rows if row["case"] == key and self._same(row)]
        return [] if any(row["status"] == "failed" for row in rows) else rows

    def add(self, rows: list[Row]) -> list[Row]:
        """Adds rows of one case in place of earlier ones, and returns them completed."""
        keys = {row["case"] for row in rows}
        device = self.shared["device"]
        self.rows = [
            row for row in self.rows if row["case"] not in keys or row["device"] != device
        ]
        added = [{**row, **self.shared} for row in rows]
        self.rows += added
        write_rows(self.path, self.rows)
        return added

    def _same(self, row: Row) -> bool:
        names = [*IDENTITY, *(name for name in SETTINGS if name in self.shared)]
        return all(row.get(name) == self.shared[name] for name in names)
