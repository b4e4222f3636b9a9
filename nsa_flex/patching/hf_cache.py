"""NSA's layers inside the caches of transformers.

A transformers cache is a list of layers. Those of patched attention modules are exchanged for
`LayerCache`s, static for static and growing for growing, at the first call that brings the cache:
whoever made it (`generate`, the model, the caller), it goes on as the same object.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, StaticCache

from nsa_flex.cache import LayerCache
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.cache.layer import advance
from nsa_flex.documents import gather_real
from nsa_flex.patching.hf_layers import Attention, Decoder
from nsa_flex.patching.layer import layer_of

# transformers asks whether a layer is one of its own before it asks for lengths.
CacheLayerMixin.register(LayerCache)

_GROWING = ("DynamicLayer", "DynamicSlidingWindowLayer")
_STATIC = ("StaticLayer", "StaticSlidingWindowLayer")


def patched_modules(decoder: Decoder) -> list[Attention]:
    """The patched attention modules of a decoder that run, in order."""
    modules = [module for module in decoder.modules() if layer_of(module) is not None]
    return [module for module in modules if module.layer_idx < layers_in_use(decoder)]


def layers_in_use(decoder: Decoder) -> int:
    """How many of its layers a decoder runs, if fewer than when it was patched.

    As while `generate(assistant_early_exit=...)` drafts.
    """
    number = num_layers(decoder.config)
    return number if number < decoder.nsa_installed.num_layers else sys.maxsize


def num_layers(config: Any) -> int:
    """How many layers a decoder runs, by its config."""
    return getattr(config, "num_hidden_layers", sys.maxsize)


def new_layers(decoder: Decoder, max_length: int | None) -> list[Any]:
    """Empty cache layers for all of a decoder, NSA's where it is patched."""
    config = decoder.config.get_text_config(decoder=True)
    cache = (
        DynamicCache(config=config)
        if max_length is None
        else StaticCache(config=config, max_cache_len=max_length)
    )
    adopt(cache, decoder, None)
    return cache.layers


def holds_nsa(cache: Cache, layer_idx: int) -> bool:
    """Whether the layer of this index has been exchanged."""
    return layer_idx < len(cache.layers) and isinstance(cache.layers[layer_idx], LayerCache)


def adopt(cache: Cache, decoder: Decoder, real: Tensor | None) -> None:
    """Exchange the layers of patched modules for NSA's, with the tokens they hold.

    All of them or none: where one cannot be made, for want of memory too, the cache goes on with
    its own layers and tokens. Layers without tokens have given back their memory by then, each
    as that of NSA's was taken, and take it anew with their next tokens.

    Args:
        real: (B, tokens in the cache), nonzero where they are no padding; None if none is.

    Raises:
        ValueError: the cache is quantized, offloaded or of another kind.
    """
    modules = patched_modules(decoder)
    _check_kind(cache, modules)
    while len(cache.layers) <= max(module.layer_idx for module in modules):
        cache.layers.append(cache.layer_class_to_replicate())
    layers = [_layer_for(module, cache.layers[module.layer_idx], real) for module in modules]
    for module, layer in zip(modules, layers, strict=True):
        cache.layers[module.layer_idx] = layer


def _layer_for(module: Attention, former: Any, real: Tensor | None) -> LayerCache:
    layer = module.nsa.new_cache(max_length=getattr(former, "max_cache_len", None))
    if former.is_initialized:
        _move(former, layer, real)
    return layer


def _check_kind(cache: Cache, modules: list[Attention]) -> None:
    advice = "use a DynamicCache, a StaticCache or an nsa_flex.NSACache"
    if getattr(cache, "offloading", False):
        raise ValueError(
            f"{type(cache).__name__} offloads keys and values, and NSA reads its compressed keys "
            f"at every step: {advice} without offloading"
        )
    for module in modules:
        if module.layer_idx >= len(cache.layers):
            kind = getattr(cache.layer_class_to_replicate, "__name__", "no layer")
        else:
            kind = type(cache.layers[module.layer_idx]).__name__
        if kind not in _GROWING + _STATIC:
            raise ValueError(
                f"layer {module.layer_idx} of the cache is a {kind}; NSA's keys and values "
                f"are neither quantized nor kept otherwise: {advice}"
            )


def _move(former: Any, layer: LayerCache, real: Tensor | None) -> None:
    """The tokens that a layer of transformers holds, into one of NSA."""
    length = int(former.get_seq_length())
    if length == 0:
        _move_memory(former, layer)
        return
    key, value = former.keys[:, :, :length], former.values[:, :, :length]
    kind = value.device.type
    if value.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        # As the next ones come: beside keys that rotation left in float32 the layer widened them.
        value = value.to(torch.get_autocast_dtype(kind))
    if key.shape[2] < length:
        raise ValueError(
            f"a sliding cache kept {key.shape[2]} of {length} tokens, and NSA needs all: use a "
            "new cache, made without the config"
        )
    incoming = IncomingBatch(length)
    if real is not None:
        real = real.to(key.device)
        incoming = IncomingBatch(length, gather_real(real), real.sum(1, dtype=torch.int32))
    layer.begin(incoming)
    layer.update(key, value)
    advance([layer], incoming)
    if real is not None:
        layer.columns.tell(real, length)


def _move_memory(former: Any, layer: LayerCache) -> None:
    """Free the memory of an empty layer; a static layer of NSA takes its own at once."""
    is_static = layer.is_compileable
    empty = [x[:, :, :0].clone() for x in (former.keys, former.values)] if is_static else []
    former.keys = former.values = None
    former.is_initialized = False
    if empty:
        layer.lazy_initialization(*empty)
