"""What a config asks of the machine, without training: parameters, memory, tokens, graphs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from nsa_flex.training.arguments import (
    check_device,
    check_optimization,
    is_bf16,
    is_sharded,
    optimizer_name,
    tokens_per_step,
    world_size,
)
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.flops import flops_per_token, num_parameters
from nsa_flex.training.mesh import check_mesh
from nsa_flex.training.models import build_model, decoder_layers
from nsa_flex.training.reporting import check_reporters
from nsa_flex.training.telemetry.observe import nsa_layers
from nsa_flex.training.texts import find_texts


def dry_run(config: TrainConfig) -> dict[str, Any]:
    """Plain JSON types; the model is built on the meta device, files are looked for, not read.

    Raises:
        ValueError, ModuleNotFoundError: as `nsa_flex.training.run.train` does.
    """
    check_optimization(config)
    check_reporters(config)
    texts = find_texts(config)
    check_device(config)
    check_mesh(config)
    model = build_model(config.model, config.data, texts.tokenizer, values="none")
    layers = decoder_layers(model)
    step = tokens_per_step(config)
    flops = flops_per_token(model, config.data.seq_len)
    added = sum(num_parameters(layer) for layer in nsa_layers(model).values())
    return {
        "model": type(model).__name__,
        "parameters": num_parameters(model),
        "parameters_of_nsa": added,
        "files": len(texts.source.files),
        "file_bytes": sum(path.stat().st_size for path in texts.source.files),
        "ranks": world_size(),
        "context_parallel": config.engine.context_parallel,
        "steps": config.training.steps,
        "tokens_per_step": step,
        "tokens": step * config.training.steps,
        "flops_per_token": flops,
        "flops": flops * step * config.training.steps,
        "memory_bytes": memory(config, model),
        "compiled": _compiled(config, layers),
    }


def memory(config: TrainConfig, model: Any) -> dict[str, int]:
    """Bytes on each device: weights, gradients and AdamW's moments exactly, the rest about.

    Of other optimizers, too, the moments are about.

    Activations are those of a Llama: a layer keeps about 10 tensors of the hidden size and 3 of
    the MLP's; under full checkpointing its input alone, under selective checkpointing its matrix
    products. Logits are kept in the precision of the matrix products and in float32.
    """
    sizes = model.config.get_text_config()
    weights = 4 * num_parameters(model) // (world_size() if is_sharded(config) else 1)
    tokens = config.training.batch_size * config.data.seq_len // config.engine.context_parallel
    item = 2 if is_bf16(config) else 4
    hidden = sizes.hidden_size
    wide = next((x for x in (getattr(sizes, name, None) for name in _WIDTHS) if x), 4 * hidden)
    kept = {
        "none": 10 * hidden + 3 * wide,
        "selective": 6 * hidden + 2 * wide,
        "full": hidden,
    }[config.engine.checkpointing]
    parts = {
        "weights": weights,
        "gradients": weights,
        "optimizer": int(_moments(optimizer_name(config)) * weights),
        "average": weights if config.training.ema else 0,
        "activations": tokens * kept * item * sizes.num_hidden_layers,
        "logits": tokens * sizes.vocab_size * (item + 4),
    }
    return {**parts, "total": sum(parts.values())}


# Of the MLP, by Llama, by OPT, by Falcon, by GPT-2.
_WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def _moments(optimizer: str) -> float:
    """What an optimizer keeps, in float32 numbers a weight."""
    part = next((x for name, x in _PARTS.items() if name in optimizer), 1.0)
    return part * next((x for name, x in _MOMENTS.items() if name in optimizer), 2)


_PARTS = {"8bit": 0.25, "4bit": 0.125}
_MOMENTS = {"adafactor": 0, "adagrad": 1, "rmsprop": 1, "sgd": 0, "lion": 1, "muon": 1}


def _compiled(config: TrainConfig, layers: nn.ModuleList) -> list[str]:
    if not config.engine.compile:
        return []
    kinds = Counter(bool(nsa_layers(layer)) for layer in layers)
    graphs = "one graph for all"
    if len(kinds) > 1:
        graphs = f"one graph for the {kinds[True]} of NSA, one for the {kinds[False]} dense"
    how = "" if config.engine.checkpointing == "none" else ", recomputed in the backward pass"
    return [f"{len(layers)} layers {type(layers[0]).__name__}, {graphs}{how}", "the loss"]
