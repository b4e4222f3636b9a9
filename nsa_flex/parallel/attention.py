"""NSA of sequences whose tokens are shared out over ranks (context parallelism).

What a rank sends in a layer's forward, in this order, each by one all-gather of its own shard:

1. the first l - d tokens of its chunks, for blocks that reach from one chunk into the next; of
   keys and values that only the window reads the last w - 1, which the next chunk's queries see;
2. its keys and values if there is a selected branch, some KV heads at a time: the first are on
   their way while φ runs, those of the next heads while the heads before attend;
3. its compressed keys and values, 1/d of the bytes.

The backward sums the gradients of both chunks of a rank in float32 and reduce-scatters them so;
those of keys and values are on their way while φ is differentiated. Queries, gates and outputs
never leave their rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.attention import nsa_attention
from nsa_flex.compression import Compression, branched, compress_what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.parallel.sent import num_compressed, num_tail
from nsa_flex.parallel.shards import Sent, SequenceShards

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
        sliding_key, sliding_value: of the window; key and value if None. Where Tq = T a rank is
            sent no more of what only the window reads than its window sees.
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
    own_window = [x for x in (sliding_key, sliding_value) if x is not None]
    first = check_shards(query, key, value, own_window, query_offset, shards, config)
    heads = key.shape[1]
    if kv_heads_at_once is not None and (kv_heads_at_once < 1 or heads % kv_heads_at_once):
        raise ValueError(
            f"kv_heads_at_once={kv_heads_at_once} must be a divisor of the {heads} KV heads"
        )
    if compressed_source is None:
        (key, source_key), (value, source_value) = branched(key), branched(value)
        compressed_source = source_key, source_value
    chunk = query.shape[2] // 2
    sources = compressed_source[: num_compressed(config)]
    halos = _send_halos(sources, shards, config)
    whole_rows = [key, value] if config.has("selected") else []
    # What only the window reads.
    window = own_window or ([] if whole_rows else [key, value])
    window = window if config.has("sliding") else []
    # Queries that are not at the places of this rank's keys have their window anywhere.
    is_near = query.shape[2] == key.shape[2] and first == 0
    tails = _send_tails(window, shards, config) if is_near and window else None
    raw = [*whole_rows, *([] if is_near else window)]
    num_parts = 1 if kv_heads_at_once is None else key.shape[1] // kv_heads_at_once
    parts = list(zip(*(x.chunk(num_parts, 1) for x in raw), strict=True))
    coming = [shards.send(*parts[0])] if raw else []
    blocks = _compress(compress_key, compress_value, compressed_source, halos, shards, config)
    coming_blocks = [shards.send(*blocks)] if blocks else []

    offsets = [first + c * chunk for c in shards.chunks]
    ends = [offset + chunk for offset in offsets]
    of_queries = [_halves(x, num_parts) for x in (query, gates)]
    starts = (None, None) if document_start is None else document_start.chunk(2, 1)
    windows = _windows(window, tails, num_parts, shards, config)

    def arrived(part: int) -> list[list[Tensor]]:
        """Of both chunks keys and values up to the end, then those of a window of its own."""
        if raw:  # what arrives is copied into order
            return coming.pop().arrived_until(*ends, windows=windows[part])
        if not window:  # nobody reads them
            rows = [x.detach().chunk(num_parts, 1)[part][:, :, :1] for x in (key, value)]
            return [[x.expand(-1, -1, end, -1) for x in rows] for end in ends]
        pairs = zip(ends, (windows[part][:2], windows[part][2:]), strict=True)
        return [[F.pad(x, (0, 0, end - x.shape[2], 0)) for x in own] for end, own in pairs]

    # Lists give up what came, and the part before.
    whole = arrived(0)
    compressed = _arrived_compressed(coming_blocks, ends, num_parts, config)

    def attend(part: int, half: int, key: Tensor, value: Tensor, *sliding: Tensor) -> Tensor:
        own_query, own_gates = (x[part][half] for x in of_queries)
        return nsa_attention(
            *(own_query, key, value, *compressed[part][half], own_gates),
            config=config,
            scale=scale,
            backend=backend,
            sliding_key=sliding[0] if sliding else None,
            sliding_value=sliding[1] if sliding else None,
            query_offset=offsets[half],
            document_start=starts[half],
        )

    outputs = []
    for part in range(num_parts):
        if part > 0:
            whole = arrived(part)
        if raw and part + 1 < num_parts:
            coming.append(shards.send(*parts[part + 1]))
        halves = [attend(part, half, *tensors) for half, tensors in enumerate(whole)]
        whole.clear()
        outputs.append(torch.cat(halves, 2))
    return torch.cat(outputs, 1)


def _halves(x: Tensor, num_parts: int) -> list[tuple[Tensor, ...]]:
    """Of each part of the heads this rank's two chunks."""
    return [part.chunk(2, 2) for part in x.chunk(num_parts, 1)]


def _arrived_compressed(
    coming: list[Sent], ends: Sequence[int], num_parts: int, config: NSAConfig
) -> list[list[tuple[Tensor | None, Tensor | None]]]:
    """Compressed keys and values that have arrived: of each part of the KV heads and each chunk
    those that it may see, as `nsa_attention` takes them for keys up to the chunk's end.

    None in the place of what no branch of the config reads.
    """
    if not coming:
        return [[(None, None)] * len(ends)] * num_parts
    found: list[list[tuple[Tensor | None, Tensor | None]]] = [[] for _ in range(num_parts)]
    counts = [max(2, config.num_compressed_blocks(end)) for end in ends]
    for tensors in coming.pop().arrived_until(*counts):
        of_parts = zip(*(x.chunk(num_parts, 1) for x in tensors), strict=True)
        for part, own in zip(found, of_parts, strict=True):
            part.append((own[0], own[1] if len(own) == 2 else None))
    return found


