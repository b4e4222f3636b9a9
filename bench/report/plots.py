"""Plots of rows: how many times faster than dense, where the time goes, tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from nsa_flex.bench.report.cells import frame, part_names, tokens
from nsa_flex.bench.report.rows import Row
from nsa_flex.bench.report.table import PASSES, RIVAL, SHAPE, cores

Panel = tuple[pd.DataFrame, Callable[[pd.DataFrame, Any], None], float]


def draw(rows: list[Row], path: Path) -> None:
    """One PNG with a panel for each kind of row that there is.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["status"] == "ok"]
    panels = [panel for panel in _panels(measured) if len(panel[0])]
    if not panels:
        raise ValueError("none of the rows can be drawn")
    heights = [height for _, _, height in panels]
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for place, (table, paint, _) in zip(axes[:, 0], panels, strict=True):
        paint(table, place)
        place.grid(alpha=0.3)
    figure.suptitle(f"{measured[0]['device']}, torch {measured[0]['torch']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panels(rows: list[Row]) -> list[Panel]:
    table = frame(rows)
    speedups = _speedups(rows)
    many = speedups.groupby(level=0).seq_len.transform("size") > 1
    lines, bars = speedups[many], speedups[~many]
    sweep = cores(rows)
    sweep = sweep[sweep["pass"] == "forward_backward"]
    several = (
        sweep.implementation.nunique() > 2 and len(sweep[["heads", "D"]].drop_duplicates()) == 1
    )
    parts = table[~table.target.isin(["core", "model", "compile"]) & table.p20_ms.notna()]
    parts = parts[parts["pass"].isin(["forward", "backward"])]
    parts = parts[parts.seq_len == parts.seq_len.max()]
    models = table[table.target == "model"]
    return [
        (lines, _draw_speedups, 4.5),
        (bars, _draw_ratios, 1.2 + 0.2 * len(bars)),
        (sweep if several else sweep[:0], _draw_sweep, 4.5),
        (parts, _draw_parts, 1.2 + 0.2 * len(parts)),
        (models, _draw_models, 1.2 + 0.25 * len(models)),
    ]


def _speedups(rows: list[Row]) -> pd.DataFrame:
    """Dense time over NSA's of every shape and pass; the index names heads, D and pass."""
    table = cores(rows)
    names = [*SHAPE, "pass"]
    nsa, dense = (
        table[table.implementation == who].drop_duplicates(names).set_index(names).median_ms
        for who in ("nsa", RIVAL)
    )
    found = (dense / nsa).dropna().rename("speedup").reset_index()
    found = found[found["pass"].isin(list(PASSES))]
    dims = found.D.map(lambda dim: "" if dim == "128" else f", D {dim}")
    titles = found["pass"].map(PASSES)
    found.index = pd.Index(found.heads + " heads" + dims + ", " + titles)
    return found.sort_values(["heads", "D", "pass", "seq_len"])


def _draw_speedups(table: pd.DataFrame, axes: Any) -> None:
    """Solid forward, dashed forward and backward."""
    shapes = list(dict.fromkeys(zip(table.heads, table.D, strict=True)))
    for name, line in table.groupby(level=0, sort=False):
        first = line.iloc[0]
        style = "o-" if first["pass"] == "forward" else "s--"
        color = f"C{shapes.index((first.heads, first.D))}"
        axes.plot(line.seq_len, line.speedup, style, color=color, label=name)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("dense (cuDNN) time ÷ NSA time")
    _mark_lengths(axes, table)


def _mark_lengths(axes: Any, table: pd.DataFrame) -> None:
    """A logarithmic axis of tokens, with those that were measured."""
    ticks = sorted(table.seq_len.unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [tokens(tick) for tick in ticks])
    axes.set_xlabel("tokens")
    axes.legend(fontsize=8)


def _draw_ratios(table: pd.DataFrame, axes: Any) -> None:
    names = table.index + ", " + table.seq_len.map(tokens)
    colors = table["pass"].map({"forward": "C0", "forward_backward": "C1"})
    _bars(axes, names, table.speedup, colors)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("dense (cuDNN) time ÷ NSA time")


def _bars(axes: Any, names: pd.Series, values: pd.Series, colors: pd.Series) -> None:
    """Horizontal bars, the first on top."""
    axes.barh(range(len(names)), values, color=list(colors), alpha=0.7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.01)


def _draw_sweep(table: pd.DataFrame, axes: Any) -> None:
    """Milliseconds of every implementation, both scales logarithmic."""
    for name, line in table.sort_values("seq_len").groupby("implementation", sort=False):
        axes.plot(line.seq_len, line.median_ms, "o-", label=name)
    first = table.iloc[0]
    axes.set_yscale("log")
    axes.set_ylabel(f"ms, forward + backward, {first.heads} heads, D {first.D}")
    _mark_lengths(axes, table)


def _draw_parts(table: pd.DataFrame, axes: Any) -> None:
    """Milliseconds of each part and implementation at the longest of the rows, and their floor."""
    names = part_names(table) + " on " + table.implementation + ", " + table["pass"]
    names = names + ", " + table.heads + ", " + table.tokens + ", " + table.pattern
    colors = table["pass"].map({"forward": "C0", "backward": "C1"})
    _bars(axes, names, table.median_ms, colors)
    axes.plot(table.floor_ms, range(len(table)), "|", color="black", label="floor")
    axes.set_xscale("log")
    axes.set_xlabel("ms")
    axes.legend(fontsize=8)


def _draw_models(table: pd.DataFrame, axes: Any) -> None:
    """Tokens a second of training steps, a color each implementation."""
    batches = table.batch.map("{:.0f}".format) + " x " + table.seq_len.map("{:.0f}".format)
    names = table.model + ", " + batches + ", " + table.implementation
    colors = {name: f"C{place}" for place, name in enumerate(table.implementation.unique())}
    _bars(axes, names, table.tokens_per_s, table.implementation.map(colors))
    axes.set_xlabel("tokens/s of training")
