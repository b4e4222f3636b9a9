"""One decode step on CUDA: append, compress, score, select top-k blocks, attend, combine.

All that changes from step to step is in `lengths`, on the device: grids and shapes are constant,
nothing synchronises with the host, and a step can be captured in a CUDA graph.
`lengths` counts each row's tokens before the new ones; new token i of row b has position
lengths[b] + i. No function changes it.

Needs triton; import it only where it is to run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.decode import checks, operators
from nsa_flex.fallback_kernels.decode.config import DecodePlan
from nsa_flex.fallback_kernels.decode.launch import Cache, run


class DecodeAux(NamedTuple):
    """What `return_aux=True` adds.

    blocks: int32 (B, Hkv, T, n), selected blocks, ascending, -1 past the last.
    lse: float32 (B, Hq, T, 3), natural log-sum-exp of the compressed, selected, sliding branch;
        -inf where nothing is seen.
    """

    blocks: Tensor
    lse: Tensor


unsupported_reason = checks.unsupported_reason


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
    operators.append(new_key, new_value, key, value, lengths)


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
    operators.compress_completed(
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
    operators.append_and_compress(
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
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_query(query, key, value, gates, config)
    checks.check_sliding(sliding_key, sliding_value, key, value, lengths)
    result = operators.attention(
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
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_query(query, key, value, gates, config)
    checks.check_new(new_key, new_value, key, value)
    checks.check_weights(key_weights, value_weights, key, config)
    if new_key.shape[2] != query.shape[2]:
        raise ValueError(f"new_key has {new_key.shape[2]} tokens; query has {query.shape[2]}")
    result = operators.step(
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
    checks.check_cache(key, value, compressed_key, compressed_value, lengths)
    checks.check_compressed(compressed_key, key, config)
    checks.check_query(query, key, value, gates, config)
    plan = DecodePlan.of(query, key, value, compressed_key, config)
    rows = torch.zeros((plan.units, plan.num_splits), dtype=torch.int32, device=query.device)
    cache = Cache(key, value, compressed_key, compressed_value, lengths)
    run(plan, query, cache, gates, query.shape[3] ** -0.5, rows_read=rows)
    compressed, sliding, selected = rows.split(
        (plan.compressed_splits, plan.window_splits, plan.selected_splits), 1
    )
    counts = torch.stack([x.sum(1) for x in (compressed, selected, sliding)], 1).int()
    return counts.view(plan.batch, plan.kv_heads, plan.tokens, 3)


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
