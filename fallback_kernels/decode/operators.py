"""The custom operators of a decode step and their fake implementations.

They launch and check nothing: `interface` has checked the call before. `mutates_args` tells
functionalisation which buffers of the cache a step writes in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.plans import planned
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import Cache, NewTokens, launch_append, run

CACHE = ("key", "value", "compressed_key", "compressed_value")


@torch.library.custom_op("nsa_flex::decode_append", mutates_args=("key", "value"))
@planned
def append(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, lengths: Tensor
) -> None:
    """Under `interface.append`."""
    cache = Cache(key, value, key, value, lengths)
    new = NewTokens(new_key, new_value)
    launch_append(new, cache, NSAConfig(), append=True, write_compressed=False)


@append.register_fake
def _(*tensors: Any) -> None:
    return None


@torch.library.custom_op(
    "nsa_flex::decode_compress", mutates_args=("compressed_key", "compressed_value")
)
@planned
def compress_completed(
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    key_weights: Tensor | None,
    value_weights: Tensor | None,
    num_new: int,
    compress_block_size: int,
    compress_stride: int,
) -> None:
    """Under `interface.compress_completed`."""
    config = NSAConfig(compress_block_size, compress_stride, compress_block_size)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    # Only their number of tokens is used; the tokens are read from the cache.
    new = NewTokens(key[:, :, :num_new], value[:, :, :num_new], key_weights, value_weights)
    launch_append(new, cache, config, append=False, write_compressed=True)


@compress_completed.register_fake
def _(*arguments: Any) -> None:
    return None


@torch.library.custom_op("nsa_flex::decode_append_and_compress", mutates_args=CACHE)
@planned
def append_and_compress(
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    key_weights: Tensor | None,
    value_weights: Tensor | None,
    compress_block_size: int,
    compress_stride: int,
) -> None:
    """Under `interface.append_and_compress`."""
    config = NSAConfig(compress_block_size, compress_stride, compress_block_size)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    new = NewTokens(new_key, new_value, key_weights, value_weights)
    launch_append(new, cache, config, append=True, write_compressed=True)


@append_and_compress.register_fake
def _(*arguments: Any) -> None:
    return None


@torch.library.custom_op("nsa_flex::decode_attention", mutates_args=())
@planned
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    scale: float,
    counts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Under `interface.decode_attention`; `counts` are those of an `NSAConfig`."""
    config = NSAConfig.of_counts(counts)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    sliding = None
    if sliding_key is not None and sliding_value is not None:
        sliding = sliding_key, sliding_value
    return run(plan, query, cache, gates, scale, sliding)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(query, key, value, others[-1])


@torch.library.custom_op("nsa_flex::decode_step", mutates_args=CACHE)
@planned
def step(
    query: Tensor,
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    key_weights: Tensor | None,
    value_weights: Tensor | None,
    scale: float,
    counts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Under `interface.step`; `counts` are those of an `NSAConfig`."""
    config = NSAConfig.of_counts(counts)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    new = NewTokens(new_key, new_value, key_weights, value_weights)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    return run(plan, query, cache, gates, scale, new=new)


@step.register_fake
def _(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_results(query, key, value, others[-1])


def _empty_results(
    query: Tensor, key: Tensor, value: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    num_selected = NSAConfig.of_counts(counts).num_selected_blocks
    return (
        query.new_empty((batch, tokens, heads, value.shape[3])),
        query.new_empty((batch, key.shape[1], tokens, num_selected), dtype=torch.int32),
        query.new_empty((batch, heads, tokens, 3), dtype=torch.float32),
    )
