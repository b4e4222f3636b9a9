"""`nsa-flex report`: the artefacts of a run as one page of HTML that loads nothing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from nsa_flex.training.telemetry.rows import last_of_each_step, read_rows

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


_TEMPLATES = Path(__file__).parent / "templates"
# Columns of gates.csv that are drawn a line a layer, and what they say.
_LAYERS = {
    "entropy": "Entropy of the shares, nats: 1.10 where all branches count alike.",
    "never_chosen": "Share of the blocks that no query of the probe chose.",
    "distance": "Mean distance in tokens to the chosen blocks.",
    "below_1_percent": "Fraction of gates below 1 %.",
    "above_99_percent": "Fraction of gates above 99 %.",
}


def report(run: Path) -> str:
    """The page, as text.

    Args:
        run: folder that holds training.csv, and what else there is of the artefacts.

    Raises:
        ValueError: there is no row of training.csv.
        ModuleNotFoundError: jinja2 or matplotlib is missing; the message names the extras.
    """
    rows = last_of_each_step(read_rows(run, "training"))
    if not any(row["loss"] is not None for row in rows):
        raise ValueError(f"{run} holds no row of training.csv yet: name the folder of a run")
    gates, beats = read_rows(run, "gates"), read_rows(run, "heartbeat")
    return _template().render(
        run=run.resolve().name,
        facts=_facts(rows, beats) | _changed(read_rows(run, "changes")),
        figures=_figures(rows, gates, beats),
        counters=_last_of(read_rows(run, "fallback_counters")),
        fallbacks=_fallbacks(read_rows(run, "fallback_counters")),
    )


def _facts(rows: list[dict[str, Any]], beats: list[dict[str, Any]]) -> dict[str, str]:
    trained = [row for row in rows if row["loss"] is not None]
    held_out = [row["held_out_loss"] for row in rows if row["held_out_loss"] is not None]
    facts = {
        "steps": f"{trained[-1]['step']:,}",
        "loss": f"{trained[-1]['loss']:.4f}",
        "sessions": str(rows[-1]["session"]),
    }
    if trained[-1]["tokens"]:
        facts["tokens"] = f"{trained[-1]['tokens']:,}"
    if held_out:
        facts["held-out loss"] = f"{held_out[-1]:.4f}"
    if beats:
        facts["now"] = beats[-1]["phase"]
        mesh = beats[-1].get("mesh") or {}  # runs of former versions tell none
        if any(ranks > 1 for ranks in mesh.values()):
            facts["ranks"] = ", ".join(f"{ranks} {axis}" for axis, ranks in mesh.items())
        if beats[-1].get("sent_bytes"):
            facts["sent a step and rank"] = f"{beats[-1]['sent_bytes'] / 1e9:.3g} GB"
        rates = [beat["tokens_per_second"] for beat in beats if beat["tokens_per_second"]]
        if rates:
            facts["tokens a second"] = f"{sorted(rates)[len(rates) // 2]:,.0f}"
    return facts


def _changed(changes: list[dict[str, Any]]) -> dict[str, str]:
    """What sessions did otherwise than those before, by setting."""
    found: dict[str, list[str]] = {}
    for row in changes:
        found.setdefault(row["key"], [row["before"]]).append(f"{row['after']} from {row['step']}")
    return {key: ", ".join(values) for key, values in found.items()}


def _figures(
    rows: list[dict[str, Any]], gates: list[dict[str, Any]], beats: list[dict[str, Any]]
) -> list[tuple[str, str, str]]:
    """Title, what it says, SVG."""
    found = [("Loss", "", loss_plot(rows))]
    for name, title in (
        ("grad_norm", "Norm of the gradients"),
        ("learning_rate", "Learning rate"),
    ):
        if any(row[name] is not None for row in rows):
            found.append((title, "", column_plot(rows, name)))
    if any(beat["tokens_per_second"] is not None for beat in beats):
        found.append(("Speed", "From the heartbeat.", speed_plot(beats)))
    if gates:
        told = "Mean of the layers, and their range."
        found.append(("Branches", told, share_plot(gates)))
        for name, text in _LAYERS.items():
            if any(row[name] is not None for row in gates):
                title = name.replace("_", " ").replace("percent", "%").capitalize()
                found.append((title, text, layers_plot(gates, name)))
    return found


def _last_of(counters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the last measurement."""
    if not counters:
        return []
    last = (counters[-1]["session"], counters[-1]["step"])
    return [row for row in counters if (row["session"], row["step"]) == last]


def _fallbacks(counters: list[dict[str, Any]]) -> int:
    """Forward calls of layers that ran on another backend than the first."""
    return sum(row["calls"] for row in counters if row["fallback"])


def _template() -> Any:
    try:
        import matplotlib  # noqa: F401 -- named in the error below
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the report of a run needs {error.name}, which is not installed; install it with: "
            "pip install 'nsa-flex[audit,bench]'",
            name=error.name,
        ) from error
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
