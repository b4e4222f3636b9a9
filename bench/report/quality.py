"""NSA beside dense attention after training: held-out losses at equal tokens and equal seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

Found = dict[str, Any]
BRANCHES = ("compressed", "selected", "sliding")


def summarize(results: list[Found]) -> Found:
    """One result of `bench.tools.quality` for each attention, and how they compare.

    Returns:
        "models" by attention; "equal_tokens", the losses at the last step that all measured;
        "equal_seconds", at the end of the shortest run, between measurements by interpolation;
        None of a run that had not measured by then.
    """
    models = {each["attention"]: each for each in results}
    steps = set.intersection(*({e["step"] for e in each["evaluations"]} for each in results))
    seconds = min(each["evaluations"][-1]["seconds"] for each in results)
    return {
        "models": models,
        "equal_tokens": _at_step(models, max(steps)),
        "equal_seconds": _at_seconds(models, seconds),
    }


def _at_step(models: dict[str, Found], step: int) -> Found:
    found: Found = {"step": step}
    for name, each in models.items():
        (row,) = (row for row in each["evaluations"] if row["step"] == step)
        found |= {"tokens": row["tokens"], f"{name}_loss": row["loss"]}
        found[f"{name}_seconds"] = row["seconds"]
        found[f"{name}_last_quarter"] = _last_quarter(row)
    return found


def _last_quarter(row: Found) -> float:
    """Loss of the last quarter of positions, where a context is long."""
    places = row["by_position"]
    return round(float(np.mean(places[-len(places) // 4 :])), 4)


def _at_seconds(models: dict[str, Found], seconds: float) -> Found:
    found: Found = {"seconds": seconds}
    for name, each in models.items():
        rows = each["evaluations"]
        times = [row["seconds"] for row in rows]
        known = times[0] <= seconds
        for what, digits in (("loss", 4), ("tokens", None)):
            value = float(np.interp(seconds, times, [row[what] for row in rows]))
            found[f"{name}_{what}"] = round(value, digits) if known else None
    return found


def draw(found: Found, path: Path) -> None:
    """One PNG: losses over tokens, over seconds and by position, and gates over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7.5), layout="constrained")
    axes = figure.subplots(2, 2)
    for name, each in found["models"].items():
        rows = each["evaluations"]
        losses = [row["loss"] for row in rows]
        axes[0, 0].plot([row["tokens"] / 1e6 for row in rows], losses, "o-", ms=3, label=name)
        axes[0, 1].plot([row["seconds"] for row in rows], losses, "o-", ms=3, label=name)
        (row,) = (row for row in rows if row["step"] == found["equal_tokens"]["step"])
        length = each["config"]["data"]["seq_len"]
        places = (np.arange(len(row["by_position"])) + 0.5) * length / len(row["by_position"])
        axes[1, 0].plot(places, row["by_position"], label=name)
        if each["gates"]:
            _draw_shares(each["gates"], axes[1, 1])
    names = ("million tokens", "seconds of training", "position", "step")
    for place, name in zip(axes.flat, names, strict=True):
        place.set_xlabel(name)
        place.grid(alpha=0.3)
        place.legend()
    for place in axes.flat[:3]:
        place.set_ylabel("held-out nats a token")
    axes[1, 0].set_title(f"after {found['equal_tokens']['tokens'] / 1e6:.0f} M tokens", fontsize=9)
    axes[1, 1].set_ylabel("share of a branch, mean of the layers")
    first = next(iter(found["models"].values()))
    figure.suptitle(f"{first['device']}, torch {first['torch']}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_shares(gates: list[Found], axes: Any) -> None:
    """Mean of the layers, and their range."""
    steps = sorted({row["step"] for row in gates})
    for branch in BRANCHES:
        values = [
            [row[f"share_{branch}"] for row in gates if row["step"] == step] for step in steps
        ]
        (line,) = axes.plot(steps, [np.mean(each) for each in values], "o-", ms=3, label=branch)
        low, high = [min(each) for each in values], [max(each) for each in values]
        axes.fill_between(steps, low, high, alpha=0.15, color=line.get_color())
    axes.set_ylim(0, 1)
