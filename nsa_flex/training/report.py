"""`nsa-flex report`: the artefacts of runs as one page of HTML that loads nothing.

Python gathers the numbers; templates/report.js draws them with uPlot, which lies beside it: 50 KB,
no dependency of its own, and what Grafana draws with.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nsa_flex.auditing.html import TEMPLATES as AUDIT_TEMPLATES
from nsa_flex.auditing.html import environment, size
from nsa_flex.training.errors import blamed_on
from nsa_flex.training.telemetry.rows import last_of_each_step, read_rows
from nsa_flex.training.telemetry.schemas import schema

Row = dict[str, Any]
TEMPLATES = Path(__file__).parent / "templates"
# Points of a line that a page holds at most: a screen shows fewer.
MOST_POINTS = 3000
_OVER = ("done", "failed")
_PLACES = ("session", "step", "tokens", "seconds")


def report(*runs: Path, refresh: float | None = None) -> str:
    """The page of one run, or of several beside one another, as text.

    Args:
        runs: folders that hold training.csv, and what else there is of the artefacts.
        refresh: seconds after which the page loads itself anew; None where no run goes on.

    Raises:
        ValueError: a run has no row of training.csv.
        ModuleNotFoundError: jinja2 is missing, or for a run of `nsa-flex train` pyyaml; the
            message names the extra.
    """
    template = environment(TEMPLATES, AUDIT_TEMPLATES).get_template("report.html")
    found = [gathered(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    drawn = [{key: run[key] for key in ("name", "lines", "beats", "layers")} for run in found]
    return template.render(
        runs=found,
        settings=_settings(found),
        data=_json({"runs": drawn, "captions": _captions(), "refresh": refresh}),
        refresh=refresh,
        written=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
    )


def is_over(run: Path) -> bool:
    """Whether the run's last heartbeat says that it ended; true of a run without one."""
    beats = read_rows(run, "heartbeat")
    return not beats or beats[-1]["phase"] in _OVER


def gathered(run: Path, name: str) -> dict[str, Any]:
    """What the page shows of a run."""
    rows = last_of_each_step(read_rows(run, "training"))
    if not any(row["loss"] is not None for row in rows):
        raise ValueError(f"{run} holds no row of training.csv yet: name the folder of a run")
    beats = read_rows(run, "heartbeat")
    counters = last_of_each_step(read_rows(run, "fallback_counters"))
    return {
        "name": name,
        "facts": _facts(rows, beats),
        "lines": _lines(rows),
        "beats": _beats(beats),
        "layers": _layers(last_of_each_step(read_rows(run, "gates"))),
        "counters": [row for row in counters if row["step"] == counters[-1]["step"]],
        "fallbacks": sum(row["calls"] for row in counters if row["fallback"]),
        "changes": read_rows(run, "changes"),
        "sessions": read_rows(run, "sessions"),
        "samples": read_rows(run, "samples")[::-1],
        "config": _config(run),
        "data": _data(run),
    }


def _names(runs: Sequence[Path]) -> list[str]:
    """Names of folders; paths from the folder they share, where names would be the same."""
    paths = [run.resolve() for run in runs]
    names = [path.name for path in paths]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([path.parent for path in paths])
    return [os.path.relpath(path, common) for path in paths]


def _facts(rows: list[Row], beats: list[Row]) -> dict[str, str]:
    trained = [row for row in rows if row["loss"] is not None]
    held_out = [row for row in rows if row["held_out_loss"] is not None]
    facts = {"steps": f"{trained[-1]['step']:,}", "loss": f"{trained[-1]['loss']:.4f}"}
    if held_out:
        last = held_out[-1]
        facts["held-out loss"] = f"{last['held_out_loss']:.4f}"
        facts["perplexity"] = f"{last['perplexity']:,.4g}"
        if last["bits_per_byte"] is not None:
            facts["bits per byte"] = f"{last['bits_per_byte']:.4f}"
    if trained[-1]["tokens"]:
        facts["tokens"] = f"{trained[-1]['tokens']:,}"
    rates = [beat["tokens_per_second"] for beat in beats if beat["tokens_per_second"]]
    if rates:
        facts["tokens a second"] = f"{statistics.median(rates):,.0f}"
    facts["sessions"] = str(rows[-1]["session"])
    if beats:
        facts["now"] = beats[-1]["phase"]
        mesh = beats[-1].get("mesh") or {}  # runs of former versions tell none
        if any(ranks > 1 for ranks in mesh.values()):
            facts["ranks"] = ", ".join(f"{ranks} {axis}" for axis, ranks in mesh.items())
        if beats[-1].get("sent_bytes"):
            facts["sent a step and rank"] = f"{beats[-1]['sent_bytes'] / 1e9:.3g} GB"
    return facts


