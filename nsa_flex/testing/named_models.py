"""The model that `nsa-flex check` is told of: a family, a checkpoint, or a user's factory."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nsa_flex.testing.tiny_decoders import tiny_decoder


def model_named(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model to check, in `dtype`.

    Args:
        name: a checkpoint directory, `module:function` (the function makes the model), or a
            model type of transformers (a tiny random decoder).
        dtype: float64 rounds least: no two blocks score so alike that rounding chooses.

    Raises:
        ValueError: it is none of these; the message says why.
    """
    if Path(name).is_dir():
        return _read(name, dtype)
    if ":" in name:
        return _made_by_user(name).to(dtype)
    model = tiny_decoder(name).to(dtype)
    model.set_experts_implementation("eager")  # the grouped products take no float64
    return model


def _read(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager"
        )
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[0]}") from error


def _made_by_user(name: str) -> nn.Module:
    model = call_factory(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must return an nn.Module, got {type(model).__name__}")
    return model


def call_factory(name: str) -> Any:
    """What the user's `module:function` returns; modules of the working directory are found.

    Raises:
        ValueError: there is no such function, or it raised something.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error
    try:
        return factory()
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{name} could not be called: {type(error).__name__}: {error}") from error
