"""Whether new tokens fit what a cache holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.sharded import is_sharded


def misfit(cache: Any, key: Tensor, value: Tensor) -> str | None:
    """Why a `LayerCache` cannot store such keys and values, or None. Looks at no values."""
    shapes = f"keys {tuple(key.shape)} and values {tuple(value.shape)}"
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        return f"{shapes} must be (batch, heads, tokens, dim), alike but for dim"
    heads = cache.num_sets * cache.compress_key.num_kv_heads
    dims = (cache.compress_key.head_dim, cache.compress_value.head_dim)
    if (key.shape[1], key.shape[3], value.shape[3]) != (heads, *dims):
        return (
            f"{shapes} are not those of this cache's layer: {heads} heads of {dims[0]} and "
            f"{dims[1]}"
        )
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        return "NSA's cache carries no gradients: call under torch.no_grad(), or without a cache"
    if not cache.is_initialized:
        return _sharded_phi(cache)
    for name, got, want in (
        ("batch size", key.shape[0], cache.batch_size),
        ("device", value.device, cache.device),
        ("dtype", value.dtype, cache.dtype),
    ):
        if got != want:
            return (
                f"the cache was filled with {name} {want}, the new tokens have {name} {got}: "
                "use a new cache"
            )
    return None


def _sharded_phi(cache: Any) -> str | None:
    phi = (cache.compress_key, cache.compress_value)
    if any(is_sharded(x) for each in phi for x in each.parameters(recurse=False)):
        return (
            "φ is sharded by itself (fully_shard on the nsa module), and a cache compresses "
            "outside of its forward: fully_shard the decoder layer, or pass use_cache=False"
        )
    return None
