"""Patched layers that were added, copied, moved or dropped after `patch`."""

from __future__ import annotations

import re
from typing import Any

from nsa_flex.patching.hf_cache import num_layers
from nsa_flex.patching.hf_config import share_config
from nsa_flex.patching.hf_layers import Attention, Decoder
from nsa_flex.patching.layer import layer_of


class PatchedLayers:
    """The patched attention modules that a decoder has at a call.

    Attributes:
        modules: in order.
        is_edited: whether they are others than `patch` saw.
    """

    def __init__(self, decoder: Decoder, modules: tuple[Attention, ...]) -> None:
        self.modules = modules
        self.is_edited = False
        self._locate(decoder)

    def _locate(self, decoder: Decoder) -> None:
        """Note what `look` compares: what holds the modules, and what is above that."""
        patched = set(self.modules)
        found = {name: each for name, each in decoder.named_modules() if each in patched}
        self._held = list(found.values())
        self._runs_as = [number_of_layer(name) for name in found]
        self._holders, above = [], {}
        for path in found:
            *owners, name = path.split(".")
            owner: Any = decoder
            for each in owners:
                above[owner] = tuple(owner._modules.values())
                owner = owner._modules[each]
            self._holders.append((owner._modules, name))
        self._above = list(above.items())

    def look(self, decoder: Decoder) -> None:
        """Take notice of an edit: a few microseconds where there is none.

        Raises:
            ValueError: no patched module is left, or one has another NSAConfig.
        """
        same = [held.get(name) for held, name in self._holders] == self._held
        if same and all(tuple(each._modules.values()) == held for each, held in self._above):
            return
        found = tuple(module for module in decoder.modules() if layer_of(module) is not None)
        if found != self.modules:
            self._take(decoder, found)
        self._locate(decoder)

    def _take(self, decoder: Decoder, found: tuple[Attention, ...]) -> None:
        name = type(decoder).__name__
        if not found:
            raise ValueError(
                f"none of the attention modules of {name} is patched: its layers were exchanged "
                "after patch; call nsa_flex.unpatch(model), then nsa_flex.patch(model)"
            )
        config = self.modules[0].nsa.config
        for module in found:
            if module.nsa.config != config:
                raise ValueError(
                    f"the layers of {name} differ in their NSAConfig: one was moved here from "
                    "another patched model; patch both models with the same config"
                )
        share_config(decoder)
        self.modules, self.is_edited = found, True
        decoder.nsa_installed.num_layers = num_layers(decoder.config)

    def check_places(self, num_layers: int) -> None:
        """That each module has a layer of the cache to itself.

        Args:
            num_layers: how many layers the decoder runs.

        Raises:
            ValueError: two have the same `layer_idx`, or one that runs counts on.
        """
        if not self.is_edited:
            return
        places = [module.layer_idx for module in self.modules]
        running = zip(places, self._runs_as, strict=True)
        fits = all(place < num_layers for place, layer in running if layer < num_layers)
        if fits and len(set(places)) == len(places):
            return
        raise ValueError(
            f"the attention modules have layer_idx {places}, by which they find their layer of "
            f"the cache, and config.num_hidden_layers={num_layers}: layers were added, moved or "
            "dropped after patch; give each its place as layer_idx, set "
            "config.num_hidden_layers, or pass use_cache=False"
        )


def number_of_layer(name: str) -> int:
    """Which layer of its decoder a module is in, by its name; -1 if in none."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return -1 if number is None else int(number.group(1))
