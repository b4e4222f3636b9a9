"""The model of a config: built, patched, and prepared for the engine."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.patching import load, patch
from nsa_flex.patching.checkpoint import patch_as_recorded
from nsa_flex.patching.hf_saved_config import from_saved
from nsa_flex.patching.minicpm_config import is_own
from nsa_flex.patching.sites import Filter, choose_sites, patched_sites
from nsa_flex.training.config import DataSection, EngineSection, ModelSection
from nsa_flex.training.config_reading import unknown_key
from nsa_flex.training.errors import blamed_on
from nsa_flex.training.shards import reserve, without_values
from nsa_flex.training.tokenization import Tokenizer

# Arguments of transformers' LlamaConfig. The vocabulary is the tokenizer's unless it is here.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
    "125m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "350m": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    # Four of the 32 layers of Llama-3.1-8B, for speed.
    "llama-8b-layers": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32000,
        "rope_theta": 500000.0,
    },
}


Values = Literal["all", "buffers", "none"]


def build_model(
    section: ModelSection,
    data: DataSection,
    tokenizer: Tokenizer,
    *,
    values: Values = "all",
) -> Any:
    """The model in training mode, float32, patched unless it is the dense twin.

    Args:
        values: "none" leaves everything on the meta device; "buffers" computes buffers and leaves
            the rest unwritten on the CPU. Of a checkpoint both read the config alone.

    Raises:
        ValueError: the preset, the model type or the checkpoint is unknown, its vocabulary is
            smaller than the tokenizer's, or it has learnt fewer positions than a row has.
    """
    if values == "all" and section.checkpoint is not None:
        model = _from_checkpoint(section)
        _check_vocabulary(model.get_input_embeddings().num_embeddings, tokenizer)
        patch_layers(model, section)
    else:
        model = _from_config(section, data, tokenizer, values)
    _check_positions(model, data.seq_len)
    if values == "buffers":
        reserve(model)
    # Else a recomputed layer finds its own keys; a decoder within a model has a config of its own.
    model.config.use_cache = model.config.get_text_config().use_cache = False
    return model.train()


_PLACES: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    "all": partial(torch.device, "cpu"),
    "buffers": without_values,
    "none": partial(torch.device, "meta"),
}


def _from_config(
    section: ModelSection, data: DataSection, tokenizer: Tokenizer, values: Values
) -> Any:
    """A fresh model; patched as a patched checkpoint says, else as the section does."""
    config = _config(section, data, tokenizer)
    _check_vocabulary(config.get_text_config().vocab_size, tokenizer)  # before it takes memory
    record = vars(config.get_text_config()).pop("nsa_flex", None)
    _check_dense(section, patched=record is not None)
    with blamed_on("the model"), _PLACES[values]():
        model = _transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()  # undone where parameters went to the meta device one by one
    if record is None:
        patch_layers(model, section)
    else:
        patch_as_recorded(model, record, _backend_of_patched(section))
        _check_patched(model, section)
    return model


def patch_layers(model: Any, section: ModelSection) -> None:
    """The layers that a section gives NSA; a patched model must fit it."""
    if _is_patched(model):
        _check_patched(model, section)
    elif section.attention == "nsa":
        chosen = None
        if section.dense_layers:
            chosen = _without(model, section.dense_layers)
            if is_own(model.config):  # InfLLM-V2 cannot run beside NSA
                model.set_attn_implementation("sdpa")
        patch(model, section.nsa, init=section.init, filter_fn=chosen, backend=section.backend)


def _check_patched(model: Any, section: ModelSection) -> None:
    """Of a patched checkpoint: ValueError for other sizes than it has; for a layer that runs NSA.

    Sizes that are `NSAConfig`'s defaults count as not given.
    """
    record = model.config.get_text_config().nsa_flex
    own, default = NSAConfig.from_dict(record["config"]).to_dict(), NSAConfig().to_dict()
    for name, value in section.nsa.to_dict().items():
        if value not in (default[name], own[name]):
            raise ValueError(
                f"model.nsa.{name} is {value}, and {section.checkpoint} was patched with "
                f"{own[name]}: a patched checkpoint keeps its sizes; set model.nsa={{}}, or "
                "start from a dense one"
            )
    _check_numbers(model, section.dense_layers)
    numbers = {site.module.layer_idx for site in patched_sites(model)}
    for number in section.dense_layers:
        if number in numbers:
            raise ValueError(
                f"model.dense_layers has {number}, a layer that {section.checkpoint} was patched "
                "in: a patched checkpoint keeps its layers"
            )


def _without(model: Any, dense_layers: Collection[int]) -> Filter:
    """What `patch` chooses by itself, but for these layers."""
    _check_numbers(model, dense_layers)
    sites = choose_sites(model, None)
    chosen = {site.module for site in sites if site.module.layer_idx not in dense_layers}
    if not chosen:
        raise ValueError("model.dense_layers leaves no layer to NSA; set model.attention dense")
    return lambda module, name: module in chosen


def _check_numbers(model: Any, dense_layers: Collection[int]) -> None:
    last = model.config.get_text_config().num_hidden_layers - 1
    for number in dense_layers:
        if not 0 <= number <= last:
            raise ValueError(
                f"model.dense_layers has {number}; the model's layers are 0 to {last}"
            )


def _check_vocabulary(size: int, tokenizer: Tokenizer) -> None:
    if size < tokenizer.vocab_size:
        raise ValueError(
            f"the model's vocabulary has {size} ids, the tokenizer {tokenizer.vocab_size}: set "
            "vocab_size in model.config, or take the model's own tokenizer"
        )


def _check_positions(model: Any, seq_len: int) -> None:
    """ValueError for rows longer than a table of learnt positions; rotary ones have no end."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", seq_len)
    tables = ("wpe", "embed_positions")  # of GPT-2 and OPT
    found = (getattr(model.get_decoder(), name, None) for name in tables)
    if seq_len > most and any(isinstance(table, nn.Embedding) for table in found):
        raise ValueError(
            f"rows have {seq_len} tokens, and the model has learnt {most} positions: shorten "
            "data.seq_len"
        )


