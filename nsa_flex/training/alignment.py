"""NSA layers brought towards dense attention over the same queries, keys and values."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import TrainerCallback

from nsa_flex.patching import NSALayer
from nsa_flex.selection import best_blocks
from nsa_flex.training.block_mass import (
    QUERIES,
    compressed_block_mass,
    dense_block_mass,
    divergence,
    free_blocks,
    recall_of,
    spread_queries,
)
from nsa_flex.training.telemetry.observe import nsa_layers
from nsa_flex.training.telemetry.rows import RowFile

# In a run's folder: `weight` and `frozen`, which its config does not have.
ALIGNMENT_FILE = "alignment.json"


class AlignmentCallback(TrainerCallback):
    """Adds to a training's loss how far NSA is from dense attention, and writes recall.csv.

    Of each NSA layer: the KL of the dense attention's mass over blocks from the scores that blocks
    are selected by, at `QUERIES` random queries, and the squared error of its output relative to
    the dense output's. Rows must be one document each.

    Args:
        folder: of the run.
        weight: of that, beside the loss on the text; 0 measures recall alone.
        frozen: train φ and gates alone. Layers hand on the dense output, so that each one is
            trained on what it would get in the dense model, and the loss on the text is left out.
        probe: int64 (1, S), text to measure recall on.
        every: steps between measurements.
        source: which weights the run began with.
    """

    def __init__(
        self,
        folder: Path,
        *,
        weight: float,
        frozen: bool,
        probe: Tensor,
        every: int,
        source: str,
    ) -> None:
        self.folder, self.weight, self.frozen = folder, weight, frozen
        self.probe, self.every, self.source = probe, every, source
        self.losses: list[Tensor] = []
        self.undo = contextlib.ExitStack()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install everything; the optimizer skips what has no gradient."""
        self.model, self.device = kwargs["model"], args.device
        self.file = RowFile(self.folder, "recall")
        self.undo.callback(self.file.close)
        if self.frozen:
            self.undo.enter_context(base_frozen(self.model))
        if self.weight > 0:
            self.undo.enter_context(self._aligned())
        self._measure(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure now and then; note once how the run is trained."""
        noted = self.folder / ALIGNMENT_FILE
        if not noted.exists():
            told = {"alignment": self.weight, "frozen": self.frozen, "source": self.source}
            noted.write_text(json.dumps(told))
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was, but for what it learnt."""
        self.undo.close()

    @contextlib.contextmanager
    def _aligned(self) -> Iterator[None]:
        before = self.model.loss_function
        handles = [
            layer.register_forward_hook(self._attended, with_kwargs=True)
            for layer in self.model.modules()
            if isinstance(layer, NSALayer)
        ]
        self.model.loss_function = self._loss(before)
        try:
            yield
        finally:
            self.model.loss_function = before
            for handle in handles:
                handle.remove()

    def _attended(
        self, layer: NSALayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Of one call in training: note how far it is from dense; frozen, answer with dense."""
        if not layer.training:
            return None
        check_rows(kwargs.get("rows"))
        query, key, value, scale = what_it_attends(args, kwargs)
        with torch.no_grad():
            dense = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        error = (output.float() - dense.float()).square().mean()
        self.losses.append(
            _mass_loss(layer, query, key, scale) + error / dense.float().square().mean()
        )
        return dense if self.frozen else None

    def _loss(self, on_text: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not self.losses:  # evaluating
                return on_text(logits, labels, *args, **kwargs)
            ours = self.weight * torch.stack(self.losses).mean()
            self.losses.clear()
            whole = kwargs.get("num_items_in_batch")
            if whole is not None:  # of all forwards of the step
                ours = ours * ((labels[..., 1:] != -100).sum() / whole)
            return ours if self.frozen else on_text(logits, labels, *args, **kwargs) + ours

        return loss

    def _measure(self, step: int) -> None:
        rows = recalls(self.model, self.probe.to(self.device))
        self.file.append(*({"step": step} | row for row in rows))


def _mass_loss(layer: NSALayer, query: Tensor, key: Tensor, scale: float) -> Tensor:
    config, tokens = layer.config, key.shape[2]
    first = min(tokens - 1, config.num_forced_blocks * config.select_block_size)
    positions = torch.randint(first, tokens, (QUERIES,), device=query.device)
    query = query[:, :, positions]
    dense = dense_block_mass(query, key, positions, config, scale)
    compressed = layer.compress_key(key)
    number = dense.shape[-1]
    ours = compressed_block_mass(query, compressed, positions, config, scale, number)
    return divergence(dense, ours, free_blocks(positions, number, config))


def what_it_attends(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Query, key and value, detached, and scale of an NSA layer's call, which a hook is given."""
    query, key, value = (x.detach() for x in args[1:4])
    scale = kwargs.get("scale") or query.shape[-1] ** -0.5
    return query.to(value.dtype), key.to(value.dtype), value, scale


def check_rows(rows: Any) -> None:
    """Raise ValueError if rows hold several documents, or padding."""
    if rows is not None and (rows.queries is not None or rows.keys is not None):
        raise ValueError(
            "rows of several documents or with padding cannot be aligned with dense attention: "
            'set data.documents to "joined"'
        )


@contextlib.contextmanager
def base_frozen(model: nn.Module) -> Iterator[None]:
    """Within, gradients are of NSA's parameters alone."""
    layers = [module for module in model.modules() if isinstance(module, NSALayer)]
    own = {id(parameter) for layer in layers for parameter in layer.parameters()}
    base = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    for parameter in base:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in base:
            parameter.requires_grad_(True)


@torch.no_grad()
def recalls(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Layer, block_recall and score_recall of each NSA layer on one row (1, S) of text.

    Dense attention is that over the layer's own queries and keys, at `QUERIES` queries evenly
    spread. block_recall is None where every block is selected. Computed eagerly: the hooks would
    have compiled layers compiled once more.
    """
    found: list[dict[str, Any]] = []

    def measure(name: str) -> Callable[..., None]:
        def hook(layer: NSALayer, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            query, key, _, scale = what_it_attends(args, kwargs)
            config, tokens = layer.config, key.shape[2]
            positions = spread_queries(tokens, key.device)
            query = query[:, :, positions]
            dense = dense_block_mass(query, key, positions, config, scale)
            scores = compressed_block_mass(
                query, layer.compress_key(key), positions, config, scale, dense.shape[-1]
            )
            selected = best_blocks(scores, positions[None], None, config)
            free = free_blocks(positions, dense.shape[-1], config)
            recall = recall_of(dense, selected, free, config)
            blocks, scores = torch.stack(recall).tolist()
            found.append(
                {
                    "layer": name,
                    "block_recall": None if blocks != blocks else round(blocks, 5),
                    "score_recall": round(scores, 5),
                }
            )

        return hook

    handles = [
        layer.register_forward_hook(measure(name), with_kwargs=True)
        for name, layer in nsa_layers(model).items()
    ]
    training = model.training
    try:
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda),
        ):
            model.eval()(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return found
