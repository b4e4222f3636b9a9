"""`save_pretrained` of a patched transformers model."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from torch import nn
from transformers.utils import CONFIG_NAME

from nsa_flex.patching.hf_layers import Decoder, holders_of
from nsa_flex.patching.layer import layer_of
from nsa_flex.patching.saved_config import to_saved

# In the place of a hub name, which it cannot be: what asks the hub for it shows this text.
_UNSAVED = "nsa_flex.patch({former}), in memory only: save_pretrained it, then nsa_flex.load"


def install(model: nn.Module, decoders: set[Decoder]) -> None:
    """Let every transformers model in `model` that holds a patched decoder save as what it is.

    Nor does it name the checkpoint it was made from any more, which is that of another model.
    Trainers take a reference model or a tokenizer, and PEFT the base of an adapter, from there.
    """
    holders = holders_of(model, decoders, "save_pretrained")
    for holder in holders:
        holder.save_pretrained = functools.partial(_save_pretrained, holder)
        holder.nsa_former_names = (holder.name_or_path, holder.config.name_or_path)
    for holder in holders:
        former, _ = holder.nsa_former_names
        _name(holder, _UNSAVED.format(former=former), _UNSAVED.format(former=former))


def remove(model: nn.Module, decoders: set[Decoder]) -> None:
    """Undo `install`."""
    for holder in holders_of(model, decoders, "save_pretrained"):
        if hasattr(holder, "nsa_former_names"):
            _name(holder, *holder.nsa_former_names)
            del holder.nsa_former_names, holder.save_pretrained


def name_checkpoint(model: nn.Module, path: Any) -> None:
    """Say that the patched `model` is the one saved at `path`."""
    for holder in model.modules():
        if hasattr(holder, "nsa_former_names"):
            _name(holder, str(path), str(path))


def _name(holder: Any, name: str, config_name: str) -> None:
    holder.name_or_path = name
    holder.config.name_or_path = config_name


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
    """As the class's own, which writes what `_SavedConfig` makes of the config."""
    if all(layer_of(module) is None for module in model.modules()):
        return type(model).save_pretrained(model, *args, **kwargs)  # a part was unpatched alone
    _check_writable(model)
    config = model.config
    text = config.get_text_config()
    # Whoever gave the model another config than its decoder's: the record is of the decoder.
    lacks_record = "nsa_flex" not in vars(text)
    if lacks_record:
        text.nsa_flex = _record_of(model)
    model.config = _SavedConfig(config)
    try:
        return type(model).save_pretrained(model, *args, **kwargs)
    finally:
        model.config = config
        if lacks_record:
            del text.nsa_flex


def _record_of(model: nn.Module) -> dict[str, Any]:
    """What `patch` wrote to the config of the decoder in `model`."""
    decoders: list[Decoder] = [each for each in model.modules() if hasattr(each, "nsa_installed")]
    records = [decoder.config.nsa_flex for decoder in decoders]
    if len(records) != 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(records)} patched decoders, and its config is "
            "of none of them: save each by itself"
        )
    return records[0]


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


class _SavedConfig:
    """A config in all but the file that it writes."""

    def __init__(self, config: Any) -> None:
        vars(self)["_config"] = config

    @property  # type: ignore[misc]  # PEFT makes another config of that class
    def __class__(self) -> Any:
        return type(vars(self)["_config"])

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_config"], name, value)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Write config.json, of a model type of its own."""
        vars(self)["_config"].save_pretrained(save_directory, **kwargs)
        path = Path(save_directory) / CONFIG_NAME
        saved = to_saved(json.loads(path.read_text()))
        path.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n")