def _check_dense(section: ModelSection, *, patched: bool) -> None:
    if patched and section.attention == "dense":
        raise ValueError(
            f"{section.checkpoint} is a patched checkpoint: attention cannot be dense"
        )


def _from_checkpoint(section: ModelSection) -> Any:
    path = str(section.checkpoint)
    file = Path(path) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"model.checkpoint: {file} does not exist; expected what save_pretrained wrote"
        )
    with blamed_on(f"model.checkpoint: {file} cannot be read"):
        saved = "nsa_flex" in from_saved(json.loads(file.read_text()))
    _check_dense(section, patched=saved)
    with blamed_on(f"model.checkpoint: {path} cannot be loaded"):
        if saved:
            return load(path, backend=_backend_of_patched(section), dtype=torch.float32)
        return _transformers().AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _backend_of_patched(section: ModelSection) -> Backend | None:
    """None for the one that it was saved with."""
    return None if section.backend == "auto" else section.backend


def _config(section: ModelSection, data: DataSection, tokenizer: Tokenizer) -> Any:
    transformers = _transformers()
    if section.checkpoint is not None:
        with blamed_on(f"model.checkpoint: {section.checkpoint} cannot be loaded"):
            config = transformers.AutoConfig.from_pretrained(section.checkpoint)
        return getattr(config, "base", config)
    if section.preset is not None and section.preset not in PRESETS:
        raise ValueError(f"model.preset is {section.preset}; expected one of {', '.join(PRESETS)}")
    preset = {"model_type": "llama", **PRESETS[section.preset]} if section.preset else {}
    values = {
        "vocab_size": tokenizer.vocab_size,
        "max_position_embeddings": data.seq_len,
        "bos_token_id": None,
        "eos_token_id": tokenizer.end,
        "pad_token_id": None,
        **preset,
        **(section.config or {}),
    }
    with blamed_on("model.config"):
        config = transformers.AutoConfig.for_model(values.pop("model_type", "unnamed"), **values)
    _check_keys(config, section.config or {}, "model.config")
    return config


