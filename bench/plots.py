"""Pictures of rows: how many times faster than dense, where the time goes, tokens a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_flex.bench.models import IMPLEMENTATIONS
from nsa_flex.bench.rows import Row
from nsa_flex.bench.table import RIVAL

WHICH = {"forward": "forward", "forward_backward": "forward + backward"}


def draw(rows: list[Row], path: Path) -> None:
    """One PNG with a panel for each kind of row that there is.

    Raises:
        ValueError: there is nothing to draw.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if row["status"] == "ok"]
    panels = [
        panel for panel in (_Speedups(measured), _Parts(measured), _Models(measured)) if panel
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


class _Speedups:
    """Dense time over NSA's against the length, a line a shape."""

    height = 4.5

    def __init__(self, rows: list[Row]) -> None:
        found = {
            (
                row["heads"],
                row["head_dim"],
                row["pass"],
                row["seq_len"],
                row["implementation"],
            ): row
            for row in rows
            if row["target"] == "core" and row["pattern"] == "random"
        }
        self.lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
        for (heads, dim, which, length, who), row in sorted(found.items()):
            rival = found.get((heads, dim, which, length, RIVAL))
            if who == "nsa" and rival is not None and which in WHICH:
                name = heads if dim == 128 else f"{heads}, D {dim}"
                speedup = rival["median_ms"] / row["median_ms"]
                self.lines.setdefault((name, which), []).append((length, speedup))

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
                label=f"{name} heads, {WHICH[which]}",
            )
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({length for points in self.lines.values() for length, _ in points})
        axes.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else str(t) for t in ticks])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("tokens")
        axes.set_ylabel("dense (cuDNN) time ÷ NSA time")
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
            f"{row['target']} on {row['implementation']}, {row['pass']}, {row['heads']}, "
            f"{row['seq_len'] // 1024}k, {row['pattern']}"
            for row in self.rows
        ]
        places = range(len(names))
        axes.barh(places, [row["median_ms"] for row in self.rows], color="tab:blue", alpha=0.6)
        axes.plot(
            [row["floor_ms"] for row in self.rows], places, "|", color="black", label="floor"
        )
        axes.set_yticks(places, names, fontsize=6)
        axes.invert_yaxis()
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
        axes.set_xlabel("tokens/s of training")
        axes.grid(alpha=0.3, axis="x")
