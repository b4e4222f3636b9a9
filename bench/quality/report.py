"""Rows of several pieces in one file, their table, and their plot beside it.

    python -m nsa_flex.bench.quality.report piece1.json piece2.json --out quality.json

Runs that are neither finished nor stopped are left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality.evaluation import FAR, NEAR
from nsa_flex.bench.report.cells import EMPTY, markdown
from nsa_flex.bench.report.cells import tokens as length
from nsa_flex.bench.report.rows import Row, earlier_rows, merged, read_rows, write_rows

BASE = "dense"  # what the others are compared with
GROUP = ["size", "seq_len", "tokens"]
NAMES = {
    f"names back < {NEAR}": "near",
    f"{NEAR} to {FAR}": "middle",
    f"from {FAR}": "far",
}


def quality(rows: list[Row]) -> pd.DataFrame:
    """One line a variant, of runs with as many tokens: mean of the seeds ± half their range.

    "after dense" is its loss less that of dense attention with the same seeds, "names back" are
    names by how many tokens ago they came last. Losses are held-out nats a token. Stopped runs of
    a variant that has finished ones are left out.
    """
    lines = []
    for (size, seq_len, count), group in _groups(rows).items():
        by_variant: dict[str, list[Row]] = {}
        for row in group:
            by_variant.setdefault(row["variant"], []).append(row)
        dense = {row["seed"]: row["loss"] for row in by_variant.get(BASE, [])}
        for name, runs in by_variant.items():
            behind = [row["loss"] - dense[row["seed"]] for row in runs if row["seed"] in dense]
            lines.append(
                {
                    "model": size,
                    "context": length(seq_len),
                    "tokens": f"{count / 1e6:.0f} M",
                    "variant": name,
                    "parameters": f"{runs[0]['parameters'] / 1e6:.1f} M",
                    "seeds": str(len(runs)),
                    "held-out loss": spread([row["loss"] for row in runs]),
                    "after dense": spread(behind, "+.3f"),
                    **{
                        title: spread([loss for row in runs for loss in _of_names(row, kind)])
                        for title, kind in NAMES.items()
                    },
                    "commit": runs[0]["commit"],
                }
            )
    return pd.DataFrame(lines)


def _of_names(row: Row, kind: str) -> list[float]:
    """Loss on names that came last so far back; nothing if there is none."""
    return [row["names"][kind]["loss"]] if kind in row["names"] else []


def _groups(rows: list[Row]) -> dict[tuple[Any, ...], list[Row]]:
    """Runs that compare: of the same size, length and tokens.

    Stopped ones of a variant that has finished ones are left out.
    """
    rows = [row for row in rows if row["target"] == "quality" and "by_position" in row]
    finished = {_model(row) for row in rows if row["status"] == "ok"}
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row["status"] == "ok" or _model(row) not in finished:
            groups.setdefault(tuple(row[name] for name in GROUP), []).append(row)
    return groups


def _model(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("size", "seq_len", "variant"))


def spread(values: list[float], style: str = ".3f") -> str:
    """Mean ± half the range.

    >>> spread([1.0, 1.1, 1.5]), spread([2.0]), spread([])
    ('1.200 ± 0.250', '2.000', '-')
    """
    if not values:
        return EMPTY
    mean = f"{np.mean(values):{style}}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.3f}"


def draw(rows: list[Row], path: Path) -> None:
    """One PNG of the runs with the most tokens: losses over tokens, by position and on names."""
    from matplotlib.figure import Figure

    group = max(_groups(rows).items(), key=lambda each: (each[0][2], len(each[1])))[1]
    names = list(dict.fromkeys(row["variant"] for row in group))
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    for number, name in enumerate(names):
        runs = [row for row in group if row["variant"] == name]
        style: dict[str, Any] = {"color": f"C{number}"}
        for row in runs:
            told = style | ({"label": name} if row is runs[0] else {})
            count, seconds, losses = np.array(row["curve"]).T
            axes[0, 0].plot(count / 1e6, losses, "o-", ms=3, **told)
            axes[0, 1].plot(seconds, losses, "o-", ms=3, **told)
        places = np.mean([row["by_position"] for row in runs], 0)
        positions = (np.arange(len(places)) + 0.5) * runs[0]["seq_len"] / len(places)
        axes[1, 0].plot(positions, places, label=name, **style)
        kinds = ("first", "near", "middle", "far")
        found = [
            np.mean([row["names"].get(kind, {}).get("loss", np.nan) for row in runs])
            for kind in kinds
        ]
        axes[1, 1].plot(kinds, found, "o-", label=name, **style)
    titles = ("million tokens", "seconds of training", "position", "a name that came before")
    for place, title in zip(axes.flat, titles, strict=True):
        place.set_xlabel(title)
        place.set_ylabel("held-out nats a token")
        place.grid(alpha=0.3)
        place.legend(fontsize=8)
    for place in (axes[0, 0], axes[0, 1]):
        place.set_ylim(top=np.percentile([row["curve"][0][2] for row in group], 90))
    first = group[0]
    figure.suptitle(
        f"{first['size']}, {length(first['seq_len'])} tokens of context, {first['device']}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Merge, print, draw."""
    parser = parser_of(__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="rows that are there stay")
    given = parser.parse_args()
    rows = earlier_rows(given.out)
    for path in given.rows:
        rows = merged(rows, [row for row in read_rows(path) if row["status"] != "running"])
    rows.sort(key=lambda row: row["case"])
    write_rows(given.out, rows)
    print(markdown(quality(rows)))
    draw(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
