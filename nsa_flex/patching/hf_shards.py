"""What the caller of a patched decoder passed, where each row is a shard of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.parallel import SequenceShards
from nsa_flex.parallel.attention import check_shard
from nsa_flex.patching.hf_layers import Attention
from nsa_flex.patching.hf_versions import cache_of
from nsa_flex.patching.layer import layer_of
from nsa_flex.patching.rows import Rows
from nsa_flex.patching.sharded_cache import ShardedNSACache

# On CUDA a message may have 254 characters; Inductor for the CPU takes no quotation marks.
SHARD_RULE = (
    "position_ids of a shard break the rule: each is the place in the whole sequence less that of "
    "the first token of its document, which is a multiple of select_block_size, as "
    "nsa_flex.shard_batch gives them"
)


def shards_of(module: Attention) -> SequenceShards | None:
    """What `context_parallel` gave a patched attention module, or None."""
    layer = layer_of(module)
    return None if layer is None else layer.shards


def take_sharded_cache(call: dict[str, Any], tokens: Tensor) -> ShardedNSACache | None:
    """The cache that ranks share, taken out of the call: no decoder need know of it."""
    cache = cache_of(call)
    if not isinstance(cache, ShardedNSACache):
        return None
    if call.get("position_ids") is not None:
        raise ValueError(
            "position_ids with a ShardedNSACache: leave them out, it counts the tokens of each row"
        )
    if not cache.first.is_empty:
        call["position_ids"] = cache.first.positions(tokens.shape[1])
    for name in [name for name, x in call.items() if x is cache]:
        del call[name]
    call["use_cache"] = False
    return cache


def shard_rows(
    call: dict[str, Any],
    tokens: Tensor,
    shards: SequenceShards,
    config: NSAConfig,
    cache: ShardedNSACache | None,
) -> Rows:
    """Positions and documents of a call in `context_parallel`; `call` is given what it lacks.

    Args:
        call: arguments of the decoder.
        tokens: (B, T, ...), this rank's; of a step over `cache` those of every rank.

    Raises:
        ValueError: the call has a cache, or a mask or bounds of documents, which are those of the
            shard alone; or T is not two chunks of whole blocks.
    """
    if cache_of(call) is not None or call.get("use_cache"):
        raise ValueError(
            "nsa_flex.context_parallel takes no cache but a ShardedNSACache: pass one, or "
            "use_cache=False and no past_key_values"
        )
    for name in ("attention_mask", "cu_seq_lens_q"):
        if call.get(name) is not None:
            raise ValueError(
                f"{name} in nsa_flex.context_parallel: give it to nsa_flex.shard_batch, which "
                "lays padding and documents out before sequences are shared out, and not to the "
                "model"
            )
    if cache is not None and not cache.first.is_empty:
        return Rows()
    batch, length = tokens.shape[:2]
    check_shard(length, shards, config)
    call["use_cache"] = False  # a decoder would make a cache of its shard
    places = shards.positions(length, tokens.device)
    position_ids = call.get("position_ids")
    if position_ids is None:
        call["position_ids"] = places[None]
        return Rows()
    if position_ids.dim() != 2:
        raise ValueError(
            f"position_ids has shape {tuple(position_ids.shape)}; nsa_flex.context_parallel takes "
            "(batch, tokens)"
        )
    start = places - position_ids
    torch._assert_async(_follow(start, places, shards, config), SHARD_RULE)
    return Rows(shard_start=start.to(torch.int32).expand(batch, length))


def _follow(start: Tensor, places: Tensor, shards: SequenceShards, config: NSAConfig) -> Tensor:
    """Whether documents begin at whole blocks, and other tokens go on with their document.

    The first of a chunk goes on with what another rank has: one small collective a call.
    """
    begins = start == places
    follows = start[:, 1:] == start[:, :-1]
    chunk = places.shape[0] // 2
    ends = torch.stack((start[:, ::chunk], start[:, chunk - 1 :: chunk]), -1)  # [B, 2, 2]
    first, last = shards.gather(ends[:, None])[0][:, 0].unbind(-1)  # [B, 2P] each
    before = torch.nn.functional.pad(last[:, :-1], (1, 0))  # the first document begins at 0
    chunks = torch.arange(first.shape[1], device=places.device) * chunk
    inside = torch.arange(1, 2 * chunk, device=places.device) != chunk
    return (
        (start % config.select_block_size == 0).all()
        & (follows | begins[:, 1:] | ~inside).all()
        & ((first == before) | (first == chunks)).all()
    )
