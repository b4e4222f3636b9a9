"""The plot of data parallel runs beside one GPU's: losses side by side, and speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(found: dict[str, Any], path: Path) -> None:
    """One PNG of what `bench.tools.data_parallel` measured.

    Left the losses of each run, below them their distance from the run on one GPU; right tokens a
    second, with the ideal (ranks times one GPU) as a line.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    axes: dict[str, Any] = figure.subplot_mosaic(
        [["losses", "speed"], ["apart", "speed"]], width_ratios=[2, 1]
    )
    one = found["losses"]["one"]
    for kind, curve in found["losses"].items():
        axes["losses"].plot(curve, label=kind, lw=1)
        if kind != "one":
            apart = [abs(x - y) for x, y in zip(curve, one, strict=True)]
            axes["apart"].plot(apart, label=f"|{kind} - one|", lw=1)
    axes["losses"].set_ylabel("nats a byte")
    axes["apart"].set(xlabel="step", yscale="log")
    _draw_speed(found["speed"], axes["speed"])
    for name in ("losses", "apart"):
        axes[name].legend()
        axes[name].grid(alpha=0.3)
    figure.suptitle(f"{found['device']}, torch {found['torch']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_speed(rows: list[dict[str, Any]], axes: Any) -> None:
    bars = axes.bar([row["kind"] for row in rows], [row["tokens_per_second"] for row in rows])
    axes.bar_label(bars, [f"{row['efficiency']:.0%}" for row in rows])
    ideal = max(row["ranks"] for row in rows) * rows[0]["tokens_per_second"]
    axes.axhline(ideal, color="black", lw=1, ls="--")
    axes.set_ylabel("tokens a second")
