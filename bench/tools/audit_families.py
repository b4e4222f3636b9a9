"""Audit ten families of transformers as they are shipped: `python -m bench.tools.audit_families`.

Tiny random models, three lengths and two batch sizes, inference, training and decoding against a
static cache. Writes `bench/results/audit_families.json`, the table of docs/guide/audit.md.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from nsa_flex import AuditReport, audit
from nsa_flex.auditing.lint import lint
from nsa_flex.auditing.sources import shortened
from nsa_flex.auditing.targets import (
    FAMILIES,
    decoding_batches,
    logits,
    token_batches,
)
from nsa_flex.testing.models import tiny_decoder

OUT = Path(__file__).parents[1] / "results" / "audit_families.json"
LENGTHS, BATCH_SIZES = [48, 100, 17], [2, 3]


def report_of(family: str) -> AuditReport:
    """The audit of one family."""
    model = tiny_decoder(family)
    return audit(
        logits(model),
        token_batches(LENGTHS, BATCH_SIZES),
        decode=decoding_batches(model),
        measured=False,
        name=family,
    )


def linted(family: str) -> list[str]:
    """What the lint finds in the family's sources, which are no part of the audit by default."""
    found = lint(tiny_decoder(family), "all")
    return [shortened(f"{finding.message} at {finding.location}") for finding in found]


def row(report: AuditReport) -> dict[str, Any]:
    """What the table shows of a report; paths shortened."""
    return {
        "family": report.target,
        "graphs": report.graphs,
        "findings": [shortened(f"{f.kind}: {f.message} at {f.location}") for f in report.findings],
        "lint": linted(report.target),
        "notes": [shortened(note) for note in report.notes],
    }


def main() -> None:
    """Audit, print a line for each family, write the file."""
    rows = []
    for family in FAMILIES:
        report = report_of(family)
        rows.append(row(report))
        print(family, report.graphs, f"{len(report.findings)} findings", flush=True)
    result = {
        **report.environment,
        "transformers": transformers.__version__,
        "lengths": LENGTHS,
        "batch_sizes": BATCH_SIZES,
        "rows": rows,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
