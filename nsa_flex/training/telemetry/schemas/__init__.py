"""What artefacts hold: JSON schemas; of rows their properties give the columns' order."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, Literal, get_args

Artefact = Literal[
    "training",
    "fallback_counters",
    "gates",
    "heartbeat",
    "changes",
    "samples",
    "sessions",
    "recall",
]
# Files that are one object.
Whole = Literal["data", "run"]
ARTEFACTS: tuple[Artefact, ...] = get_args(Artefact)


@functools.cache
def schema(artefact: Artefact | Whole) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of one row; of the whole file of "data" and "run".

    >>> list(schema("training")["properties"])[:3]
    ['session', 'step', 'loss']
    """
    file = resources.files(__name__) / f"{artefact}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def columns(artefact: Artefact) -> list[str]:
    """Names of the columns, in order."""
    return list(schema(artefact)["properties"])


def file_name(artefact: Artefact) -> str:
    """Name of the artefact's file in a run's folder."""
    return f"{artefact}.{'jsonl' if artefact in ('heartbeat', 'samples') else 'csv'}"
