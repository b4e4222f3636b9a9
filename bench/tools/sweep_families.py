"""Check every decoder family of transformers: `python -m nsa_flex.bench.tools.sweep_families`.

A tiny random model of each, in float64, through `nsa_flex.testing.check_model`. Writes
`bench/results/families.json`, and from it the page `docs/guide/families.md`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers

from nsa_flex.bench.report.families import page
from nsa_flex.testing import check_model
from nsa_flex.testing.models import NOT_BUILT, ORDINARY_TOKENS, model_named, model_types

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results" / "families.json"
PAGE = ROOT / "docs" / "guide" / "families.md"


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
