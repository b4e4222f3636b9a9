"""NSA of sequences whose tokens are shared out over ranks (context parallelism).

What a rank sends in a layer's forward, in this order, each by one all-gather of its own shard:

1. the first l - d tokens of its chunks, for blocks that reach from one chunk into the next;
2. its compressed keys and values, 1/d of the bytes;
3. its keys and values, some KV heads at a time: those of the next heads are on their way while
   the heads before attend.

The backward reduce-scatters the gradients of the same tensors in float32, in the opposite order.
Queries, gates and outputs never leave their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.attention import nsa_attention
from nsa_flex.compression import Compression, branched, compress_what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.parallel.shards import SequenceShards

if TYPE_CHECKING:
    from jaxtyping import Float, Int


def context_parallel_attention(
    query: Float[Tensor, "B Hq Tq D"],
    key: Float[Tensor, "B Hkv T D"],
    value: Float[Tensor, "B Hkv T Dv"],
    gates: Float[Tensor, "B Hq Tq C"],
    compress_key: Compression,
    compress_value: Compression,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards,
    config: NSAConfig,
    scale: float | None = None,
    backend: Backend = "auto",
    compressed_source: tuple[Tensor, Tensor] | None = None,
    sliding_key: Float[Tensor, "B Hkv T D"] | None = None,
    sliding_value: Float[Tensor, "B Hkv T Dv"] | None = None,
    query_offset: int | None = None,
    document_start: Int[Tensor, "B Tq"] | None = None,
    kv_heads_at_once: int | None = None,
) -> Float[Tensor, "B Hq Tq Dv"]:
    """`nsa_attention` of whole sequences, of which each of P ranks has a shard.

    All tensors are this rank's shards, as `shard_sequence` makes them: chunks r and 2P - 1 - r of
    the 2P that a sequence is cut into. Every rank of the mesh must call this, with equal shapes.
    Gradients of keys and values come back to the ranks that have them. Those of φ are this rank's
    part: sum them over ranks, as data parallelism does.

    Args:
        query: (B, Hq, Tq, D), Tq = Sq / P. gates: (B, Hq, Tq, C), of the
            C branches of the config.
        key: (B, Hkv, T, D), value: (B, Hkv, T, Dv), T = S / P, a multiple of
            2 * select_block_size.
        compress_key, compress_value: φ.
        mesh: the ranks that share sequences: a mesh of one dimension or a process group.
        config, scale, backend: as of `nsa_attention`.
        compressed_source: what φ compresses; key and value if None.
        sliding_key, sliding_value: of the window; key and value if None.
        query_offset: index of the first query of the whole sequence among its S keys; S - Sq if
            None.
        document_start: int (B, Tq), index among the S keys of the first token of each query's
            document, a multiple of `select_block_size`.
        kv_heads_at_once: KV heads whose keys and values are gathered together, a divisor of Hkv;
            all if None. Without gradients, two such parts are in memory at most. With them what
            was gathered lives until the backward, unless activations are recomputed.

    Returns:
        (B, Hq, Tq, Dv) of this rank's queries.

    Raises:
        ValueError: shapes that do not fit, T among them, or what `nsa_attention` raises.
    """
    shards = SequenceShards.of(mesh)
    _check(query, key, shards, config, kv_heads_at_once)
    if (sliding_key is None) != (sliding_value is None):
        raise ValueError("sliding_key and sliding_value must be given together")
    if compressed_source is None:
        (key, source_key), (value, source_value) = branched(key), branched(value)
        compressed_source = source_key, source_value
    compressed = gather_compressed(
        compress_key, compress_value, *compressed_source, shards, config
    )
    raw = [x for x in (key, value, sliding_key, sliding_value) if x is not None]
    num_parts = 1 if kv_heads_at_once is None else key.shape[1] // kv_heads_at_once
    parts = list(zip(*(x.chunk(num_parts, 1) for x in raw), strict=True))
    queries, gate_parts = query.chunk(num_parts, 1), gates.chunk(num_parts, 1)
    compressed_parts = list(zip(*(_chunks(x, num_parts) for x in compressed), strict=True))

    outputs, coming = [], shards.send(*parts[0])
    for part in range(num_parts):
        whole = coming.arrived()
        if part + 1 < num_parts:
            coming = shards.send(*parts[part + 1])
        outputs.append(
            _attend_chunks(
                (queries[part], gate_parts[part]),
                whole,
                compressed_parts[part],
                shards,
                config,
                scale,
                backend,
                query_offset,
                document_start,
            )
        )
    return torch.cat(outputs, 1)


def gather_compressed(
    compress_key: Compression,
    compress_value: Compression,
    key: Tensor,
    value: Tensor,
    shards: SequenceShards,
    config: NSAConfig,
) -> tuple[Tensor | None, Tensor | None]:
    """Compressed keys and values (B, Hkv, N, D) of whole sequences from shards (B, Hkv, T, D).

    None in the place of what no branch of the config reads. Each rank compresses the blocks that
    begin in its chunks. One that does so in the last l - d tokens ends in the next chunk, whose
    first tokens have been gathered.
    """
    read = _num_compressed(config)
    if read == 0:
        return None, None
    own_blocks = key.shape[2] // 2 // config.compress_stride
    num_blocks = config.num_compressed_blocks(shards.size * key.shape[2])
    rows = [*_with_halos((key, value)[:read], shards, config), value][:2]
    blocks = compress_what_is_read(compress_key, compress_value, *rows)
    own = [x[:, :, :own_blocks] for x in blocks if x is not None]  # [2B, Hkv, C/d, D]
    whole = shards.gather(*(torch.cat(x.chunk(2), 2) for x in own))
    found = [x[:, :, :num_blocks] for x in whole]  # the last ones reach behind the sequence
    return found[0], found[1] if read == 2 else None


def _chunks(x: Tensor | None, number: int) -> Sequence[Tensor | None]:
    """Some KV heads at a time."""
    return [None] * number if x is None else x.chunk(number, 1)


def _num_compressed(config: NSAConfig) -> int:
    """Of compressed keys and compressed values, how many some branch reads."""
    return 2 if config.has("compressed") else int(config.has("selected"))


def _with_halos(
    tensors: tuple[Tensor, ...], shards: SequenceShards, config: NSAConfig
) -> list[Tensor]:
    """Both chunks of each shard as rows, with the l - d tokens behind: (2B, H, C + l - d, D)."""
    halo = config.compress_block_size - config.compress_stride
    chunks = [x.chunk(2, 2) for x in tensors]
    if halo == 0:
        return [torch.cat(x) for x in chunks]
    heads = [torch.cat([chunk[:, :, :halo] for chunk in x], 2) for x in chunks]
    rows = []
    for own, first in zip(chunks, shards.gather(*heads), strict=True):
        # Behind the last chunk come tokens of no block that is kept.
        behind = first.roll(-halo, 2).split(halo, 2)
        pairs = zip(own, shards.chunks, strict=True)
        rows.append(torch.cat([torch.cat((x, behind[c]), 2) for x, c in pairs]))
    return rows


def _attend_chunks(
    own: tuple[Tensor, Tensor],
    raw: list[Tensor],
    compressed: tuple[Tensor | None, ...],
    shards: SequenceShards,
    config: NSAConfig,
    scale: float | None,
    backend: Backend,
    query_offset: int | None,
    document_start: Tensor | None,
) -> Tensor:
    """Of each of this rank's chunks of queries against the keys up to its end.

    Args:
        own: queries and gates of this rank.
        raw: keys, values, those of the window if it has its own.
        compressed: compressed keys and values.
    """
    tokens, length = own[0].shape[2], raw[0].shape[2]
    first = length - shards.size * tokens if query_offset is None else query_offset
    outputs = []
    for half, c in enumerate(shards.chunks):
        span = slice(half * (tokens // 2), (half + 1) * (tokens // 2))
        offset = first + c * (tokens // 2)
        end = offset + tokens // 2
        num_blocks = max(2, config.num_compressed_blocks(end))
        key, value, *sliding = (x[:, :, :end] for x in raw)
        compressed_key, compressed_value = (
            x if x is None else x[:, :, :num_blocks] for x in compressed
        )
        outputs.append(
            nsa_attention(
                own[0][:, :, span],
                key,
                value,
                compressed_key,
                compressed_value,
                own[1][:, :, span],
                config=config,
                scale=scale,
                backend=backend,
                sliding_key=sliding[0] if sliding else None,
                sliding_value=sliding[1] if sliding else None,
                query_offset=offset,
                document_start=None if document_start is None else document_start[:, span],
            )
        )
    return torch.cat(outputs, 2)


def check_shard(num_tokens: int, shards: SequenceShards, config: NSAConfig) -> None:
    """ValueError unless each of the two chunks of a shard is whole selectable blocks."""
    size = config.select_block_size
    if num_tokens < 1 or num_tokens % (2 * size):
        raise ValueError(
            f"a shard has {num_tokens} tokens; expected a multiple of 2 * select_block_size = "
            f"{2 * size}: pad sequences at their end to a multiple of 2 * {shards.size} ranks * "
            f"{size} = {2 * shards.size * size} tokens, as nsa_flex.shard_batch does"
        )


def _check(
    query: Tensor,
    key: Tensor,
    shards: SequenceShards,
    config: NSAConfig,
    kv_heads_at_once: int | None,
) -> None:
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"query and key must be 4-D (B, H, T, D), got {tuple(query.shape)} and "
            f"{tuple(key.shape)}"
        )
    check_shard(key.shape[2], shards, config)
    if query.shape[2] % 2:
        raise ValueError(f"query has {query.shape[2]} tokens; expected two chunks, an even number")
    heads = key.shape[1]
    if query.shape[1] % heads:
        raise ValueError(
            f"key has {heads} heads; query's {query.shape[1]} must be a multiple of it"
        )
    if kv_heads_at_once is not None and (kv_heads_at_once < 1 or heads % kv_heads_at_once):
        raise ValueError(
            f"kv_heads_at_once={kv_heads_at_once} must be a divisor of the {heads} KV heads"
        )


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

    >>> sent_bytes(2**20, 8, 8, 128, config=NSAConfig())
    SentBytes(forward=3993894912, backward=7987789824)
    """
    own = num_tokens // num_ranks
    halo = 2 * (config.compress_block_size - config.compress_stride)
    dims = (head_dim, head_dim if value_head_dim is None else value_head_dim)
    raw = own * (2 if separate_branch_kv else 1) * sum(dims)
    compressed = (own // config.compress_stride + halo) * sum(dims[: _num_compressed(config)])
    learned = compressed if config.has("compressed") else 0  # choosing blocks has no gradient
    times = (num_ranks - 1) * batch_size * num_kv_heads
    wide = torch.promote_types(dtype, torch.float32)
    return SentBytes(
        times * (raw + compressed) * dtype.itemsize, times * (raw + learned) * wide.itemsize
    )
