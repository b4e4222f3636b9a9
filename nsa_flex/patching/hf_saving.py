"""What transformers writes of a patched model.

Whatever saves a model of transformers (the model, a trainer, an accelerator, a call of the class)
goes through `PreTrainedModel.save_pretrained`, and its config through `to_json_file`. Importing
this module extends these two, once and for all models, since a patched decoder may come to lie in
a model that `patch` never saw: a reward model made around it, for example. A model saves a record
of the NSA layers that it has then, and a config with such a record is written as no reader can
take for a dense model's.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from nsa_flex.patching.formats import upstream_tensors
from nsa_flex.patching.hf_cache import num_layers
from nsa_flex.patching.hf_config import former_implementation, with_nested
from nsa_flex.patching.hf_edited import number_of_layer
from nsa_flex.patching.hf_layers import Decoder, holders_of
from nsa_flex.patching.hf_saved_config import to_saved
from nsa_flex.patching.layer import NSALayer, layer_of
from nsa_flex.patching.sites import Site, patched_sites

_OF_FORMATS = ("format", "kept")  # of the record of a model that others trained
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
# In the place of a hub name, which it cannot be: what asks the hub for it shows this text.
_UNSAVED = "nsa_flex.patch({former}), in memory only: save_pretrained it, then nsa_flex.load"


def install(model: nn.Module, decoders: set[Decoder]) -> None:
    """Let no transformers model in `model` name the checkpoint that it was made from any more.

    That is of another model. Trainers take a reference model or a tokenizer, and PEFT the base of
    an adapter, from there.
    """
    holders = holders_of(model, decoders, "save_pretrained")
    for holder in holders:
        holder.nsa_former_names = (holder.name_or_path, holder.config.name_or_path)
    for holder in holders:
        former, _ = holder.nsa_former_names
        _name(holder, _UNSAVED.format(former=former), _UNSAVED.format(former=former))


def remove(model: nn.Module, decoders: set[Decoder]) -> None:
    """Undo `install`."""
    for holder in holders_of(model, decoders, "save_pretrained"):
        if hasattr(holder, "nsa_former_names"):
            _name(holder, *holder.nsa_former_names)
            del holder.nsa_former_names


def name_checkpoint(model: nn.Module, path: Any) -> None:
    """Say that the patched `model` is the one saved at `path`."""
    for holder in model.modules():
        if hasattr(holder, "nsa_former_names"):
            _name(holder, str(path), str(path))


def _name(holder: Any, name: str, config_name: str) -> None:
    holder.name_or_path = name
    holder.config.name_or_path = config_name


def record_of(model: Any) -> dict[str, Any] | None:
    """What a checkpoint must say of the NSA layers that `model` has now; None if it has none.

    Raises:
        ValueError: no such record can describe them, or the model that its config describes has
            other layers.
    """
    sites = list(patched_sites(model))
    if not sites:
        return None
    owners = {model if site.decoder is None else site.decoder for site in sites}
    if len(owners) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(owners)} patched decoders, and a checkpoint "
            "records the NSA layers of one: save each by itself"
        )
    (owner,) = owners
    names = {module: _plain_name(name) for name, module in owner.named_modules()}
    layers = [names[site.module] for site in sites]
    record = {**_settings(sites), "layers": layers, **_of_unpatched(owner)}
    _check_layers(model, owner, layers)
    return record


def _plain_name(name: str) -> str:
    """The name as tensors are saved by: wrappers of FSDP and of checkpointing are left out."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _settings(sites: list[Site]) -> dict[str, Any]:
    """What `patch` was told of the layers; ValueError if not the same of all."""
    first = sites[0]
    settings = _settings_of(layer_of(first.module))
    for site in sites:
        if _settings_of(layer_of(site.module)) != settings:
            raise ValueError(
                f"{site.name} was patched otherwise than {first.name} (config, init or backend), "
                "and a checkpoint records one patch for all layers: unpatch and patch the model "
                "as a whole, or torch.save its state dict"
            )
    return settings


def _settings_of(layer: NSALayer | None) -> dict[str, Any]:
    assert layer is not None
    return {"config": layer.config.to_dict(), "init": layer.init, "backend": layer.backend}


def _of_unpatched(owner: Any) -> dict[str, Any]:
    """What `patch` wrote of the unpatched layers; of a model that it never saw what they run."""
    record = vars(owner.config).get("nsa_flex", {})
    return {
        "attn_implementation": record.get(
            "attn_implementation", former_implementation(owner.config)
        ),
        "kept_masks": record.get("kept_masks", []),
        **{name: record[name] for name in _OF_FORMATS if name in record},
    }


