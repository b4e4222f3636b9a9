"""Baselines: the findings that are known, so that CI fails on new ones only."""

from __future__ import annotations

import json
from pathlib import Path

from nsa_flex.auditing.report import AuditReport

VERSION = 1


def write_baseline(report: AuditReport, file: str | Path) -> None:
    """Save every finding of `report`, known ones included, as the baseline of later audits."""
    every = (*report.known, *report.findings)
    entries = [
        {
            "fingerprint": finding.fingerprint,
            "kind": finding.kind,
            "message": finding.message,
            "location": finding.location,
        }
        for finding in every
    ]
    text = json.dumps({"version": VERSION, "findings": entries}, indent=2)
    Path(file).write_text(text + "\n")


def read_baseline(file: str | Path) -> frozenset[str]:
    """Fingerprints of the findings that `write_baseline` saved.

    Raises:
        ValueError: the file is no baseline.
        FileNotFoundError: there is no such file.
    """
    try:
        saved = json.loads(Path(file).read_text())
        if saved["version"] == VERSION:
            return frozenset(entry["fingerprint"] for entry in saved["findings"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no baseline of nsa-flex audit") from error
    raise ValueError(f"{file} is a baseline of version {saved['version']}, expected {VERSION}")
