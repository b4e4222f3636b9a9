"""Attention layers of transformers decoders: which they are, their sizes, what they ask for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from nsa_flex.patching.hf_families import family_of, feature_of_module, read_shape
from nsa_flex.patching.hf_versions import check_known
from nsa_flex.patching.layer import AttentionShape

# The attention implementation of a patched decoder, as its config names it.
IMPLEMENTATION = "nsa_flex"
# The same while an engine of continuous batching runs. The engine takes implementations with
# "flash" in their name for ones that attend packed tokens and need no masks.
PAGED_IMPLEMENTATION = "nsa_flex_flash"
IMPLEMENTATIONS = (IMPLEMENTATION, PAGED_IMPLEMENTATION)

# Attention modules of transformers share attributes, not a type.
Attention: TypeAlias = Any
# A PreTrainedModel, whose attributes type checkers know no better.
Decoder: TypeAlias = Any


def is_attention(module: nn.Module) -> bool:
    """Whether `module` looks like the self-attention of a decoder layer."""
    is_attention = any(base.__name__.endswith("Attention") for base in type(module).__mro__)
    return is_attention and hasattr(module, "layer_idx") and hasattr(module, "config")


def decoder_of(model: nn.Module, name: str) -> Decoder:
    """The innermost transformers model that holds the module called `name`."""
    while name:
        name = name.rpartition(".")[0]
        owner = model.get_submodule(name)
        if isinstance(owner, PreTrainedModel):
            return owner
    return None


def holders_of(model: nn.Module, decoders: set[Decoder], method: str) -> list[Any]:
    """The transformers models in `model` that hold a decoder of these and have that method."""
    return [
        each
        for each in model.modules()
        if isinstance(each, PreTrainedModel)
        and hasattr(type(each), method)
        and not decoders.isdisjoint(each.modules())
    ]


def is_recurrent(decoder: Decoder) -> bool:
    """Whether some layers carry a state from token to token (linear attention, convolutions)."""
    layers = DynamicCache(config=decoder.config).layers
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def attention_shape(module: Attention, decoder: Decoder) -> AttentionShape:
    """Sizes of a transformers attention module.

    Raises:
        ValueError: the module computes something that NSA cannot stand in for; the message names
            the feature.
    """
    feature = _unsupported_feature(module, decoder)
    if feature is not None:
        raise ValueError(
            f"{type(module).__name__} has {feature}, which NSA does not compute: leave such "
            "layers out with filter_fn"
        )
    check_known(module, decoder)
    if not family_of(module).calls_interface and "forward" in vars(module):
        raise ValueError(
            f"{type(module).__name__} has a forward of its own on the instance, which patch would "
            "hide: patch the model before other tools wrap it"
        )
    return read_shape(module)


def _unsupported_feature(module: Attention, decoder: Decoder) -> str | None:
    config = module.config
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None:
        return f"logit soft-capping (attn_logit_softcapping={softcap})"
    if getattr(config, "alibi", False):
        return "a position bias (alibi=True)"
    feature = feature_of_module(module)
    if feature is not None:
        return feature
    if getattr(config, "add_cross_attention", False):
        return "cross-attention beside it (add_cross_attention=True)"
    if not getattr(module, "is_causal", True) or not getattr(config, "is_causal", True):
        return "bidirectional attention (is_causal=False)"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder beside it (is_encoder_decoder=True)"
    if decoder is None or not _hands_down_arguments(module, decoder):
        return "a way to attention other than transformers' attention interface"
    if config is not decoder.config:
        return "a config other than its decoder's"
    return None


def _hands_down_arguments(module: Attention, decoder: Decoder) -> bool:
    """Whether what the hooks add reaches the attention function."""
    declares = decoder._supports_attention_backend or not family_of(module).declares_interface
    return declares and all(_takes_any_argument(part) for part in (decoder, module))


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module's forward, in order."""
    return tuple(inspect.signature(module.forward).parameters)


def _takes_any_argument(module: Attention) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def refuse_attention_weights(config: Any, arguments: Mapping[str, Any]) -> None:
    """That nobody asks for attention weights, by an argument of the call or by the config.

    Raises:
        ValueError: somebody does.
    """
    if arguments.get("output_attentions") or getattr(config, "output_attentions", False):
        raise ValueError(
            "output_attentions=True is not supported: sparse attention never forms attention "
            "weights; nsa_flex.unpatch(model), or where it was not patched take "
            "model.set_attn_implementation('eager')"
        )


def refuse_continuous_batching(model: Any) -> None:
    """That pages have all which the attention of such an unpatched model reads.

    Raises:
        ValueError: its sparse attention runs on nsa_flex.
    """
    if model.config.get_text_config()._attn_implementation in IMPLEMENTATIONS:
        raise ValueError(
            f"continuous batching of {type(model).__name__} is not supported with the attention "
            "nsa_flex: the engine's pages keep neither keys of an indexer nor the means that "
            "blocks are selected by; use generate()"
        )
