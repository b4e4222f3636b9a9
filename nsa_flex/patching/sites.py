"""Which modules of a model are attention layers that `patch` can change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from nsa_flex.installed import warn_if_untested
from nsa_flex.patching.adapters import Adapter, find_adapter, has_own_forward, is_installed
from nsa_flex.patching.hf_families import declined, feature_of_layer_type, local_attention
from nsa_flex.patching.layer import AttentionShape, layer_of

Filter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Site:
    """An attention module of a model.

    Args:
        name: its name in the model.
        module: the module.
        adapter: what runs it; None for transformers' attention interface.
        decoder: the transformers model that holds it; None where an adapter runs it.
    """

    name: str
    module: Any
    adapter: Adapter[Any] | None = None
    decoder: Any = None

    def local_attention(self) -> str | None:
        """What limits this layer's context, or None. Adapters speak for their modules."""
        return None if self.adapter else local_attention(self.module)

    def refusal(self) -> str:
        """Why a layer whose context is limited, or chosen otherwise, is not patched."""
        feature = feature_of_layer_type(self.module)
        if feature is not None:
            model, why = self.module.config.model_type, declined(self.module.config)
            known = "" if why is None else f" of {model}, {why};"
            return (
                f"{self.name} has {feature}, which NSA does not compute:{known} leave such layers "
                "out with filter_fn"
            )
        return (
            f"{self.name} sees a limited context ({self.local_attention()}), which NSA would "
            "widen: leave such layers out with filter_fn or, if they are meant to see "
            "everything, set sliding_window=None in the config before the model is built"
        )

    def shape(self) -> AttentionShape:
        """Sizes of the layer; ValueError if NSA cannot stand in for its attention."""
        if hasattr(self.module, "nsa"):
            raise ValueError(f"{self.name} has an attribute nsa already, which patch would hide")
        if self.adapter is None:
            return _transformers_layers().attention_shape(self.module, self.decoder)
        if has_own_forward(self.module):
            raise ValueError(
                f"{self.name} has a forward of its own on the instance, which the adapter would "
                "hide: patch the model before other tools wrap it"
            )
        return self.adapter.shape(self.module)

    def tensor_options(self) -> dict[str, Any]:
        """Device and dtype of the projections, for the new parameters."""
        for parameter in self.module.parameters():
            if parameter.is_floating_point():
                return {"device": parameter.device, "dtype": parameter.dtype}
        return {"dtype": torch.get_default_dtype()}


def _transformers_layers() -> ModuleType:
    """What knows transformers' attention; imported only where there may be some."""
    warn_if_untested("transformers")  # first: all that fails from here on may come of the version
    from nsa_flex.patching import hf_layers

    return hf_layers


def find_sites(model: nn.Module) -> Iterator[Site]:
    """Every attention module in `model`, patched or not."""
    for name, module in model.named_modules():
        adapter = find_adapter(module)
        if adapter is not None:
            yield Site(name, module, adapter)
        elif "transformers" in sys.modules and _transformers_layers().is_attention(module):
            yield Site(name, module, decoder=_transformers_layers().decoder_of(model, name))


def choose_sites(model: nn.Module, filter_fn: Filter | None) -> list[Site]:
    """The attention modules to patch: those `filter_fn` names, or all with unlimited context.

    Raises:
        ValueError: there is none, or `filter_fn` names one with a limited context.
    """
    sites = list(find_sites(model))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no attention module that patch knows; tell it how to "
            "run yours with nsa_flex.register_adapter"
        )
    if filter_fn is None:
        chosen = [site for site in sites if site.local_attention() is None]
        refused = [] if chosen else sites
    else:
        chosen = [site for site in sites if filter_fn(site.module, site.name)]
        refused = [site for site in chosen if site.local_attention() is not None]
    for site in refused:
        raise ValueError(site.refusal())
    if not chosen:
        names = ", ".join(site.name for site in sites)
        raise ValueError(f"filter_fn chose none of the attention modules: {names}")
    return chosen


def patched_sites(model: nn.Module) -> Iterator[Site]:
    """The patched attention modules, those that run through an adapter without a decoder."""
    for name, module in model.named_modules():
        if layer_of(module) is not None:
            by_adapter = is_installed(module)
            decoder = None if by_adapter else _transformers_layers().decoder_of(model, name)
            yield Site(name, module, decoder=decoder)
