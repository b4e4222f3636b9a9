"""Check every decoder family of transformers: `python -m nsa_flex.bench.tools.sweep_families`.

A tiny random model of each, in float64, through `nsa_flex.testing.check_model`. Writes
`bench/results/families.json`, and from it the page `docs/guide/families.md`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers

from nsa_flex.bench.report.cells import markdown
from nsa_flex.testing import check_model
from nsa_flex.testing.models import NOT_BUILT, ORDINARY_TOKENS, model_named, model_types

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "families.json"
PAGE = ROOT / "docs" / "guide" / "families.md"

_HEAD = """\
# Decoder families of transformers

Each of the {count} causal language models of transformers {transformers} was built tiny, with
random weights in float64, patched, and put through `nsa_flex.testing.check_model`: the dense
start gives the logits of the unpatched model, tokens see no later ones, padded rows and packed
documents compute as if alone, cached generation gives what full passes give, gradients reach
every new parameter, a saved model loads, `unpatch` restores every bit, and another model on the
same config object is left alone. `nsa-flex check` does the same with any model; `make families`
writes this page, and a test holds it to what the checks find.

Names are model types, as in a config's `model_type`. A layer with a sliding window, linear
attention, or another limit on what it sees keeps its own attention in every family. Families are
refused as their default config makes them; attention that `patch` does not know, or projections
of another form, may take an [adapter](patch.md).
"""
_LIMITS = {"refused": "is refused", "inherited": "does not work without NSA either"}
# What follows is advice, the same in every row.
_ADVICE = (
    ", which NSA does not compute",
    ": leave such layers out",
    "; leave such layers out",
    ", expected {",
    "; tell it how",
)


def row_of(family: str) -> dict[str, Any]:
    """What the file records of a family: the same weights and tokens every time."""
    if family in NOT_BUILT:
        return {"family": family, "verdict": "not built", "reason": NOT_BUILT[family]}
    torch.manual_seed(0)
    model: Any = model_named(family)
    report = check_model(model, name=family, tokens=ORDINARY_TOKENS)
    return {
        "family": family,
        "verdict": report.verdict,
        "layers": len(report.layers),
        "of": getattr(model.config.get_text_config(), "num_hidden_layers", 0),
        "checks": {check.name: check.status for check in report.checks},
        "details": {check.name: check.detail for check in report.checks if check.detail},
    }


def page(result: dict[str, Any]) -> str:
    """The page, in Markdown."""
    rows = result["rows"]
    by_verdict = {
        verdict: [row for row in rows if row["verdict"] == verdict]
        for verdict in ("right", "wrong", "crashed", "refused", "not built")
    }
    parts = [_HEAD.format(count=len(rows), transformers=result["transformers"])]
    if by_verdict["right"]:
        parts.append(_section("Patched and right", by_verdict["right"], "patched", _patched))
    for verdict in ("wrong", "crashed"):
        if by_verdict[verdict]:
            parts.append(
                _section(f"Patched and {verdict}", by_verdict[verdict], "what", _failures)
            )
    if by_verdict["refused"]:
        parts.append(_section("Refused", by_verdict["refused"], "reason", _refusal))
    if by_verdict["not built"]:
        parts.append(
            _section("Not built", by_verdict["not built"], "reason", lambda row: row["reason"])
        )
    return "\n".join(parts)


def _section(title: str, rows: list[dict[str, Any]], column: str, describe: Any) -> str:
    table = pd.DataFrame(
        {"family": [f"`{row['family']}`" for row in rows], column: [describe(row) for row in rows]}
    )
    return f"## {title} ({len(rows)})\n\n{markdown(table)}"


def _patched(row: dict[str, Any]) -> str:
    layers = "every layer" if row["layers"] == row["of"] else "the layers with full attention"
    limits = [
        f"{name} {_LIMITS[status]}" for name, status in row["checks"].items() if status in _LIMITS
    ]
    return "; ".join([layers, *limits])


def _failures(row: dict[str, Any]) -> str:
    return "; ".join(n for n, status in row["checks"].items() if status in ("wrong", "crashed"))


def _refusal(row: dict[str, Any]) -> str:
    check = next(name for name, status in row["checks"].items() if status == "refused")
    reason = row["details"][check]
    for advice in _ADVICE:
        reason = reason.partition(advice)[0]
    return reason.replace("|", "\\|")


def main() -> None:
    """Sweep, print a line for each family, write the file and the page."""
    logging.disable(logging.WARNING)  # transformers warns of random weights, and much else
    transformers.logging.disable_progress_bar()
    rows = []
    for family in model_types():
        rows.append(row_of(family))
        print(f"{rows[-1]['verdict']:<9} {family}", flush=True)
    result = {"transformers": transformers.__version__, "torch": torch.__version__, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(page(result))


if __name__ == "__main__":
    main()