def _lines(rows: list[Row]) -> dict[str, list[Any]]:
    """Columns of training.csv, hours of training, and at which rows a session begins."""
    before, last, hours, begun = 0.0, rows[0], [], []
    for row in rows:
        if row["session"] != last["session"]:
            before += last["seconds"]
            begun.append(True)
        else:
            begun.append(False)
        hours.append((before + row["seconds"]) / 3600)
        last = row
    table = [
        {**row, "hours": hour, "begins": begins}
        for row, hour, begins in zip(rows, hours, begun, strict=True)
    ]
    kept = _thinned(table, lambda row: row["begins"] or row["held_out_loss"] is not None)
    return {name: [_number(row[name]) for row in kept] for name in kept[0] if name != "seconds"}


def _thinned(rows: list[Row], always: Any) -> list[Row]:
    """Of many rows, the last and the one with the highest loss of each bin, and some always."""
    each = -(-len(rows) // (MOST_POINTS // 2))
    if each <= 2:
        return rows
    kept: list[Row] = []
    for start in range(0, len(rows), each):
        some = rows[start : start + each]
        worst = max(range(len(some)), key=lambda i: some[i]["loss"] or 0.0)
        kept += [row for i, row in enumerate(some) if i in (worst, len(some) - 1) or always(row)]
    return kept


def _beats(beats: list[Row]) -> dict[str, list[Any]]:
    """Hours, tokens a second and GiB of heartbeats; `gaps` are hours in which there were none."""
    if not beats:
        return {}
    start = beats[0]["time"]
    pairs = list(itertools.pairwise(beats))
    waits = [b["time"] - a["time"] for a, b in pairs]
    longest = max(30.0, 5 * statistics.median(waits or [0.0]))
    gaps = [
        [(a["time"] - start) / 3600, (b["time"] - start) / 3600]
        for a, b in pairs
        if b["time"] - a["time"] > longest or a["session"] != b["session"]
    ]
    kept = beats[:: -(-len(beats) // MOST_POINTS)]

    def gib(name: str) -> list[float | None]:
        return [None if beat[name] is None else beat[name] / 2**30 for beat in kept]

    return {
        "hours": [(beat["time"] - start) / 3600 for beat in kept],
        "gaps": gaps,
        "tokens a second": [beat["tokens_per_second"] for beat in kept],
        "host, peak": gib("host_bytes"),
        "device": gib("device_bytes"),
        "device, peak": gib("device_peak_bytes"),
    }


def _layers(gates: list[Row]) -> dict[str, Any]:
    """steps, layers, and for each column of gates.csv a list of the layers' values a step."""
    if not gates:
        return {}
    layers = list(dict.fromkeys(row["layer"] for row in gates))
    steps = list(dict.fromkeys(row["step"] for row in gates))
    at = {(row["step"], row["layer"]): row for row in gates}
    names = [name for name in gates[0] if name not in ("session", "step", "layer")]
    return {
        "steps": steps,
        "layers": layers,
        "values": {
            name: [[_number(at.get((s, x), {}).get(name)) for x in layers] for s in steps]
            for name in names
        },
    }


def _captions() -> dict[str, str]:
    """What columns of gates.csv and training.csv are, from their schemas."""
    found = schema("gates")["properties"] | schema("training")["properties"]
    return {
        name: about["description"]
        for name, about in found.items()
        if "description" in about and name not in _PLACES
    }


def _config(run: Path) -> dict[str, str]:
    """Dotted keys of config.yaml and their values; {} without such a file."""
    path = run / "config.yaml"
    if not path.exists():
        return {}
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"the report of a run with {path.name} needs pyyaml, which is not installed; install "
            "it with: pip install 'nsa-flex[audit,train]'",
            name="yaml",
        ) from error
    with blamed_on(str(path)):
        return dict(_flat(yaml.safe_load(path.read_text())))


def _flat(values: dict[str, Any], where: str = "") -> Any:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{where}{key}.")
        else:
            yield where + key, json.dumps(value)


def _settings(runs: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Config by key, a value a run; of several runs only what differs."""
    keys = dict.fromkeys(key for run in runs for key in run["config"])
    table = {key: [run["config"].get(key, "") for run in runs] for key in keys}
    if len(runs) == 1:
        return table
    return {key: values for key, values in table.items() if len(set(values)) > 1}


def _data(run: Path) -> dict[str, str]:
    """Of the text that the last checkpoint was trained on: files, size and a fingerprint."""
    records = sorted(run.glob("checkpoint-*/run.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        return {}
    with blamed_on(str(records[-1])):
        files = json.loads(records[-1].read_text())["files"]
        hashes = "".join(file["hash"] for file in files)
        return {
            "files": f"{len(files):,}",
            "size": size(sum(file["size"] for file in files)),
            "fingerprint": hashlib.sha256(hashes.encode()).hexdigest()[:16],
        }


def _number(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _json(value: Any) -> Any:
    """For a script element: nothing in it ends the element."""
    from markupsafe import Markup

    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))
