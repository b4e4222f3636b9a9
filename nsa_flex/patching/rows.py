"""What attention must know of the call that it is part of: padding, documents, cached keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.documents import DocumentLayout, gather_real
from nsa_flex.joined import JoinedInput
from nsa_flex.parallel.heads import HeadShards


class Rows(NamedTuple):
    """How queries, and keys and values, are moved before attention, and the output back.

    queries: layout of the queries (and gates); None leaves them where they are.
    keys: layout of keys and values; None leaves them where they are.
    query_offset: key index of query 0 after the move: an int, an int tensor (B,), or None for
        "the queries are the last tokens of the keys".
    shard_start: of a shard of a sequence, int (B, Sq), place in the whole sequence of the first
        token of each query's document; None where rows are one document.
    head_shards: the ranks that share heads, where this one has whole sequences with some of them.
    """

    queries: DocumentLayout | None = None
    keys: DocumentLayout | None = None
    query_offset: int | Tensor | None = None
    shard_start: Tensor | None = None
    head_shards: HeadShards | None = None


def packed_rows(layout: DocumentLayout) -> Rows:
    """Rows of packed documents, all of whose tokens are in this call."""
    return Rows(queries=layout, keys=layout)


def padded_rows(
    attention_mask: Tensor, num_queries: int, query_offset: int | Tensor | None = None
) -> Rows:
    """Rows of a padded batch: each is computed as its real tokens alone.

    Args:
        attention_mask: (B, Sk), nonzero at real tokens: padded on the left, on the right, or with
            gaps, as a right-padded prompt that generation went on from has.
        num_queries: Sq; the queries are the tokens at query_offset ... query_offset + Sq - 1.
        query_offset: number of cached tokens before the queries, int or integer tensor of one
            element; Sk - Sq if None.

    Returns:
        rows whose padding tokens come behind the real ones, where causal attention never looks.
    """
    num_keys = attention_mask.shape[1]
    real = attention_mask != 0
    keys = gather_real(real)
    if num_queries == num_keys:
        return Rows(queries=keys, keys=keys)
    if query_offset is None:
        query_offset = num_keys - num_queries
    place = torch.arange(num_keys, device=real.device)
    cached = (real & (place < query_offset)).sum(1)
    chunk = real.index_select(1, query_offset + torch.arange(num_queries, device=real.device))
    queries = gather_real(chunk) if num_queries > 1 else None
    return Rows(queries=queries, keys=keys, query_offset=cached)


class CallContext(NamedTuple):
    """One call of a patched decoder: the keyword argument `nsa_call`.

    rows: padding, packed documents or cached keys, where keys and values come whole.
    cache: transformers cache whose `LayerCache`s have the keys and were told of the padding, or
        None; then `rows` moves nothing.
    passed: names of the arguments that the caller of the decoder passed.
    paged: the engine's batch and pages if continuous batching calls, else None; then there is
        neither `rows` nor `cache`.
    full_masks: whether masks of the former implementation are made for full attention, because
        some layers with full attention are unpatched.
    """

    rows: Rows = Rows()
    cache: Any = None
    passed: tuple[str, ...] = ()
    full_masks: bool = False
    paged: Any = None


class LayerInput(NamedTuple):
    """What a patched attention module was called with: the keyword argument `nsa_input`.

    hidden_states: (B, S, E), from which the gates come.
    attention_mask: as the module got it.
    joined: what stands for the input in the module's own projections, with the logits of the
        gates; or None.
    """

    hidden_states: Tensor
    attention_mask: Any
    joined: JoinedInput | None = None
