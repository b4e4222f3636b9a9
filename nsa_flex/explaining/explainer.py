"""`explain`: which backends and kernels a call runs, without running it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.backends.branch import Inputs
from nsa_flex.cache.layer import LayerCache
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend, choose_backends, is_decoded, is_fused
from nsa_flex.explaining.calls import AttentionCall, kernels_of, rehearse_cached
from nsa_flex.explaining.explanation import Explanation
from nsa_flex.explaining.rehearsal import with_index
from nsa_flex.inputs import check_documents, check_positions, check_shapes, check_tensors
from nsa_flex.parallel import SequenceShards, exchanged_bytes, sent_bytes
from nsa_flex.parallel.attention import check_shard


def explain(
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    config: NSAConfig | None = None,
    cache: LayerCache | None = None,
    backend: Backend = "auto",
    device: torch.device | str | None = None,
    sliding_key: Tensor | None = None,
    sliding_value: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    document_start: Tensor | None = None,
    max_document_length: int | None = None,
    needs_grad: bool | None = None,
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards | None = None,
    exchange_heads: bool = False,
) -> Explanation:
    """Says what `nsa_attention`, or a step over a cache, would run, without running it.

    The names of kernels are those that profilers show. They are found by going through the call
    with tensors that hold nothing, so that they are the ones that the same call launches.

    Args:
        query, key, value: as for `nsa_attention`; meta tensors will do.
        config: as for `nsa_attention`; the paper's by default.
        cache: in place of key, value and config: the layer's cache before the tokens of `query`
            are stored in it. Told is what storing and attending them would run; it stays as it is.
        device: pretend that the tensors are there. Where there is no CUDA device, one of compute
            capability 9.0 is meant.
        sliding_key, sliding_value, query_offset, document_start, max_document_length: as for
            `nsa_attention`.
        needs_grad: pretend that a backward pass follows; by default as the tensors say.
        mesh: of `context_parallel_attention`, of whose shards the tensors are one. Told are the
            bytes that a rank sends, and what its last tokens run, which attend the most keys;
            `SequenceShards("", rank, size)` stands for ranks that are not there.
        exchange_heads: the ranks of `mesh` exchange tokens for heads, as `sequence_parallel` has
            it. Told are the bytes, and what whole rows of this rank's heads run.

    Raises:
        ValueError: shapes, dtypes or places that the call would not take, a backend that cannot
            compute what was asked of it, not one of key and cache, or with a cache what it
            decides itself.

    >>> q, k = torch.empty(1, 8, 64, 64, device="meta"), torch.empty(1, 2, 64, 64, device="meta")
    >>> print(explain(q, k, device="cpu")["sliding"].backend)
    dense
    """
    where = with_index(query.device if device is None else torch.device(device))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x is not None and x.dim() != 4:
            raise ValueError(f"{name} must be 4-D (B, H, S, D), got {tuple(x.shape)}")
    if cache is not None:
        if key is not None or value is not None:
            raise ValueError("key and cache were both given: the cache knows its keys")
        _refuse_beside(
            "cache",
            "the cache decides",
            config=config,
            sliding_key=sliding_key,
            sliding_value=sliding_value,
            query_offset=query_offset,
            document_start=document_start,
            max_document_length=max_document_length,
            needs_grad=needs_grad or None,
            mesh=mesh,
            exchange_heads=exchange_heads or None,
        )
        _check_query(query, cache)
        choices, kernels = rehearse_cached(query, cache, backend, where)
        return Explanation(choices, lambda: kernels)
    if exchange_heads and mesh is None:
        raise ValueError("exchange_heads needs the ranks that exchange them: pass mesh")
    if mesh is not None and key is not None:
        tensors = (query, key, value, sliding_key, sliding_value)
        over_ranks = _with_heads_exchanged if exchange_heads else _over_ranks
        return over_ranks(
            *(query, key, key if value is None else value),
            NSAConfig() if config is None else config,
            SequenceShards.of(mesh),
            backend=backend,
            device=where,
            sliding_key=sliding_key,
            sliding_value=sliding_value,
            query_offset=query_offset,
            document_start=document_start,
            max_document_length=max_document_length,
            needs_grad=_needs_grad(*tensors) if needs_grad is None else needs_grad,
        )
    if key is None:
        raise ValueError("neither key nor cache was given: pass the keys, or a layer's cache")
    value = key if value is None else value
    config = NSAConfig() if config is None else config
    if not isinstance(config, NSAConfig):
        raise TypeError(f"config must be an NSAConfig, got {type(config).__name__}")
    if (sliding_key is None) != (sliding_value is None):
        raise ValueError("sliding_key and sliding_value must be given together")
    given = {"query": query, "key": key, "value": value}
    if sliding_key is not None and sliding_value is not None:
        given |= {"sliding_key": sliding_key, "sliding_value": sliding_value}
    check_tensors(given, own_dtype="")
    batch, kv_heads, kv_len = query.shape[0], *key.shape[1:3]
    rows = {"key": query.shape[3], "value": value.shape[3]}
    expected = {name: (batch, kv_heads, kv_len, width) for name, width in rows.items()}
    if sliding_key is not None:
        expected |= {f"sliding_{name}": shape for name, shape in expected.items()}
    check_shapes(given, expected)
    check_positions(query, key, query_offset, document_start)
    check_documents(document_start, max_document_length)
    own = None if sliding_key is None or sliding_value is None else (sliding_key, sliding_value)
    inputs = Inputs(query, key, value, key, value, *(own or (key, value)), gates=query)
    needs_grad = inputs.need_grad() if needs_grad is None else needs_grad
    inputs = inputs.seen(config, query_offset, needs_grad)
    key, value = inputs.key, inputs.value
    own = None if own is None else (inputs.sliding_key, inputs.sliding_value)
    facts = replace(
        inputs.facts(config, query_offset, document_start),
        device_type=where.type,
        needs_grad=needs_grad,
    )
    choices = choose_backends(facts, backend)
    num_tokens, documents = query.shape[2], document_start is not None
    every_block = config.selects_every_block(num_tokens, documents, max_document_length)
    if is_fused(choices, facts) and facts.whole and every_block:
        why = f"documents of up to {config.num_selected_tokens} tokens, which select every block"
        choices = {name: replace(choice, reason=why) for name, choice in choices.items()}
    call = AttentionCall(
        (query, key, value),
        own,
        config,
        backend,
        query_offset,
        document_start,
        max_document_length,
        facts.needs_grad,
        is_fused(choices, facts) and not is_decoded(facts, backend),
    )
    return Explanation(choices, lambda: kernels_of(call, where))


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _refuse_beside(other: str, why: str, **given: object) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} and {other} were both given: {why}")


def _over_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    shards: SequenceShards,
    *,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
    max_document_length: int | None,
    **options: Any,
) -> Explanation:
    """Of shards (B, H, T, D): the later of this rank's two chunks, and the keys up to its end."""
    _refuse_beside(
        "mesh",
        "context_parallel_attention takes no such argument",
        max_document_length=max_document_length,
    )
    if isinstance(query_offset, Tensor):
        raise TypeError("query_offset is a Tensor; with mesh it must be an int")
    check_shard(key.shape[2], shards, config)
    chunk, later = query.shape[2] // 2, shards.chunks[1]
    past = shards.size * (key.shape[2] - query.shape[2]) if query_offset is None else query_offset
    end = past + (later + 1) * chunk

    def whole(x: Tensor | None, tokens: int = end) -> Any:
        return (
            None if x is None else x.new_empty((*x.shape[:2], tokens, x.shape[3]), device="meta")
        )

    found = explain(
        *(whole(query, chunk), whole(key), whole(value)),
        config=config,
        sliding_key=whole(sliding_key),
        sliding_value=whole(sliding_value),
        document_start=None if document_start is None else document_start[:, chunk:].to("meta"),
        **options,
    )
    sent = sent_bytes(
        shards.size * key.shape[2],
        *(shards.size, key.shape[1], key.shape[3]),
        config=config,
        value_head_dim=value.shape[3],
        batch_size=key.shape[0],
        dtype=value.dtype,
        separate_branch_kv=sliding_key is not None,
        num_queries=shards.size * query.shape[2],
    )
    return replace(found, ranks=shards.size, sent=sent)


