"""The pictures of a run's report, as SVG text: drawn by matplotlib, without a display."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

BRANCHES = ("compressed", "selected", "sliding")
Row = dict[str, Any]


def loss_plot(rows: list[Row]) -> str:
    """Training and held-out loss over tokens, or over steps where no tokens were counted."""
    x = "tokens" if all(row["tokens"] for row in rows) else "step"

    def draw(axes: Any) -> None:
        for name, style in (("loss", "-"), ("held_out_loss", "o-")):
            points = [(row[x], row[name]) for row in rows if row[name] is not None]
            if points:
                axes.plot(*zip(*points, strict=True), style, markersize=4, label=_words(name))
        axes.set_ylabel("nats a token")
        axes.legend()

    return _svg(draw, x)


def column_plot(rows: list[Row], name: str) -> str:
    """One column of training.csv over steps."""

    def draw(axes: Any) -> None:
        points = [(row["step"], row[name]) for row in rows if row[name] is not None]
        axes.plot(*zip(*points, strict=True))
        axes.set_ylabel(_words(name))

    return _svg(draw, "step")


def speed_plot(beats: list[Row]) -> str:
    """Tokens a second over the seconds of the run, session after session."""

    def draw(axes: Any) -> None:
        known = [beat for beat in beats if beat["tokens_per_second"] is not None]
        start = beats[0]["time"]
        times = [beat["time"] - start for beat in known]
        axes.plot(times, [beat["tokens_per_second"] for beat in known])
        axes.set_ylabel("tokens a second")
        axes.set_ylim(bottom=0)

    return _svg(draw, "seconds")


def share_plot(rows: list[Row]) -> str:
    """Mean share of each branch over steps: the mean of the layers, and their range."""

    def draw(axes: Any) -> None:
        for branch in BRANCHES:
            steps, values = _by_step(rows, f"share_{branch}")
            means = [sum(each) / len(each) for each in values]
            (line,) = axes.plot(steps, means, "o-", markersize=3, label=branch)
            low, high = [min(each) for each in values], [max(each) for each in values]
            axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
        axes.set_ylabel("share of a branch")
        axes.set_ylim(0, 1)
        axes.legend()

    return _svg(draw, "step")


def layers_plot(rows: list[Row], name: str) -> str:
    """A column of gates.csv over steps, a line for each layer."""

    def draw(axes: Any) -> None:
        layers = dict.fromkeys(row["layer"] for row in rows)
        colors = _colors()
        for number, layer in enumerate(layers):
            points = [
                (row["step"], row[name])
                for row in rows
                if row["layer"] == layer and row[name] is not None
            ]
            if points:
                color = colors(number / max(1, len(layers) - 1))
                axes.plot(*zip(*points, strict=True), color=color, label=str(number))
        axes.set_ylabel(_words(name))
        if len(layers) <= 12:
            axes.legend(title="layer", ncols=2, fontsize="small")

    return _svg(draw, "step")


def _by_step(rows: Iterable[Row], name: str) -> tuple[list[int], list[list[float]]]:
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(row["step"], []).append(row[name])
    return list(found), list(found.values())


def _colors() -> Callable[[float], Any]:
    """First layer dark, last layer light."""
    import matplotlib

    return matplotlib.colormaps["viridis"]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _svg(draw: Callable[[Any], None], x: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    axes = figure.add_subplot()
    draw(axes)
    axes.set_xlabel(_words(x))
    axes.grid(alpha=0.3)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
