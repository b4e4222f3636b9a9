"""`NSACache`: the caches of all attention layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from nsa_flex.cache.buffers import Memory, num_bytes
from nsa_flex.cache.layer import LayerCache
from nsa_flex.module import NSAAttention
from nsa_flex.patching.layer import NSALayer
from nsa_flex.patching.sites import patched_sites

if TYPE_CHECKING:
    _Base = object
else:
    try:
        from transformers import Cache as _Base
    except ImportError:
        _Base = object


class NSACache(_Base):
    """Keys and values of a model with NSA, raw and compressed, for decoding.

    For a transformers model that was patched it is a `Cache` to pass as `cache` (before
    transformers 5.24 as `past_key_values`); layers that stayed as they were have transformers'
    own caches in it. `generate` needs none: it makes the caches of NSA's layers by itself. For
    other modules pass `cache.layers[i]` to the i-th NSA module.

    Args:
        model: a patched model, or one with `NSAAttention` modules.
        max_length: tokens to make room for at once (static, for compiled code and CUDA graphs);
            None grows.

    Raises:
        ValueError: the model has no NSA layer, or more than one patched decoder.

    >>> import torch
    >>> layer = NSAAttention(64, num_query_heads=4, num_kv_heads=2)
    >>> cache = NSACache(layer)
    >>> with torch.no_grad():
    ...     for chunk in torch.randn(1, 100, 64).split(30, dim=1):
    ...         _ = layer(chunk, cache=cache.layers[0])
    >>> cache.get_seq_length()
    100
    """

    layers: list[Any]

    def __init__(self, model: nn.Module, *, max_length: int | None = None) -> None:
        layers = _layers_of(model, max_length)
        if _Base is object:
            self.layers = layers
        else:
            super().__init__(layers=layers)  # type: ignore[call-arg]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"NSACache({len(self.layers)} layers, {self.memory().total} bytes)"

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Tokens of the longest row that came in, padding included; a tensor where static."""
        return self.layers[layer_idx].get_seq_length()

    def memory(self) -> Memory:
        """Bytes that are allocated now, over all layers."""
        total = Memory()
        for layer in self.layers:
            if isinstance(layer, LayerCache):
                total += layer.memory()
            else:
                tensors = [x for x in vars(layer).values() if isinstance(x, Tensor)]
                total += Memory(other=num_bytes(*tensors))
        return total

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last `-tokens_to_remove` columns of every layer, padding included.

        Raises:
            ValueError: there are not so many, or a layer of another kind cannot. Nothing changed.
        """
        for layer in self.layers:
            if isinstance(layer, LayerCache):
                layer.check_crop(tokens_to_remove)
            else:
                _check_crop(layer, tokens_to_remove)
        for layer in self.layers:
            layer.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; static memory stays."""
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row `beam_idx[b]` was."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times: several continuations of one prefix.

        Raises:
            ValueError: an unpatched layer's cache is static, and cannot. Nothing changed.
        """
        self._check_can("batch_repeat_interleave")
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The rows `indices` alone.

        Raises:
            ValueError: an unpatched layer's cache is static, and cannot. Nothing changed.
        """
        self._check_can("batch_select_indices")
        for layer in self.layers:
            layer.batch_select_indices(indices)

    def _check_can(self, method: str) -> None:
        for i, layer in enumerate(self.layers):
            if not hasattr(layer, method):
                raise ValueError(
                    f"layer {i} is not patched, and its {type(layer).__name__} has no {method}: "
                    "use a cache that grows"
                )


def _check_crop(layer: Any, tokens_to_remove: int) -> None:
    from nsa_flex.patching.hf_versions import check_crop

    check_crop(layer, tokens_to_remove)


def _layers_of(model: nn.Module, max_length: int | None) -> list[Any]:
    own = [m for m in model.modules() if isinstance(m, NSAAttention)]
    if own:
        return [module.new_cache(max_length=max_length) for module in own]
    sites = list(patched_sites(model))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no NSA layer: patch it first (nsa_flex.patch)"
        )
    decoders = {site.decoder for site in sites}
    if decoders == {None}:
        layers: list[NSALayer] = [site.module.nsa for site in sites]
        return [layer.new_cache(max_length=max_length) for layer in layers]
    if len(decoders) > 1:
        raise ValueError(
            f"{type(model).__name__} holds {len(decoders)} patched decoders: make a cache of each"
        )
    from nsa_flex.patching.hf_cache import new_layers

    return new_layers(decoders.pop(), max_length)
