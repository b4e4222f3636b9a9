"""What a rank sends in one layer, in closed form."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_flex.config import NSAConfig


class SentBytes(NamedTuple):
    """What one rank sends in one layer, in bytes."""

    forward: int
    backward: int


def sent_bytes(
    num_tokens: int,
    num_ranks: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    config: NSAConfig,
    value_head_dim: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    separate_branch_kv: bool = False,
    num_queries: int | None = None,
) -> SentBytes:
    """Bytes that a rank sends in one layer of context parallelism, in closed form.

    In a ring a rank passes every shard but one on: (P - 1) times its own. Recomputed activations
    are one more forward.

    Args:
        num_tokens: S, of a whole row, padding included. batch_size: B, rows.
        num_ranks: P.
        num_kv_heads, head_dim, value_head_dim: Hkv, D and Dv (D if None).
        dtype: of keys and values; gradients are reduced in float32, or in float64.
        separate_branch_kv: whether the window has keys and values of its own.
        num_queries: Sq; S if None.

    >>> sent_bytes(2**20, 8, 8, 128, config=NSAConfig())
    SentBytes(forward=3993894912, backward=7987789824)
    """
    own = num_tokens // num_ranks
    halo = 2 * (config.compress_block_size - config.compress_stride)
    dims = (head_dim, head_dim if value_head_dim is None else value_head_dim)
    is_near = num_queries in (None, num_tokens)
    raw = num_raw(own, config, own_window=separate_branch_kv, is_near=is_near) * sum(dims)
    compressed = (own // config.compress_stride + halo) * sum(dims[: num_compressed(config)])
    learned = compressed if config.has("compressed") else 0  # choosing blocks has no gradient
    times = (num_ranks - 1) * batch_size * num_kv_heads
    wide = torch.promote_types(dtype, torch.float32)
    return SentBytes(
        times * (raw + compressed) * dtype.itemsize, times * (raw + learned) * wide.itemsize
    )


def num_compressed(config: NSAConfig) -> int:
    """Of compressed keys and compressed values, how many some branch reads."""
    return 2 if config.has("compressed") else int(config.has("selected"))


def num_raw(own: int, config: NSAConfig, *, own_window: bool = False, is_near: bool = True) -> int:
    """Of a rank's tokens how many are sent for their keys and values, not compressed ones.

    The selected branch reads all, and with them the window has its own. Of keys and values that
    only the window reads, the last w - 1 tokens of each chunk are sent.

    Args:
        own: tokens of a rank, of both chunks.
        own_window: whether the window has keys and values of its own.
        is_near: whether there are as many queries as keys; if not, all that the window reads.
    """
    selected = config.has("selected")
    is_apart = config.has("sliding") and (own_window or not selected)
    window = 2 * num_tail(own // 2, config) if is_near else own
    return (own if selected else 0) + (window if is_apart else 0)


def num_tail(chunk: int, config: NSAConfig) -> int:
    """Of a chunk's tokens, how many windows of later chunks reach; at least 1."""
    return min(max(1, config.window_size - 1), chunk)


def exchanged_bytes(
    num_tokens: int,
    num_ranks: int,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    config: NSAConfig,
    value_head_dim: int | None = None,
    batch_size: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> SentBytes:
    """Bytes that a rank sends in one layer of Ulysses sequence parallelism, in closed form.

    Four all-to-alls exchange queries, keys, values and the output, and a fifth the gates; of each
    tensor a rank sends all parts but one. The backward exchanges as many gradients.

    Args:
        num_tokens: S, of a whole row. batch_size: B, rows.
        num_ranks: P.
        num_query_heads, num_kv_heads, head_dim, value_head_dim: Hq, Hkv, D and Dv (D if None).
        dtype: of all of them.

    >>> exchanged_bytes(2**20, 8, 32, 8, 128, config=NSAConfig())
    SentBytes(forward=2370830336, backward=2370830336)
    """
    width = head_dim + (head_dim if value_head_dim is None else value_head_dim)
    token = (num_query_heads + num_kv_heads) * width + num_query_heads * len(config.branches)
    own = batch_size * (num_tokens // num_ranks) * token * dtype.itemsize
    sent = own * (num_ranks - 1) // num_ranks
    return SentBytes(sent, sent)