def _halo(config: NSAConfig) -> int:
    """l - d: tokens of the next chunk that a chunk's last blocks reach into."""
    return config.compress_block_size - config.compress_stride


def _send_halos(
    tensors: Sequence[Tensor], shards: SequenceShards, config: NSAConfig
) -> Sent | None:
    """Begin to gather the first tokens of each chunk; None if nobody reads them."""
    halo = _halo(config)
    if halo == 0 or not tensors:
        return None
    heads = [[chunk[:, :, :halo] for chunk in x.chunk(2, 2)] for x in tensors]
    return shards.send(*(torch.cat(x, 2) for x in heads))


def _send_tails(window: Sequence[Tensor], shards: SequenceShards, config: NSAConfig) -> Sent:
    """Begin to gather the last tokens of each chunk, which windows of later chunks reach."""
    tail = num_tail(window[0].shape[2] // 2, config)
    chunks = [x.chunk(2, 2) for x in window]
    return shards.send(*(torch.cat([x[:, :, -tail:] for x in each], 2) for each in chunks))


def _windows(
    window: Sequence[Tensor],
    tails: Sent | None,
    num_parts: int,
    shards: SequenceShards,
    config: NSAConfig,
) -> list[tuple[Tensor, ...]]:
    """Of each part of the heads what the windows of the two chunks see, keys and values of the
    first, then of the second: the chunk behind w - 1 tokens before it, where there are as many.
    """
    if tails is None:
        return [()] * num_parts
    before = tails.arrived_until(*(c * tails.sizes[0][1] for c in shards.chunks))
    chunks = zip(*(x.chunk(2, 2) for x in window), strict=True)
    pairs = zip(chain(*before), chain(*chunks), strict=True)
    seen = [torch.cat((x[:, :, -(config.window_size - 1) :], own), 2) for x, own in pairs]
    return list(zip(*(x.chunk(num_parts, 1) for x in seen), strict=True))


def _compress(
    compress_key: Compression,
    compress_value: Compression,
    sources: tuple[Tensor, Tensor],
    halos: Sent | None,
    shards: SequenceShards,
    config: NSAConfig,
) -> list[Tensor]:
    """The blocks that begin in this rank's chunks, (B, Hkv, T/d, D): keys, and values if read.

    One that begins in the last l - d tokens of a chunk ends in the next chunk.
    """
    read = num_compressed(config)
    if read == 0:
        return []
    own_blocks = sources[0].shape[2] // 2 // config.compress_stride
    chunks = [x.chunk(2, 2) for x in sources[:read]]
    if halos is None:
        rows = [torch.cat(x) for x in chunks]
    else:
        # Behind the last chunk come tokens of no block that is kept.
        firsts = [x.roll(-_halo(config), 2).split(_halo(config), 2) for x in halos.arrived()]
        rows = []
        for own, first in zip(chunks, firsts, strict=True):
            pairs = zip(own, shards.chunks, strict=True)
            rows.append(torch.cat([torch.cat((x, first[c]), 2) for x, c in pairs]))
    blocks = compress_what_is_read(compress_key, compress_value, *[*rows, sources[1]][:2])
    kept = [x[:, :, :own_blocks] for x in blocks if x is not None]  # [2B, Hkv, C/d, D]
    return [torch.cat(x.chunk(2), 2) for x in kept]


def check_shard(num_tokens: int, shards: SequenceShards, config: NSAConfig) -> None:
    """ValueError unless each of the two chunks of a shard is whole selectable blocks."""
    size = config.select_block_size
    if num_tokens < 1 or num_tokens % (2 * size):
        raise ValueError(
            f"a shard has {num_tokens} tokens; expected a multiple of 2 * select_block_size = "
            f"{2 * size}: pad sequences at their end to a multiple of 2 * {shards.size} ranks * "
            f"{size} = {2 * shards.size * size} tokens, as nsa_flex.shard_batch does"
        )


def check_shards(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_window: Sequence[Tensor],
    query_offset: int | None,
    shards: SequenceShards,
    config: NSAConfig,
) -> int:
    """The whole sequence's first query's place among its keys.

    Raises:
        ValueError: shards do not fit. All ranks find that alike, before anything is sent.
    """
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
    if len(own_window) == 1:
        raise ValueError("sliding_key and sliding_value must be given together")
    for name, own, other in zip(("key", "value"), own_window, (key, value), strict=False):
        if own.shape != other.shape:
            raise ValueError(
                f"sliding_{name} has shape {tuple(own.shape)}; expected {tuple(other.shape)}, "
                f"that of {name}"
            )
    num_queries, num_keys = (shards.size * x.shape[2] for x in (query, key))
    first = num_keys - num_queries if query_offset is None else query_offset
    if first < 0 or first + num_queries > num_keys:
        raise ValueError(
            f"query_offset={first} with {num_queries} queries leaves the {num_keys} keys of all "
            "ranks"
        )
    return first