def _with_heads_exchanged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    config: NSAConfig,
    shards: SequenceShards,
    *,
    sliding_key: Tensor | None,
    sliding_value: Tensor | None,
    query_offset: int | Tensor | None,
    document_start: Tensor | None,
    **options: Any,
) -> Explanation:
    """Of a run of tokens (B, H, T, D) of every row: whole rows of some heads."""
    _refuse_beside(
        "exchange_heads",
        "layers have none",
        sliding_key=sliding_key,
        sliding_value=sliding_value,
        query_offset=query_offset,
    )
    (batch, heads, tokens, dim), kv_heads, ranks = query.shape, key.shape[1], shards.size
    if kv_heads % ranks:
        raise ValueError(
            f"key has {kv_heads} heads; {ranks} ranks that exchange tokens for heads need a "
            f"multiple of {ranks}"
        )
    tensors = (
        x.new_empty((batch, x.shape[1] // ranks, ranks * x.shape[2], x.shape[3]), device="meta")
        for x in (query, key, value)
    )
    start = document_start
    if start is not None:
        start = start.new_empty((batch, ranks * start.shape[1]), device="meta")
    found = explain(*tensors, config=config, document_start=start, **options)
    sent = exchanged_bytes(
        *(ranks * tokens, ranks, heads, kv_heads, dim),
        config=config,
        value_head_dim=value.shape[3],
        batch_size=batch,
        dtype=value.dtype,
    )
    return replace(found, ranks=ranks, sent=sent)


def _check_query(query: Tensor, cache: LayerCache) -> None:
    """That queries of this shape could be a call over the cache."""
    heads, dim = query.shape[1], query.shape[3]
    phi = cache.compress_key
    if heads % phi.num_kv_heads or dim != phi.head_dim:
        raise ValueError(
            f"query has {heads} heads of {dim}, the cache {phi.num_kv_heads} of {phi.head_dim}"
        )
    if cache.is_initialized and query.shape[0] != cache.batch_size:
        raise ValueError(f"query has {query.shape[0]} rows, the cache holds {cache.batch_size}")
