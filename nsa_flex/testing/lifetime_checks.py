"""Checks of training, saving, undoing, and of what a patched model shares with others."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import torch
from torch import nn

from nsa_flex.patching import NSALayer, load, patch, unpatch
from nsa_flex.testing.subject import (
    Subject,
    WrongNumbers,
    device_of,
    expect_equal,
    logits,
    logits_of,
    twin_of,
)


def gradients(model: Any, subject: Subject) -> None:
    """In training, every parameter that patch added gets a gradient, finite and not zero.

    Where nothing was patched, all of the decoder, but those of an indexer: it selects, and no
    gradient goes through a selection.
    """
    ids = subject.ids(2, subject.length, device_of(model))
    added = {
        f"{place}.{name}": parameter
        for place, layer in model.named_modules()
        if isinstance(layer, NSALayer)
        for name, parameter in layer.named_parameters()
    } or {n: p for n, p in model.get_decoder().named_parameters() if ".indexer." not in n}
    with torch.enable_grad():
        values = logits_of(model.train()(ids))
        direction = torch.linspace(-9, 9, values.numel(), device=values.device).sin()
        loss = (values.double() * direction.view_as(values)).sum()
        # Not backward(): the parameters are another model's too, and keep their .grad.
        found = torch.autograd.grad(loss, list(added.values()), allow_unused=True)
    for name, gradient in zip(added, found, strict=True):
        _expect_gradient(name, gradient)


def _expect_gradient(name: str, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        raise WrongNumbers(f"{name} got no gradient")
    if not gradient.isfinite().all():
        raise WrongNumbers(f"the gradient of {name} is not finite")
    if not gradient.any():
        raise WrongNumbers(f"the gradient of {name} is zero")


def twin(model: nn.Module, subject: Subject) -> None:
    """Another model on the same config object computes what it did before `model` was patched."""
    ids = subject.ids(2, subject.length, device_of(model))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    other = twin_of(model)
    calls: tuple[dict[str, Any], ...] = ({}, {"attention_mask": mask})
    before = [logits(other, ids, **call) for call in calls]
    patched = patch(twin_of(model), subject.config)
    try:
        _expect_bits(other, ids, calls, before, "the other model is patched")
    finally:
        unpatch(patched)
    _expect_bits(other, ids, calls, before, "the other model is unpatched")


def _expect_bits(model: nn.Module, ids: Any, calls: Any, before: Any, when: str) -> None:
    for call, expected in zip(calls, before, strict=True):
        if not torch.equal(logits(model, ids, **call), expected):
            raise WrongNumbers(f"logits change once {when}")


def undo(model: nn.Module, subject: Subject) -> None:
    """`unpatch` gives logits, state dict, attributes and configs back bit for bit."""
    ids = subject.ids(2, subject.length, device_of(model))
    expected, state = logits(model, ids), snapshot(model)
    other = twin_of(model, own_configs=True)
    unpatch(patch(other, subject.config))
    differ = differences(state, snapshot(other))
    if differ:
        raise WrongNumbers(f"unpatch leaves something behind: {differ}")
    if not torch.equal(logits(other, ids), expected):
        raise WrongNumbers("logits after unpatch are other bits")


def snapshot(model: nn.Module) -> dict[str, Any]:
    """What patch must leave as it was if it refuses, and unpatch must give back."""
    return {
        module_name or "the model": {
            "attributes": sorted(vars(module)),
            "hooks": [
                len(getattr(module, name)) for name in sorted(vars(module)) if "_hooks" in name
            ],
            "parameters": {n: id(p) for n, p in module._parameters.items()},
            "modules": list(module._modules),
            "config": _plain(getattr(module, "config", None)),
        }
        for module_name, module in model.named_modules()
    }


def _plain(config: Any) -> Any:
    if not hasattr(config, "to_dict"):
        return None
    return copy.deepcopy(config.to_dict()), getattr(config, "_attn_implementation", None)


def differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """The first modules and entries in which two snapshots differ; "" if none."""
    found = [
        f"{name}: {entry}"
        for name in one | other
        for entry in one.get(name, other.get(name, {}))
        if one.get(name, {}).get(entry) != other.get(name, {}).get(entry)
    ]
    return ", ".join(found[:4])


def save_and_load(model: Any, subject: Subject) -> None:
    """The logits of what `save_pretrained` wrote and `nsa_flex.load` read."""
    ids = subject.ids(2, subject.length, device_of(model))
    config = copy.deepcopy(vars(model.config))  # save_pretrained notes the class in it
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        vars(model.config).clear()
        vars(model.config).update(config)
        options = {"dtype": model.dtype, **_implementations(model.config)}
        is_patched = any(isinstance(module, NSALayer) for module in model.modules())
        if is_patched:
            loaded = load(folder, model_class=type(model), **options)
        else:
            options["attn_implementation"] = model.config._attn_implementation
            loaded = type(model).from_pretrained(folder, **options)
        loaded = loaded.to(ids.device).train(model.training)
    expect_equal(logits(loaded, ids), logits(model, ids), "logits of the loaded and saved model")


def _implementations(config: Any) -> dict[str, Any]:
    """Of attention and experts: a checkpoint does not record them."""
    options = {"experts_implementation": getattr(config, "_experts_implementation", None)}
    if config._attn_implementation in ("eager", "sdpa"):
        options["attn_implementation"] = config._attn_implementation
    return {name: value for name, value in options.items() if value is not None}
