"""A plot of losses by step, a line each form of parallelism, and their gaps to the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(found: dict[str, Any], path: Path) -> None:
    """One PNG of what `bench.tools.parallel_runs losses` wrote."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    first, *_ = (form["losses"] for form in found["forms"].values())
    for name, form in found["forms"].items():
        ranks = f"{form['ranks']} rank{'s' if form['ranks'] > 1 else ''}"
        above.plot(form["losses"], label=f"{name}, {ranks}", linewidth=1)
        gaps = [own - base for own, base in zip(form["losses"], first, strict=True)]
        below.plot(gaps, linewidth=1)
    above.set_ylabel("loss, nats a token")
    above.legend(fontsize=8)
    below.set_ylabel(f"less that of {next(iter(found['forms']))}")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.suptitle(f"{found['device']}, torch {found['torch']}", fontsize=9)
    figure.savefig(path, dpi=120)
