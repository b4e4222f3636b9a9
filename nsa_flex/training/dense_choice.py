"""Which layers of a dense model to leave dense: those without whose attention it loses most."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_flex.patching import patch, unpatch
from nsa_flex.patching.sites import choose_sites
from nsa_flex.training.arguments import is_bf16, uses_cuda
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.models import build_model
from nsa_flex.training.texts import find_texts
from nsa_flex.training.tokenization import plain_ids

ROWS = 8
CHOICE_FILE = "dense_layers.json"


def choose_dense_layers(
    config: TrainConfig, count: int, out: Path, note: Callable[[str], None] = lambda text: None
) -> list[int]:
    """Numbers of `count` layers, in their order; `out` keeps what was measured.

    Args:
        config: of a dense checkpoint; rows of its held-out text are measured on.
        note: called with a line on each layer.

    Raises:
        ValueError: all tokens of a row are selected, so that no layer loses anything; or the
            model has no more than `count` layers.
    """
    sizes, path = config.model.nsa, out / CHOICE_FILE
    if config.data.seq_len <= sizes.num_selected_tokens:
        raise ValueError(
            f"rows have {config.data.seq_len} tokens, all of which are selected: to choose dense "
            f"layers take more than n * l' = {sizes.num_selected_tokens}"
        )
    found: dict[str, Any] = {
        "checkpoint": config.model.checkpoint,
        "nsa": sizes.to_dict(),
        "seq_len": config.data.seq_len,
    }
    before = json.loads(path.read_text()) if path.exists() else {}
    if found.items() <= before.items():
        found = before
    else:
        found["lost"] = {}
        for layer, nats in lost_by_layer(config):
            note(f"layer {layer} as NSA, the others dense: {nats:+.4f} nats")
            found["lost"][str(layer)] = nats
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    lost = {int(layer): value for layer, value in found["lost"].items()}
    if not 0 < count < len(lost):
        raise ValueError(f"got {count} dense layers; the model has {len(lost)}, leave one to NSA")
    return sorted(sorted(lost, key=lambda layer: lost[layer], reverse=True)[:count])


def lost_by_layer(config: TrainConfig) -> Iterator[tuple[int, float]]:
    """Nats of held-out loss that the dense model gains where one layer alone is patched."""
    texts = find_texts(config)
    rows = [torch.from_numpy(plain_ids(row.ids))[None] for row in texts.held_out_rows(ROWS)]
    dense = dataclasses.replace(config.model, attention="dense", dense_layers=())
    device = torch.device("cuda" if uses_cuda(config) else "cpu")
    model = build_model(dense, config.data, texts.tokenizer).to(device).eval()

    @torch.no_grad()
    def loss() -> float:
        found = 0.0
        for row in rows:
            ids = row.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=is_bf16(config)):
                found += model(input_ids=ids, labels=ids).loss.item() / len(rows)
        return found

    before = loss()
    for site in choose_sites(model, None):
        alone = site.module

        def is_alone(module: nn.Module, name: str, alone: nn.Module = alone) -> bool:
            return module is alone

        patch(model, config.model.nsa, init="dense", filter_fn=is_alone)
        model.to(device)
        yield int(alone.layer_idx), loss() - before
        unpatch(model)
