"""A tiny patched model, batches of random tokens, and what artefacts must look like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import torch
from torch import Tensor

import nsa_flex
from nsa_flex.training.telemetry import ARTEFACTS, read_rows, schema
from patching.tiny_models import NSA, VOCABULARY, tiny_model

LENGTH = 72  # more than n * l' = 32 tokens: blocks are chosen among many


def patched() -> Any:
    return nsa_flex.patch(tiny_model().train(), NSA)


def batch(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(2, VOCABULARY, (rows, length))


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def rows_of(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All artefacts, each row valid by its schema, and so is what the run wrote as one object."""
    for path in (*folder.glob("data.json"), *folder.glob("checkpoint-*/run.json")):
        jsonschema.validate(json.loads(path.read_text()), schema(path.stem))
    found = {name: read_rows(folder, name) for name in ARTEFACTS}
    for name, rows in found.items():
        for row in rows:
            jsonschema.validate(row, schema(name))
    return found