def _check_keys(config: Any, given: Mapping[str, Any], where: str) -> None:
    """Raise ValueError for a key of `given` that the class of `config` does not know.

    transformers keeps what it does not know as an attribute; what it translates it takes away.
    """
    known = {"model_type", *vars(type(config)()), *config.attribute_map}
    for key, value in given.items():
        if key in vars(config) and key not in known and not _is_read(config, key):
            raise ValueError(unknown_key(f"{where}.{key}", key, _public(known)))
        part = getattr(config, key, None)
        if isinstance(value, Mapping) and key in config.sub_configs:
            _check_keys(part, value, f"{where}.{key}")


def _is_read(config: Any, key: str) -> bool:
    """Whether attention reads `key` though the config class lacks it: head_dim of Qwen3-MoE."""
    model_class = _transformers().MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if model_class is None or config.sub_configs:
        return False
    own = vars(sys.modules[model_class.__module__]).items()
    return any(
        f'getattr(config, "{key}"' in inspect.getsource(each)
        for name, each in own
        if name.endswith("Attention") and each.__module__ == model_class.__module__
    )


def _public(names: set[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("_"))


def _is_patched(model: Any) -> bool:
    return getattr(model.config.get_text_config(), "nsa_flex", None) is not None


def decoder_layers(model: Any) -> nn.ModuleList:
    """The decoder layers of a transformers model.

    Raises:
        ValueError: it has none by the usual names.
    """
    for name in ("layers", "h"):  # of GPT-2 and Falcon
        layers = getattr(model.get_decoder(), name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    raise ValueError(
        f"{type(model).__name__} has no list of decoder layers by the name layers or h"
    )


def prepare(model: Any, engine: EngineSection, *, compiler: str = "inductor") -> None:
    """Checkpointing and compilation of each layer and of the loss, in place; before wrapping.

    The checkpoint lies within what is compiled, so that the compiler sees which results to keep.
    """
    if engine.checkpointing != "none":
        arguments: dict[str, Any] = {"use_reentrant": False}
        if engine.checkpointing == "selective":
            arguments["context_fn"] = selective_contexts()
        for layer in decoder_layers(model):
            layer.forward = _recomputed(layer.forward, arguments)
    if engine.compile:
        for layer in decoder_layers(model):
            layer.compile(dynamic=False, backend=compiler)
        model.loss_function = torch.compile(causal_loss, dynamic=False, backend=compiler)


def _recomputed(forward: Callable[..., Any], arguments: dict[str, Any]) -> Callable[..., Any]:
    """`forward` under a checkpoint; a function, since Dynamo starts no graph in torch's files."""

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **arguments, **kwargs)

    return checkpointed


def selective_contexts() -> Callable[[], Any]:
    """Contexts of selective checkpointing: matrix products and attention are kept.

    Recomputed are norms, activations, rotary embeddings and gates: cheap, and most of the memory.
    """
    aten = torch.ops.aten
    kept = {aten.mm.default, aten.addmm.default, aten.bmm.default}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = operator in kept or operator.namespace == "nsa_flex"
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(create_selective_checkpoint_contexts, policy)


def causal_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Cross entropy of the next token in float32: logits (B, S, V), labels (B, S) -> ().

    The sum over `num_items_in_batch` labels, their mean if None; -100 does not count, and of no
    label at all the loss is 0. With `shift_labels` (B, S) each token's next one is known, and
    labels have no say.
    """
    labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    if shift_labels is not None:
        labels = shift_labels
    loss = nn.functional.cross_entropy(
        logits.reshape(-1, vocab_size).float(), labels.reshape(-1), reduction="sum"
    )
    count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
    return loss / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "training runs need transformers, which is not installed; install it with: "
            "pip install 'nsa-flex[hf,train]'",
            name="transformers",
        ) from error
    return transformers
