"""The cache of a model in `context_parallel`, whose tokens its ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from nsa_flex.parallel import ShardedCache
from nsa_flex.patching.layer import layer_of


class ShardedNSACache:
    """A `ShardedCache` for each attention layer; pass it as `past_key_values`.

    The first call brings the prompt, this rank's shards as `shard_batch` makes them. Later ones
    bring 1 to 16 new tokens a row, the same on every rank, and give the same logits there. It is
    filled and counted in place: what the model returns as past_key_values is None.

    Args:
        model: patched, and in `context_parallel`.
        lengths: tokens of each row of the prompt, padding left out.
        max_length: tokens that a row may have.

    Raises:
        ValueError: the model is not in `context_parallel`.

    Attributes:
        layers: the cache of each layer, by its `layer_idx`.
    """

    def __init__(self, model: nn.Module, *, lengths: Sequence[int], max_length: int) -> None:
        self.layers: dict[int, ShardedCache] = {}
        for module in model.modules():
            layer = layer_of(module)
            if layer is None:
                continue
            if layer.shards is None:
                raise ValueError(
                    "the model is not in context parallelism, whose ranks would share the cache: "
                    "call nsa_flex.context_parallel(model, mesh) first, or pass an NSACache"
                )
            place: Any = module.layer_idx
            self.layers[place] = ShardedCache(
                layer.compress_key,
                layer.compress_value,
                layer.shards,
                max_length=max_length,
                prompt=tuple(lengths),
            )
        if not self.layers:
            raise ValueError(f"{type(model).__name__} has no NSA layers: call nsa_flex.patch")

    @property
    def first(self) -> ShardedCache:
        """That of one layer; all hold as many tokens."""
        return next(iter(self.layers.values()))