def _check_layers(model: Any, owner: Any, layers: list[str]) -> None:
    """That a model built from the config has these layers, and none that was dropped."""
    number = num_layers(model.config.get_text_config())
    former = vars(owner.config).get("nsa_flex", {}).get("layers", [])
    there = {_plain_name(name) for name, _ in owner.named_modules()}
    dropped = [name for name in former if name not in there and number_of_layer(name) < number]
    added = [name for name in layers if number_of_layer(name) >= number]
    for names, what in ((added, "has"), (dropped, "has no")):
        if names:
            raise ValueError(
                f"{type(model).__name__} {what} {', '.join(names)}, and its config says "
                f"num_hidden_layers={number}: layers were added or dropped after patch; set "
                "num_hidden_layers (and what else the config says of each layer) to what is there"
            )


def _check_writable(model: Any) -> None:
    """ValueError for torchao's tensors that transformers did not make: it cannot write them."""
    if getattr(model, "hf_quantizer", None) is not None:
        return
    for name, parameter in model.named_parameters():
        if type(parameter.data).__module__.startswith("torchao"):
            raise ValueError(
                f"{name} was quantized in memory by torchao, and save_pretrained writes only what "
                "was quantized on loading: save the model before, and call nsa_flex.load(path, "
                "quantization_config=transformers.TorchAoConfig(...)), or torch.save the state "
                "dict"
            )


@contextlib.contextmanager
def _recorded(model: Any, record: dict[str, Any] | None) -> Iterator[None]:
    """Have the config of `model` say so much of its NSA layers and no more.

    The config may be one that `patch` never saw, or that of a patched model which a dense one was
    made from: then for as long as it is written.
    """
    former = [
        (config, vars(config)["nsa_flex"])
        for config in with_nested(model.config)
        if "nsa_flex" in vars(config)
    ]
    text = model.config if record is None else model.config.get_text_config()
    stays = any(config is text for config, _ in former) and record is not None
    for config, _ in former:
        del config.nsa_flex
    if record is not None:
        text.nsa_flex = record
    try:
        yield
    finally:
        if record is not None and not stays:
            del text.nsa_flex
        for config, what in former:
            if record is None or config is not text:
                config.nsa_flex = what
            else:
                text.nsa_flex = record | {name: what[name] for name in _OF_FORMATS if name in what}


def _in_format(
    record: dict[str, Any], wanted: str | None, arguments: dict[str, Any]
) -> dict[str, Any]:
    """The record of a checkpoint in the format `wanted`; if None, in that which the model came in.

    Raises:
        ValueError: the model came in another, or the call saves in pieces, under names in memory.
    """
    own = record.get("format", "nsa_flex")
    wanted = own if wanted is None else wanted
    if wanted not in ("nsa_flex", own):
        raise ValueError(f"checkpoint_format is {wanted!r}; this model has nsa_flex or {own}")
    if wanted == "nsa_flex":
        return {name: value for name, value in record.items() if name not in _OF_FORMATS}
    if arguments.get("distributed_checkpoint"):
        raise ValueError(
            f"a distributed checkpoint has the names in memory, not those of {own}: pass "
            "checkpoint_format='nsa_flex'"
        )
    return record


def _extend_models() -> None:
    save = PreTrainedModel.save_pretrained

    @functools.wraps(save)
    def save_pretrained(
        self: Any, *args: Any, checkpoint_format: str | None = None, **kwargs: Any
    ) -> Any:
        record = record_of(self)
        if record is not None:
            _check_writable(self)
            record = _in_format(record, checkpoint_format, kwargs)
        elif checkpoint_format is not None:
            raise ValueError(
                f"checkpoint_format={checkpoint_format!r} is of patched models; "
                f"{type(self).__name__} is not patched: leave it out"
            )
        is_adapter = getattr(self, "_hf_peft_config_loaded", False)
        if record is not None and "format" in record and not is_adapter:
            tensors = kwargs.pop("state_dict", None) or self.state_dict()
            kwargs["state_dict"] = upstream_tensors(record, tensors)
        with _recorded(self, record):
            return save(self, *args, **kwargs)

    PreTrainedModel.save_pretrained = save_pretrained


def _extend_configs() -> None:
    write = PreTrainedConfig.to_json_file

    @functools.wraps(write)
    def to_json_file(self: Any, json_file_path: Any, *args: Any, **kwargs: Any) -> None:
        write(self, json_file_path, *args, **kwargs)
        if any("nsa_flex" in vars(config) for config in with_nested(self)):
            path = Path(json_file_path)
            saved = to_saved(json.loads(path.read_text()))
            path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")

    PreTrainedConfig.to_json_file = to_json_file


_extend_models()
_extend_configs()
