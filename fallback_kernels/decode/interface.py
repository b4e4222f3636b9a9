"""One decode step on CUDA: append, compress, score, choose, attend, gate, as custom operators.

Everything a step depends on that changes from step to step is in `lengths`, on the device: grids
and shapes are constant, nothing waits for the host, and a step can be captured in a CUDA graph.
`lengths` counts each row's tokens before the new ones; new token i of row b has position
lengths[b] + i. No function changes it.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.decode import checks
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import (
    COMPILED,
    Cache,
    NewTokens,
    launch_append,
    run,
)

INTERPRETED = not COMPILED
CACHE = ("key", "value", "compressed_key", "compressed_value")


class DecodeAux(NamedTuple):
    """What `return_aux=True` adds.

    blocks: int32 (B, Hkv, T, n), chosen blocks, ascending, -1 behind the last.
    lse: float32 (B, Hq, T, 3), natural log-sum-exp of the compressed, selected, sliding branch;
        -inf where nothing is seen.
    """

    blocks: Tensor
    lse: Tensor


def obstacle(query: Tensor, key: Tensor, value: Tensor, config: NSAConfig) -> str | None:
    """Why `decode_attention` does not take these shapes, dtypes or devices; None if it does."""
    return checks.obstacle(query, key, value, config, interpreted=INTERPRETED)


def append(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, lengths: Tensor
) -> None:
    """Writes new token i of row b into slot lengths[b] + i, in place.

    Args:
        new_key: (B, Hkv, T, D), new_value: (B, Hkv, T, Dv), T of 1 ... 16, any strides and float
            dtype; rounded to the cache's.
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv), last dimension contiguous.
        lengths: int32 (B,), tokens of each row before these. Slots from C on are left out.

    Raises:
        ValueError: a shape, dtype or device does not fit; nothing is written then.
    """
    checks.check_cache(key, value, key, value, lengths)
    checks.check_new(new_key, new_value, key, value)
    _append(new_key, new_value, key, value, lengths)


@torch.library.custom_op("nsa_flex::decode_append", mutates_args=("key", "value"))
def _append(
    new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, lengths: Tensor
) -> None:
    cache = Cache(key, value, key, value, lengths)
    launch_append(NewTokens(new_key, new_value), cache, NSAConfig(), append=True, emit=False)


@_append.register_fake
def _(*tensors: Any) -> None:
    return None


def compress_completed(
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    num_new: int,
    config: NSAConfig,
    *,
    key_weights: Tensor | None = None,
    value_weights: Tensor | None = None,
) -> None:
    """Writes the compressed rows of the blocks that tokens lengths ... lengths + num_new - 1
    complete, which `append` has stored: block i is complete once token i·d + l - 1 is.

    Mean of the block's l tokens in float32, or with `key_weights` and `value_weights`, float32
    (Hkv, l), their weighted sum.

    Raises:
        ValueError: a shape, dtype or device does not fit; nothing is written then.
    """
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_weights(key_weights, value_weights, key, config)
    checks.check_new(key[:, :, :num_new], value[:, :, :num_new], key, value)
    _compress_completed(
        key,
        value,
        compressed_key,
        compressed_value,
        lengths,
        key_weights,
        value_weights,
        num_new,
        config.compress_block_size,
        config.compress_stride,
    )


@torch.library.custom_op(
    "nsa_flex::decode_compress", mutates_args=("compressed_key", "compressed_value")
)
def _compress_completed(
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
    config = NSAConfig(compress_block_size, compress_stride, compress_block_size)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    # No token is read from these: they stand for their number.
    new = NewTokens(key[:, :, :num_new], value[:, :, :num_new], key_weights, value_weights)
    launch_append(new, cache, config, append=False, emit=True)


@_compress_completed.register_fake
def _(*arguments: Any) -> None:
    return None


def append_and_compress(
    new_key: Tensor,
    new_value: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    lengths: Tensor,
    config: NSAConfig,
    *,
    key_weights: Tensor | None = None,
    value_weights: Tensor | None = None,
) -> None:
    """`append`, then `compress_completed`, by one kernel."""
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_new(new_key, new_value, key, value)
    checks.check_weights(key_weights, value_weights, key, config)
    _append_and_compress(
        new_key,
        new_value,
        key,
        value,
        compressed_key,
        compressed_value,
        lengths,
        key_weights,
        value_weights,
        config.compress_block_size,
        config.compress_stride,
    )


@torch.library.custom_op("nsa_flex::decode_append_and_compress", mutates_args=CACHE)
def _append_and_compress(
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
    config = NSAConfig(compress_block_size, compress_stride, compress_block_size)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    new = NewTokens(new_key, new_value, key_weights, value_weights)
    launch_append(new, cache, config, append=True, emit=True)


@_append_and_compress.register_fake
def _(*arguments: Any) -> None:
    return None


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
    scale: float | None = None,
    sliding_key: Tensor | None = None,
    sliding_value: Tensor | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, DecodeAux]:
    """Native Sparse Attention of T new tokens over a cache that already holds them.

    `o = sum_c g_c · Attention_c(q)` over the compressed, selected and sliding branch, as
    `nsa_flex.nsa_attention` computes it for the queries at positions lengths ... lengths + T - 1.
    All query heads of a group share each read of a key or value.

    Args:
        query: (B, Hq, T, D), T of 1 ... 16, dtype of the cache, any strides.
        key: (B, Hkv, C, D), value: (B, Hkv, C, Dv): tokens from slot 0 of each row, the T new
            ones included. Nothing behind them is read.
        compressed_key: (B, Hkv, Ncap, D), compressed_value: (B, Hkv, Ncap, Dv), with
            Ncap >= (C - l) // d + 1.
        gates: (B, Hq, T, 3), order compressed, selected, sliding; any float dtype and strides.
        lengths: int32 (B,), tokens of each row before the T new ones.
        scale: factor of the logits, 1/sqrt(D) unless given.
        sliding_key, sliding_value: of the sliding branch, as key and value, which they are unless
            given.
        return_aux: also return `DecodeAux`.

    Returns:
        (B, Hq, T, Dv) in query's dtype and (B, T, Hq, Dv) memory. Softmax and sums are float32.
        Compressed attention is 0 for a query that sees no compressed block; a token at a position
        from C on is all 0. Equal inputs give equal bits.

    Raises:
        ValueError: a shape, dtype, device or option that the kernels do not take.
    """
    _check_call(query, key, value, compressed_key, compressed_value, gates, lengths, config)
    if sliding_key is not None and sliding_value is not None:
        checks.check_cache(sliding_key, sliding_value, sliding_key, sliding_value, lengths)
        checks.check_like("sliding_key", sliding_key, tuple(key.shape), key)
        checks.check_like("sliding_value", sliding_value, tuple(value.shape), key)
    elif sliding_key is not None or sliding_value is not None:
        raise ValueError("sliding_key and sliding_value must be given together")
    result = _attention(
        query,
        key,
        value,
        compressed_key,
        compressed_value,
        gates,
        lengths,
        sliding_key,
        sliding_value,
        query.shape[3] ** -0.5 if scale is None else scale,
        config.counts,
    )
    return _result(result, return_aux)


@torch.library.custom_op("nsa_flex::decode_attention", mutates_args=())
def _attention(
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
    config = NSAConfig.of_counts(counts)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    sliding = None
    if sliding_key is not None and sliding_value is not None:
        sliding = sliding_key, sliding_value
    return run(plan, query, cache, gates, scale, sliding)


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_result(query, key, value, others[-1])


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
    *,
    config: NSAConfig,
    scale: float | None = None,
    key_weights: Tensor | None = None,
    value_weights: Tensor | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, DecodeAux]:
    """`append_and_compress`, then `decode_attention`; for one new token a row by four kernels.

    Raises:
        ValueError: as they do; nothing is written then.
    """
    _check_call(query, key, value, compressed_key, compressed_value, gates, lengths, config)
    checks.check_new(new_key, new_value, key, value)
    checks.check_weights(key_weights, value_weights, key, config)
    if new_key.shape[2] != query.shape[2]:
        raise ValueError(f"new_key has {new_key.shape[2]} tokens; query has {query.shape[2]}")
    result = _step(
        query,
        new_key,
        new_value,
        key,
        value,
        compressed_key,
        compressed_value,
        gates,
        lengths,
        key_weights,
        value_weights,
        query.shape[3] ** -0.5 if scale is None else scale,
        config.counts,
    )
    return _result(result, return_aux)


@torch.library.custom_op("nsa_flex::decode_step", mutates_args=CACHE)
def _step(
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
    config = NSAConfig.of_counts(counts)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    new = NewTokens(new_key, new_value, key_weights, value_weights)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    return run(plan, query, cache, gates, scale, new=new)


@_step.register_fake
def _(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_result(query, key, value, others[-1])


def count_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
) -> Tensor:
    """Rows of keys that `decode_attention` loads, counted by its kernels from their load masks:
    int32 (B, Hkv, T, 3), compressed, selected and sliding. As many rows of values are loaded.
    """
    _check_call(query, key, value, compressed_key, compressed_value, gates, lengths, config)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    rows = torch.zeros((plan.units, plan.parts), dtype=torch.int32, device=query.device)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    run(plan, query, cache, gates, query.shape[3] ** -0.5, rows_read=rows)
    compressed, sliding, selected = rows.split(
        (plan.splits, plan.window_parts, plan.select_parts), 1
    )
    total = torch.stack([x.sum(1) for x in (compressed, selected, sliding)], 1).int()
    return total.view(plan.batch, plan.kv_heads, plan.tokens, 3)


def _check_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed_key: Tensor,
    compressed_value: Tensor,
    gates: Tensor,
    lengths: Tensor,
    config: NSAConfig,
) -> None:
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_query(query, key, value, gates, config, INTERPRETED)


def _result(
    result: tuple[Tensor, Tensor, Tensor], return_aux: bool
) -> Tensor | tuple[Tensor, DecodeAux]:
    out, blocks, lse = result
    out = out.transpose(1, 2)
    if not return_aux:
        return out
    largest = torch.iinfo(torch.int32).max
    ascending = torch.where(blocks < 0, largest, blocks).sort(-1).values
    return out, DecodeAux(torch.where(ascending == largest, -1, ascending), lse)


def _fake_result(
    query: Tensor, key: Tensor, value: Tensor, counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    num_selected = NSAConfig.of_counts(counts).num_selected_blocks
    return (
        query.new_empty((batch, tokens, heads, value.shape[3])),
        query.new_empty((batch, key.shape[1], tokens, num_selected), dtype=torch.int32),
        query.new_empty((batch, heads, tokens, 3), dtype=torch.float32),
    )
