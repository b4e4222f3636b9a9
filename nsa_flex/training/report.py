"""`nsa-flex report`: the artefacts of a run as one page of HTML that loads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nsa_flex.training import plots
from nsa_flex.training.telemetry.rows import last_of_each_step, read_rows

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
    found = [("Loss", "", plots.loss_plot(rows))]
    for name, title in (
        ("grad_norm", "Norm of the gradients"),
        ("learning_rate", "Learning rate"),
    ):
        if any(row[name] is not None for row in rows):
            found.append((title, "", plots.column_plot(rows, name)))
    if any(beat["tokens_per_second"] is not None for beat in beats):
        found.append(("Speed", "From the heartbeat.", plots.speed_plot(beats)))
    if gates:
        told = "Mean of the layers, and their range."
        found.append(("Branches", told, plots.share_plot(gates)))
        for name, text in _LAYERS.items():
            if any(row[name] is not None for row in gates):
                title = name.replace("_", " ").replace("percent", "%").capitalize()
                found.append((title, text, plots.layers_plot(gates, name)))
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
