"""What is in the data of a config: documents, tokens, epochs, padding, skipped files."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from nsa_flex.training.arguments import tokens_per_step
from nsa_flex.training.packing import Counts
from nsa_flex.training.texts import Texts

DATA_REPORT = "data.json"
_NAMED = 20


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
    skipped = "".join(f"; {n} files skipped: {why}" for why, n in report["skipped"].items())
    return (
        f"data: {report['documents']:,} documents, {report['tokens']:,} tokens, the longest "
        f"{report['longest_document']:,}; {report['epochs']:.3g} epochs, "
        f"{report['padding_share']:.1%} padding{skipped}"
    )
