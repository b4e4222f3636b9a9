"""Whether new tokens fit what a cache holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.sharded import is_sharded


def misfit(cache: Any, key: Tensor, value: Tensor) -> str | None:
    """Why a `LayerCache` cannot store such keys and values, or None. Looks at no values."""
    key_shape, value_shape = key.shape, value.shape
    heads, key_dim, value_dim = cache.sizes
    if (
        cache.is_initialized
        and len(key_shape) == 4
        and key_shape == (cache.batch_size, heads, tokens := key_shape[2], key_dim)
        and value_shape == (cache.batch_size, heads, tokens, value_dim)
        and value.dtype == cache.dtype
        and value.device == cache.device
        and not torch.is_grad_enabled()
    ):
        return None
    if len(key_shape) != 4 or len(value_shape) != 4 or key_shape[:3] != value_shape[:3]:
        return f"{_shapes(key, value)} must be (batch, heads, tokens, dim), alike but for dim"
    if (key_shape[1], key_shape[3], value_shape[3]) != cache.sizes:
        return (
            f"{_shapes(key, value)} are not those of this cache's layer: {heads} heads of "
            f"{key_dim} and {value_dim}"
        )
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return "NSA's cache carries no gradients: call under torch.no_grad(), or without a cache"
    if not cache.is_initialized:
        return _sharded_phi(cache)
    for name, got, want in (
        ("batch size", key_shape[0], cache.batch_size),
        ("device", value.device, cache.device),
        ("dtype", value.dtype, cache.dtype),
    ):
        if got != want:
            return (
                f"the cache was filled with {name} {want}, the new tokens have {name} {got}: "
                "use a new cache"
            )
    return None


def _shapes(key: Tensor, value: Tensor) -> str:
    return f"keys {tuple(key.shape)} and values {tuple(value.shape)}"


def _sharded_phi(cache: Any) -> str | None:
    phi = (cache.compress_key, cache.compress_value)
    if any(is_sharded(x) for each in phi for x in each.parameters(recurse=False)):
        return (
            "φ is sharded by itself (fully_shard on the nsa module), and a cache compresses "
            "outside of its forward: fully_shard the decoder layer, or pass use_cache=False"
        )
    return None
