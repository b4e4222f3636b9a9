"""Rows of recall in one file, their tables, and heat maps of depth and length beside it.

python -m nsa_flex.bench.quality.recall_report runs/recall/*/recall.json --out recall.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality.recall_recipes import RECIPES
from nsa_flex.bench.quality.recall_tasks import DEPTHS, TASKS
from nsa_flex.bench.report.cells import EMPTY, markdown
from nsa_flex.bench.report.cells import tokens as length_cell
from nsa_flex.bench.report.rows import Row, earlier_rows, merged, read_rows, write_rows

MAPPED = ("single", "multi_key", "associative")


def recall(rows: list[Row]) -> pd.DataFrame:
    """One line a variant, recipe and task: percent of right answers by length, over the seeds.

    A recipe's "steps" are all that it has. Tasks of rows that the study asks no more are left out.

    Of wrong answers at the longest tested length that was trained on, or the longest of all:
    percent of needles whose block was selected, and mean share of the selected branch in the
    gates of the heads that did, 0 where none did.
    """
    lines = []
    models = _by_model(rows)
    lengths = _lengths([row for runs in models.values() for row in runs])
    for (variant, recipe, steps), runs in models.items():
        longest = max([n for n in lengths if n <= runs[0]["trained_length"]] or lengths)
        asked = {test["task"] for row in runs for test in row["tests"]}
        for task in (each for each in TASKS if each in asked):
            found = {n: _tests(runs, task, n) for n in lengths}
            wrong = [test["causes"]["wrong"] for test in found[longest] if _has_wrong(test)]
            lines.append(
                {
                    "variant": variant,
                    "recipe": recipe,
                    "steps": str(steps),
                    "task": task.replace("_", " "),
                    "seeds": str(len(runs)),
                    **{length_cell(n): _percent(x["right"] for x in found[n]) for n in lengths},
                    "missed: selected": _percent(each["selected"] for each in wrong),
                    "missed: gate": _percent(each["gate"] for each in wrong),
                    "commit": runs[0]["commit"],
                }
            )
    return pd.DataFrame(lines)


def by_task(rows: list[Row]) -> pd.DataFrame:
    """One line a variant and recipe: percent of right answers, means of the seeds.

    A cell has one number for each length that all rows are tested at. Stopped runs are left out.
    """
    models = _by_model([row for row in rows if row["status"] == "ok"])
    if not models:
        return pd.DataFrame()
    every = [{*_lengths([row])} for runs in models.values() for row in runs]
    lengths = sorted(set.intersection(*every))
    order = {name: place for place, name in enumerate(RECIPES)}
    lines = []
    for (variant, recipe, steps), runs in sorted(
        models.items(), key=lambda each: order.get(each[0][1], len(order))
    ):
        line = {"variant": variant, "recipe": recipe, "steps": str(steps)}
        line |= {"seeds": str(len(runs)), "lengths": " / ".join(map(length_cell, lengths))}
        for task in TASKS:
            found = [[x["right"] for x in _tests(runs, task, n)] for n in lengths]
            means = [f"{100 * np.mean(shares):.0f}" if shares else EMPTY for shares in found]
            line[task.replace("_", " ")] = " / ".join(means) if any(found) else EMPTY
        lines.append(line | {"commit": runs[0]["commit"]})
    return pd.DataFrame(lines)


def _by_model(rows: list[Row]) -> dict[tuple[str, str, int], list[Row]]:
    """By variant, and by a recipe's name and steps."""
    found: dict[tuple[str, str, int], list[Row]] = {}
    for row in rows:
        if row["target"] == "recall" and row["tests"]:
            recipe = row["recipe"]
            steps = sum(stage["steps"] for stage in recipe["stages"])
            model = row["variant"], recipe.get("name", "scratch"), steps
            found.setdefault(model, []).append(row)
    return found


def _lengths(runs: list[Row]) -> list[int]:
    return sorted({test["length"] for row in runs for test in row["tests"]})


def _tests(runs: list[Row], task: str, length: int) -> list[dict[str, Any]]:
    return [
        test
        for row in runs
        for test in row["tests"]
        if (test["task"], test["length"]) == (task, length)
    ]


def _has_wrong(test: dict[str, Any]) -> bool:
    return "wrong" in test.get("causes", {})


def _percent(shares: Any) -> str:
    """From the least to the largest, in percent.

    >>> _percent([1.0, 0.5]), _percent([0.5]), _percent([])
    ('50 to 100', '50', '-')
    """
    cells = [f"{100 * share:.0f}" for share in sorted(shares)]
    return " to ".join(dict.fromkeys([cells[0], cells[-1]])) if cells else EMPTY


def draw(rows: list[Row], path: Path) -> None:
    """One PNG: for each variant and some tasks, right answers by the needle's depth and length."""
    from matplotlib.figure import Figure

    found = {
        model: runs
        for model, runs in _by_model(rows).items()
        if {*MAPPED} <= {test["task"] for row in runs for test in row["tests"]}
    }
    if not found:
        return
    figure = Figure(figsize=(3.4 * len(MAPPED), 2.2 * len(found) + 0.6), layout="constrained")
    axes = figure.subplots(len(found), len(MAPPED), squeeze=False)
    picture: Any = None
    for places, ((variant, recipe, steps), runs) in zip(axes, found.items(), strict=True):
        lengths = _lengths(runs)
        for place, task in zip(places, MAPPED, strict=True):
            cells = [_mean_by_depth(_tests(runs, task, n)) for n in lengths]
            picture = place.imshow(np.array(cells).T, vmin=0, vmax=1, aspect="auto")
            place.set_xticks(range(len(lengths)), [length_cell(n) for n in lengths])
            place.set_yticks([])
            place.set_title(f"{variant}, {recipe}, {steps}: {task.replace('_', ' ')}", fontsize=9)
        places[0].set_ylabel("depth, start above")
    figure.colorbar(picture, ax=axes, label="share of right answers")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _mean_by_depth(tests: list[dict[str, Any]]) -> np.ndarray:
    """Of the seeds; NaN where nothing was asked."""
    cells = np.array([test["by_depth"] for test in tests], float).reshape(-1, DEPTHS)
    known = ~np.isnan(cells)
    with np.errstate(invalid="ignore"):
        return np.where(known, cells, 0.0).sum(0) / known.sum(0)


def main() -> None:
    """Merge, print, draw."""
    parser = parser_of(__doc__)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="rows that are there stay")
    given = parser.parse_args()
    rows = earlier_rows(given.out)
    for path in given.rows:
        rows = merged(rows, read_rows(path))
    rows.sort(key=lambda row: row["case"])
    write_rows(given.out, rows)
    print(f"{markdown(recall(rows))}\n\n{markdown(by_task(rows))}")
    draw(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
