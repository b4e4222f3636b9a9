"""Configs of a patched transformers model, which are its own.

A config object may be shared: by another model, by the user's code, by a trainer that builds a
second model from it. `patch` therefore gives the modules of its model copies and changes those.
`unpatch` gives the original objects back, with what else was changed on the copies meanwhile
(`resize_token_embeddings` writes the vocabulary's size, for example).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from transformers import PreTrainedConfig

from nsa_flex.patching.hf_layers import IMPLEMENTATION, IMPLEMENTATIONS, Attention, Decoder

# Attributes that patch itself writes.
_WRITTEN = ("nsa_flex", "_attn_implementation_internal")

# A PreTrainedConfig, whose attributes type checkers do not know.
Config: TypeAlias = Any


@dataclass
class OwnConfig:
    """A config that modules of the patched model hold in the place of another.

    Args:
        own: the copy.
        original: what the modules held.
        before: attributes of the copy when it was made.
    """

    own: Config
    original: Config
    before: dict[str, Any]

    def carry_over(self) -> None:
        """Write to the original what changed on the copy since it was made."""
        now, original = vars(self.own), self.original.__dict__
        for name, value in now.items():
            if name not in _WRITTEN and not _is_config(value) and self._changed(name, value):
                setattr(self.original, name, copy.deepcopy(value))
        for name in self.before.keys() - now.keys():
            original.pop(name, None)

    def _changed(self, name: str, value: Any) -> bool:
        return name not in self.before or self.before[name] != value


@dataclass(frozen=True)
class KeptLayers:
    """The attention modules of a patched decoder that stay unpatched.

    Args:
        config: theirs alone.
        implementation: what they run beside NSA.
    """

    config: Config
    implementation: str

    def follow(self, implementation: str) -> None:
        """Run what the decoder makes masks for: its own implementation, while that is not NSA."""
        if implementation in IMPLEMENTATIONS:
            implementation = self.implementation
        if self.config._attn_implementation != implementation:
            self.config._attn_implementation_internal = implementation


@dataclass
class OwnConfigs:
    """The configs of one patched model.

    Args:
        configs: one for each config object that the model held, nested ones included.
        in_use: config of each decoder that is patched now; a decoder's may be another's too.
    """

    configs: list[OwnConfig]
    in_use: list[Config] = field(default_factory=list)

    def give_to(self, model: nn.Module) -> None:
        """Exchange the originals for the copies in all modules of `model`."""
        own = {id(each.original): each.own for each in self.configs}
        _exchange(model, own)

    def keep_apart(
        self, modules: list[Attention], config: Config, implementation: str
    ) -> Config | None:
        """Give attention modules that stay unpatched a config that names their implementation.

        Args:
            config: the decoder's, a copy already.

        Returns:
            that config; None if there are no such modules.
        """
        if not modules:
            return None
        kept = copy.copy(config)
        kept._attn_implementation_internal = implementation
        original = next(each.original for each in self.configs if each.own is config)
        self.configs.append(OwnConfig(kept, original, copy.deepcopy(vars(kept))))
        for module in modules:
            module.config = kept
        return kept

    def give_back(self, model: nn.Module) -> None:
        """The originals again, in all modules of `model`."""
        for each in self.configs:
            each.carry_over()
        _exchange(model, {id(each.own): each.original for each in self.configs})

    def release(self, config: Config) -> None:
        """A decoder with this config is patched no more: undo what `patch` wrote to the copy.

        A module outside the model that `unpatch` got, a wrapper for example, may hold it still.
        """
        position = next(i for i, used in enumerate(self.in_use) if used is config)
        del self.in_use[position]
        if any(used is config for used in self.in_use):
            return
        config._attn_implementation_internal = config.nsa_flex["attn_implementation"]
        del config.nsa_flex


def own_configs(model: nn.Module) -> OwnConfigs:
    """Copies of all configs that modules of `model` hold. Nothing is exchanged yet."""
    memo: dict[int, Any] = {}
    originals: dict[int, Config] = {}
    for _, _, config in _held(model):
        for each in with_nested(config):
            originals[id(each)] = each
    pairs = [(copy.deepcopy(config, memo), config) for config in originals.values()]
    return OwnConfigs(
        [OwnConfig(own, original, copy.deepcopy(vars(own))) for own, original in pairs]
    )


def former_implementation(config: Config) -> str:
    """What attends, by the config of a decoder that is to be patched.

    A model made from the config of a patched one names NSA; then "sdpa".
    """
    implementation = config._attn_implementation
    return "sdpa" if implementation in IMPLEMENTATIONS else implementation


def write_record(decoder: Decoder, record: dict[str, Any]) -> None:
    """Name NSA as the attention of a decoder, in the config that is its own."""
    decoder.config.nsa_flex = record
    decoder.config._attn_implementation_internal = IMPLEMENTATION


def share_config(decoder: Decoder) -> None:
    """Give the decoder's config to its modules that have a copy, as copies of layers do."""
    inside = [vars(each).get("config") for each in decoder.modules() if _is_patched(each)]
    for module in decoder.modules():
        config = vars(module).get("config")
        if "nsa_flex" in getattr(config, "__dict__", ()) and not any(
            config is each for each in inside
        ):
            module.config = decoder.config


def _is_patched(module: nn.Module) -> bool:
    return "nsa_installed" in vars(module)


def _is_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def _held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Config]]:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if _is_config(value):
                yield module, name, value


def with_nested(config: Config) -> Iterator[Config]:
    """A config and those inside it."""
    yield config
    for value in vars(config).values():
        if _is_config(value):
            yield from with_nested(value)


def _exchange(model: nn.Module, replacements: dict[int, Config]) -> None:
    for module, name, config in _held(model):
        if id(config) in replacements:
            setattr(module, name, replacements[id(config)])
