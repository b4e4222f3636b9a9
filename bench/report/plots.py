"""Pictures of rows: how many times faster than dense, where the time goes, tokens a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nsa_flex.bench.cases.models import IMPLEMENTATIONS
from nsa_flex.bench.report.cells import dims, part_of, tokens
from nsa_flex.bench.report.rows import Row
from nsa_flex.bench.report.table import PASSES, RIVAL


def draw(rows: list[Row], path: Path) -> None:
    """One PNG with a panel for each kind of row that there is.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["status"] == "ok"]
    panels = [
        panel
        for kind in (_Speedups, _Ratios, _Sweep, _Parts, _Models)
        if (panel := kind(measured))
    ]
    if not panels:
        raise ValueError("none of the rows can be drawn")
    height = sum(panel.height for panel in panels)
    figure = Figure(figsize=(9, height), layout="constrained")
    heights = [panel.height for panel in panels]
    places = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, panel in zip(places[:, 0], panels, strict=True):
        panel.draw(axes)
    first = measured[0]
    figure.suptitle(f"{first['device']}, torch {first['torch']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _speedups(rows: list[Row]) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(heads and D, pass) -> (tokens, dense time over NSA's), ascending."""
    found = {
        (row["heads"], dims(row), row["pass"], row["seq_len"], row["implementation"]): row
        for row in rows
        if row["target"] == "core" and row["pattern"] == "random"
    }
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for (heads, dim, which, length, who), row in sorted(found.items()):
        rival = found.get((heads, dim, which, length, RIVAL))
        if who == "nsa" and rival is not None and which in PASSES:
            name = f"{heads} heads" if dim == "128" else f"{heads} heads, D {dim}"
            speedup = rival["median_ms"] / row["median_ms"]
            lines.setdefault((name, which), []).append((length, speedup))
    return lines


class _Speedups:
    """Dense time over NSA's against the length, a line a shape."""

    height = 4.5

    def __init__(self, rows: list[Row]) -> None:
        self.lines = {k: points for k, points in _speedups(rows).items() if len(points) > 1}

    def __bool__(self) -> bool:
        return bool(self.lines)

    def draw(self, axes: Any) -> None:
        """Solid forward, dashed forward and backward."""
        names = list(dict.fromkeys(name for name, _ in self.lines))
        for (name, which), points in self.lines.items():
            axes.plot(
                *zip(*points, strict=True),
                "o-" if which == "forward" else "s--",
                color=f"C{names.index(name)}",
                label=f"{name}, {PASSES[which]}",
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _mark_lengths(axes, self.lines.values())
        axes.set_ylabel("dense (cuDNN) time ÷ NSA time")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _mark_lengths(axes: Any, lines: Iterable[list[tuple[int, float]]]) -> None:
    """A logarithmic axis of tokens, with those that were measured."""
    ticks = sorted({length for points in lines for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [tokens({"seq_len": tick}) for tick in ticks])
    axes.set_xlabel("tokens")


class _Ratios:
    """Dense time over NSA's where each shape has one length."""

    def __init__(self, rows: list[Row]) -> None:
        self.bars = {k: points for k, points in _speedups(rows).items() if len(points) == 1}
        self.height = 1.2 + 0.2 * len(self.bars)

    def __bool__(self) -> bool:
        return bool(self.bars)

    def draw(self, axes: Any) -> None:
        """Horizontal bars."""
        names = [
            f"{name}, {tokens({'seq_len': points[0][0]})}, {PASSES[which]}"
            for (name, which), points in self.bars.items()
        ]
        colors = ["C0" if which == "forward" else "C1" for _, which in self.bars]
        axes.barh(range(len(names)), [p[0][1] for p in self.bars.values()], color=colors)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel("dense (cuDNN) time ÷ NSA time")
        axes.grid(alpha=0.3, axis="x")


class _Sweep:
    """Milliseconds of the core against the length, a line an implementation, if there are many."""

    height = 4.5

    def __init__(self, rows: list[Row]) -> None:
        self.lines: dict[str, list[tuple[int, float]]] = {}
        cores = [row for row in rows if row["target"] == "core" and row["pattern"] == "random"]
        cores = [row for row in cores if row["pass"] == "forward_backward"]
        self.shapes = {(row["heads"], dims(row)) for row in cores}
        for row in sorted(cores, key=lambda row: row["seq_len"]):
            points = self.lines.setdefault(row["implementation"], [])
            points.append((row["seq_len"], row["median_ms"]))

    def __bool__(self) -> bool:
        return len(self.lines) > 2 and len(self.shapes) == 1

    def draw(self, axes: Any) -> None:
        """Both scales logarithmic."""
        for name, points in self.lines.items():
            axes.plot(*zip(*points, strict=True), "o-", label=name)
        axes.set_yscale("log")
        _mark_lengths(axes, self.lines.values())
        ((heads, dim),) = self.shapes
        axes.set_ylabel(f"ms, forward + backward, {heads} heads, D {dim}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


class _Parts:
    """Milliseconds of each part and implementation at the longest of the rows, and their floor."""

    def __init__(self, rows: list[Row]) -> None:
        aside = ("core", "model", "compile")
        self.rows = [row for row in rows if row["target"] not in aside and "p20_ms" in row]
        self.rows = [row for row in self.rows if row["pass"] in ("forward", "backward")]
        longest = max((row["seq_len"] for row in self.rows), default=0)
        self.rows = [row for row in self.rows if row["seq_len"] == longest]
        self.height = 1.2 + 0.2 * len(self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def draw(self, axes: Any) -> None:
        """Horizontal bars, a logarithmic scale."""
        names = [
            f"{part_of(row)} on {row['implementation']}, {row['pass']}, {row['heads']}, "
            f"{tokens(row)}, {row['pattern']}"
            for row in self.rows
        ]
        places = range(len(names))
        colors = ["C0" if row["pass"] == "forward" else "C1" for row in self.rows]
        axes.barh(places, [row["median_ms"] for row in self.rows], color=colors, alpha=0.6)
        axes.plot(
            [row["floor_ms"] for row in self.rows], places, "|", color="black", label="floor"
        )
        axes.set_yticks(places, names, fontsize=6)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xscale("log")
        axes.set_xlabel("ms")
        axes.grid(alpha=0.3, axis="x")
        axes.legend(fontsize=8)


class _Models:
    """Tokens a second of training steps."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = [row for row in rows if row["target"] == "model"]
        self.height = 1.2 + 0.25 * len(self.rows)

    def __bool__(self) -> bool:
        return bool(self.rows)

    def draw(self, axes: Any) -> None:
        """Horizontal bars, a color each implementation."""
        colors = {name: f"C{place}" for place, name in enumerate(IMPLEMENTATIONS)}
        labels = [
            f"{row['model']}, {row['batch']} x {row['seq_len']}, {row['implementation']}"
            for row in self.rows
        ]
        speeds = [row["tokens_per_s"] for row in self.rows]
        places = range(len(labels))
        axes.barh(places, speeds, color=[colors[row["implementation"]] for row in self.rows])
        axes.set_yticks(places, labels, fontsize=7)
        axes.invert_yaxis()
        axes.margins(y=0.01)
        axes.set_xlabel("tokens/s of training")
        axes.grid(alpha=0.3, axis="x")
