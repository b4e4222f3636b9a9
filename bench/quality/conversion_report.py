"""The tables of the rows that `conversion` and `block_choices` write."""

from __future__ import annotations

import numpy as np
import pandas as pd

from nsa_flex.bench.quality.needles import KINDS
from nsa_flex.bench.quality.report import spread
from nsa_flex.bench.report.cells import EMPTY
from nsa_flex.bench.report.cells import tokens as length_cell
from nsa_flex.bench.report.rows import Row

CONTROL = "continued"


def conversion(rows: list[Row]) -> pd.DataFrame:
    """One line a model: mean of the seeds ± half their range; losses are held-out nats a token.

    "Over dense" is how far its loss lies above that of the dense model that it started from, in
    percent, and "after continued" above that of the dense model of the same seed trained on as it
    is, where there is one. Models that were patched and not trained come before those that were.
    Needles are percent of right digits of each of their `KINDS`. Recall is that in the shorter
    rows, before and after their stages.
    """
    rows = [row for row in rows if row["target"] == "conversion"]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if "patched" in row:
            groups.setdefault(("patched", row["variant"]), []).append(_untrained(row))
    for row in rows:
        if row["status"] == "ok":
            groups.setdefault((row["piece"], row["variant"]), []).append(row)
    controls = {row["seed"]: row for row in groups.get((CONTROL, "dense"), [])}
    lines = []
    for (piece, variant), runs in groups.items():
        runs = list({row["seed"]: row for row in runs}.values())
        lines.append(
            {
                "model": piece,
                "attention": variant,
                "tokens": f"{runs[0]['tokens'] / 1e6:.1f} M",
                "seeds": str(len(runs)),
                **_columns(runs, controls),
                "block recall": _recall(runs, "block_recall"),
                "score recall": _recall(runs, "score_recall"),
                "commit": runs[0]["commit"],
            }
        )
    return pd.DataFrame(lines)


def choices(rows: list[Row]) -> pd.DataFrame:
    """One line a way to patch a dense model, untrained; layers that were patched alone left out.

    Losses are held-out nats a token; mass is that of dense attention in the selected blocks, mean
    of the layers; times are those of the core.
    """
    found = {row["choice"]: row for row in rows if row["target"] == "block_choices"}
    times = {row["choice"]: row for row in rows if row["target"] == "block_times"}
    trained = min(found["dense"]["losses"], key=int)  # the dense model has seen no longer rows
    lines = []
    for name, row in found.items():
        if name.startswith("layer "):
            continue
        line = {"choice": name}
        for length, dense in found["dense"]["losses"].items():
            cell, loss = length_cell(int(length)), row["losses"].get(length, {}).get("loss")
            line[f"loss at {cell}"] = EMPTY if loss is None else f"{loss:.3f}"
            if length == trained:
                over = [] if name == "dense" else [_above(row, dense["loss"], int(length))]
                line[f"over dense, {cell}"] = _percent(over)
            held = row.get("held_mass", {}).get(length)
            line[f"mass, {cell}"] = f"{100 * np.mean(held):.0f} %" if held else EMPTY
        for title in ("forward", "forward_backward"):
            ms = times.get(name, {}).get(f"{title}_ms")
            line[f"{title.replace('_', ' + ')}, ms"] = f"{ms:.1f}" if ms else EMPTY
        lines.append(line | {"commit": row["commit"]})
    return pd.DataFrame(lines)


def behind(row: Row, control: Row, length: int) -> float:
    """How far a held-out loss at rows of `length` lies above the control's, in percent."""
    return _above(row, control["losses"][str(length)]["loss"], length)


def over_dense(row: Row, length: int) -> float:
    """Likewise above that of the dense model that it started from."""
    return _above(row, row["started_from"][str(length)], length)


def _above(row: Row, loss: float, length: int) -> float:
    ours: float = row["losses"][str(length)]["loss"]
    return 100 * (ours / loss - 1)


def _untrained(row: Row) -> Row:
    """The row of a model as it was before its first stage."""
    found = {"losses": row["patched"], "needles": row.get("patched_needles", {})}
    return {**row, **found, "tokens": 0, "seconds": 0.0, "stages": []}


def _columns(runs: list[Row], controls: dict[int, Row]) -> dict[str, str]:
    recipe = runs[0]["recipe"]
    columns: dict[str, str] = {}
    for length in (recipe["length"], recipe["long_length"]):
        cell = length_cell(length)
        columns[f"loss at {cell}"] = spread([row["losses"][str(length)]["loss"] for row in runs])
        if length == recipe["length"]:  # the dense model has seen no longer rows
            columns[f"over dense, {cell}"] = _percent(
                [over_dense(row, length) for row in runs if "started_from" in row]
            )
        columns[f"after continued, {cell}"] = _percent(
            [behind(row, controls[row["seed"]], length) for row in runs if row["seed"] in controls]
        )
        columns[f"needles, {cell}"] = _needles(runs, str(length))
    last = [_last_quarter(row["losses"][str(recipe["long_length"])]) for row in runs]
    return columns | {"last quarter": spread(last)}


def _last_quarter(row: Row) -> float:
    """Loss of the last quarter of positions, where a context is long."""
    places = row["by_position"]
    return float(np.mean(places[-(len(places) // 4) :]))


def _needles(runs: list[Row], length: str) -> str:
    """Percent of right digits by kind, means of the seeds."""
    found = [row["needles"][length] for row in runs if row.get("needles")]
    if not found:
        return EMPTY
    shares = [100 * np.mean([each[kind]["right"] for each in found]) for kind in KINDS]
    return " / ".join(f"{share:.0f}" for share in shares)


def _percent(values: list[float]) -> str:
    """Mean ± half the range.

    >>> _percent([0.5, 1.5]), _percent([])
    ('+1.0 ± 0.5 %', '-')
    """
    if not values:
        return EMPTY
    mean = f"{np.mean(values):+.1f}"
    return f"{mean} %" if len(values) == 1 else f"{mean} ± {np.ptp(values) / 2:.1f} %"


def _recall(runs: list[Row], column: str) -> str:
    """Before and after, in percent, mean of the seeds; dense models have none."""
    ends: list[list[float]] = []
    for row in runs:
        short = [each for each in row["stages"] if each["seq_len"] == row["recipe"]["length"]]
        if short and column in short[0]:
            ends.append([short[0][column][0], short[-1][column][1]])
    if not ends:
        return EMPTY
    before, after = 100 * np.mean(np.array(ends, float), 0)
    return f"{before:.0f} → {after:.0f} %"
