"""What is in the data of a config: documents, tokens, epochs, padding, skipped files."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from nsa_flex.training.arguments import tokens_per_step
from nsa_flex.training.errors import TrainingError
from nsa_flex.training.packing import Counts
from nsa_flex.training.telemetry.schemas import schema
from nsa_flex.training.texts import Texts

DATA_REPORT = "data.json"
COUNTED_BYTES = 8 * 2**20  # that every run reads once more at its start, to count what is there
_NAMED = 20


def report_at_start(texts: Texts) -> dict[str, Any]:
    """`data_report` of data that are small or in a cache; else files and bytes, None for the rest.

    So it is too where a file cannot be read: the training says so once it comes to it.
    """
    if texts.cache is not None or _size(texts) <= COUNTED_BYTES:
        with contextlib.suppress(TrainingError):
            return data_report(texts)
    found = dict.fromkeys(schema("data")["properties"])
    return found | {"files": len(texts.source.files), "file_bytes": _size(texts)}


def _size(texts: Texts) -> int:
    return sum(path.stat().st_size for path in texts.source.files if path.exists())


def data_report(texts: Texts) -> dict[str, Any]:
    """Plain JSON types. All documents are read that are trained on, from a cache if there is one.

    Epochs are those that the steps of the config give. Rows and padding are those of the first
    epoch, at the full length.
    """
    config = texts.config
    whole = dataclasses.replace(texts, record=None, stages=())
    rows = whole.training_rows(epochs=1)
    num_rows, real = 0, 0
    for row in rows:
        num_rows += 1
        real += row.real
    total = sum(each.tokens for each in rows.counts)
    trained = config.training.steps * tokens_per_step(config) * real
    trained = trained // (num_rows * config.data.seq_len)
    skipped = {**rows.skipped, **(texts.cache.skipped if texts.cache is not None else {})}
    return {
        "files": len(texts.source.files),
        "file_bytes": _size(texts),
        "documents": sum(each.documents for each in rows.counts),
        "tokens": total,
        "longest_document": max(each.longest for each in rows.counts),
        "rows": num_rows,
        "padding_share": 1 - real / (num_rows * config.data.seq_len),
        "tokens_of_training": trained,
        "epochs": trained / total,
        "entries": _entries(texts, rows.counts, trained),
        "skipped": dict(collections.Counter(skipped.values())),
        "skipped_files": sorted(map(str, skipped))[:_NAMED],
    }


def _entries(texts: Texts, counts: list[Counts], trained: int) -> list[dict[str, Any]]:
    """Of a mixture, each entry by itself."""
    weights = texts.config.data.weights
    return [
        {
            "entry": entry,
            "documents": count.documents,
            "tokens": count.tokens,
            "epochs": trained * weight / sum(weights) / count.tokens,
        }
        for entry, weight, count in zip(texts.config.data.files, weights, counts, strict=False)
    ]


def write_report(run: Path, report: dict[str, Any]) -> None:
    """Into the folder of a run."""
    (run / DATA_REPORT).write_text(json.dumps(report, indent=1))


def in_a_line(report: dict[str, Any]) -> str:
    """For a terminal."""
    if report["documents"] is None:
        size = f"{report['file_bytes'] / 1e6:,.1f} MB"
        return f"data: {report['files']:,} files, {size}; --data-report counts what is in them"
    skipped = "".join(f"; {n} files skipped: {why}" for why, n in report["skipped"].items())
    return (
        f"data: {report['documents']:,} documents, {report['tokens']:,} tokens, the longest "
        f"{report['longest_document']:,}; {report['epochs']:.3g} epochs, "
        f"{report['padding_share']:.1%} padding{skipped}"
    )
