"""Which layers of a dense model to leave dense: those without whose attention it loses most."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_flex.patching import unpatch
from nsa_flex.patching.sites import choose_sites
from nsa_flex.training.arguments import is_bf16, uses_cuda
from nsa_flex.training.config import ModelSection, TrainConfig
from nsa_flex.training.models import build_model, patch_layers
from nsa_flex.training.packing import Collator
from nsa_flex.training.texts import find_texts

ROWS = 8  # that are measured on
APART = 8  # of so many rows each
CHOICE_FILE = "dense_layers.json"


def choose_dense_layers(
    config: TrainConfig, count: int, out: Path, note: Callable[[str], None] = lambda text: None
) -> list[int]:
    """Numbers of `count` layers, in their order; what was measured goes to `CHOICE_FILE` in `out`.

    Each layer in turn is patched, untrained, and the others stay dense: that layer loses what the
    held-out loss gains, in nats.

    Args:
        config: of a dense checkpoint; rows of its held-out text are as in its training.
        note: called with a line on the rows, on each layer, and on the choice.

    Raises:
        ValueError: the model has no more than `count` layers that could be NSA; no row has more
            tokens than are selected; or a loss is not finite.
    """
    texts = find_texts(config)
    dense = dataclasses.replace(config.model, attention="dense", dense_layers=())
    device = torch.device("cuda" if uses_cuda(config) else "cpu")
    model = build_model(dense, config.data, texts.tokenizer).to(device).eval()
    layers = _layers(model)
    if not 0 < count < len(layers):
        raise ValueError(
            f"{count} layers were to stay dense, of {len(layers)} that can be NSA; leave one to it"
        )
    selected = config.model.nsa.num_selected_tokens
    # Neighbouring rows are of one document.
    found = [row for row in texts.held_out_rows(ROWS * APART) if row.real > selected]
    rows = found[:: max(1, len(found) // ROWS)][:ROWS]
    collator = Collator(config.data, bounds=False)
    batches = [collator([row]) for row in rows]
    if not batches:
        raise ValueError(
            f"no held-out row has more than n * l' = {selected} tokens, beyond which alone layers "
            "lose something: take more text, or longer rows"
        )
    tokens = [row.real for row in rows]
    note(f"layers are measured on {len(rows)} rows, the longest of {max(tokens)} tokens")
    lost = lost_by_layer(model, config.model, lambda: _loss(model, batches, config), note)
    chosen = most_lossy(lost, count)
    note(f"dense layers: {chosen}")
    out.mkdir(parents=True, exist_ok=True)
    told = {
        "dense_layers": chosen,
        "lost": {str(layer): nats for layer, nats in lost.items()},
        "seq_len": config.data.seq_len,
        "tokens": tokens,
    }
    (out / CHOICE_FILE).write_text(json.dumps(told, indent=2) + "\n")
    return chosen


def lost_by_layer(
    model: Any,
    section: ModelSection,
    measure: Callable[[], float],
    note: Callable[[str], None],
) -> dict[int, float]:
    """What `measure` of a dense model gains with one layer patched, untrained, by its number.

    Args:
        section: how the layer is patched.
        measure: the model's loss in nats.

    Raises:
        ValueError: a loss is not finite.
    """
    layers, device = _layers(model), model.device
    before = measure()
    lost = {}
    for layer in layers:
        others = tuple(each for each in layers if each != layer)
        patch_layers(model, dataclasses.replace(section, dense_layers=others))
        model.to(device)
        lost[layer] = measure() - before
        unpatch(model)
        note(f"layer {layer} as NSA, the others dense: {lost[layer]:+.4f} nats")
        if not math.isfinite(lost[layer]):
            raise ValueError(f"the loss with layer {layer} as NSA is not finite")
    return lost


def most_lossy(lost: dict[int, float], count: int) -> list[int]:
    """Numbers of the layers that lose most, in their order."""
    return sorted(sorted(lost, key=lambda layer: lost[layer], reverse=True)[:count])


def _layers(model: Any) -> list[int]:
    """Numbers of those that can be NSA."""
    return [int(site.module.layer_idx) for site in choose_sites(model, None)]


@torch.no_grad()
def _loss(model: Any, batches: list[dict[str, Tensor]], config: TrainConfig) -> float:
    """Mean of the batches'."""
    found = 0.0
    for batch in batches:
        given = {name: value.to(model.device) for name, value in batch.items()}
        with torch.autocast(model.device.type, torch.bfloat16, enabled=is_bf16(config)):
            found += model(**given).loss.item() / len(batches)
    return found
