"""What the caller of a patched decoder passed, where attention exchanges tokens for heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nsa_flex.parallel.heads import HeadShards
from nsa_flex.patching.hf_layers import Attention
from nsa_flex.patching.hf_versions import cache_of
from nsa_flex.patching.layer import layer_of
from nsa_flex.patching.rows import Rows


def head_shards_of(module: Attention) -> HeadShards | None:
    """What `sequence_parallel` gave a patched attention module, or None."""
    layer = layer_of(module)
    return None if layer is None else layer.head_shards


def whole_rows(
    call: dict[str, Any],
    tokens: Tensor,
    shards: HeadShards,
    rows_of: Callable[[dict[str, Any]], Rows],
) -> Rows:
    """Positions, padding and documents of whole rows; `call` gets this rank's positions.

    Args:
        call: arguments of the decoder.
        tokens: (B, T, ...), this rank's.
        shards: the ranks.
        rows_of: makes rows of the arguments of a call; it may set `position_ids` in them.

    Raises:
        ValueError: the call has a cache, or bounds of documents, which are those of this rank.
    """
    if cache_of(call) is not None or call.get("use_cache"):
        raise ValueError(
            "a cache in nsa_flex.sequence_parallel is not supported: pass use_cache=False and no "
            "past_key_values"
        )
    if call.get("cu_seq_lens_q") is not None:
        raise ValueError(
            "cu_seq_lens_q in nsa_flex.sequence_parallel: pass position_ids that restart at each "
            "document, this rank's part of those of the whole row"
        )
    call["use_cache"] = False
    batch, length = tokens.shape[0], tokens.shape[1] * shards.size
    whole: dict[str, Any] = {"input_ids": tokens.new_empty((batch, length)), "use_cache": False}
    for name in ("attention_mask", "position_ids"):
        if call.get(name) is not None:
            whole[name] = shards.gather_rows(call[name].expand(batch, -1))
    rows = rows_of(whole)
    if "position_ids" not in whole:
        whole["position_ids"] = torch.arange(length, device=tokens.device)[None]
    call["position_ids"] = shards.own_tokens(whole["position_ids"])
    return rows._replace(head_shards=shards)
