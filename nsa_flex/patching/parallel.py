"""`context_parallel`: the layers of a model attend sequences that are shared out over ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.module import NSAAttention
from nsa_flex.parallel import SequenceShards
from nsa_flex.patching.layer import NSALayer, layer_of
from nsa_flex.patching.sites import Site, find_sites

ModelT = TypeVar("ModelT", bound=nn.Module)


def context_parallel(
    model: ModelT,
    mesh: DeviceMesh | dist.ProcessGroup | None,
    *,
    kv_heads_at_once: int | None = None,
) -> ModelT:
    """Let `model` run on shards of sequences: each rank of `mesh` has 1 / P of every row's tokens.

    In place. Give each rank its part by `shard_batch`, or `shard_sequence` for `NSAAttention`;
    the layers exchange keys and values (`context_parallel_attention`). Parameters are replicated
    over the mesh as in data parallelism: wrap the model with DDP or `fully_shard` over these
    ranks too, which mean gradients over them.

    Args:
        model: an `NSAAttention`, a patched transformers decoder, or a model that holds such.
        mesh: of one dimension (`mesh["cp"]` of a larger one), or a process group. None undoes it.
        kv_heads_at_once: as of `context_parallel_attention`, a divisor of each layer's KV heads.

    Returns:
        `model`.

    Raises:
        ValueError: the model has no NSA layer, or layers that would see this rank's tokens alone:
            attention that is not patched, recurrent layers, or layers run by an adapter. It is
            then as it was.
    """
    layers = list(_layers(model))
    if mesh is not None:
        _check(model, layers, kv_heads_at_once)
    shards = None if mesh is None else SequenceShards.of(mesh)
    for layer in layers:
        layer.shards = shards
        layer.kv_heads_at_once = None if mesh is None else kv_heads_at_once
    return model


def _layers(model: nn.Module) -> Iterator[NSALayer | NSAAttention]:
    for module in model.modules():
        if isinstance(module, (NSALayer, NSAAttention)):
            yield module


def _check(
    model: nn.Module, layers: list[NSALayer | NSAAttention], kv_heads_at_once: int | None
) -> None:
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no NSA layers: call nsa_flex.patch(model) first"
        )
    for layer in layers:
        heads = layer.num_kv_heads if isinstance(layer, NSAAttention) else layer.shape.num_kv_heads
        if kv_heads_at_once is not None and (kv_heads_at_once < 1 or heads % kv_heads_at_once):
            raise ValueError(
                f"kv_heads_at_once={kv_heads_at_once} must be a divisor of the {heads} KV heads"
            )
    for site in find_sites(model):
        _check_site(site)


def _check_site(site: Site) -> None:
    problem = None
    if layer_of(site.module) is None:
        problem = "is not patched"
    elif site.adapter is not None:
        problem = "is run by an adapter, whose positions cannot be checked"
    elif "transformers" in sys.modules:
        from nsa_flex.patching.hf_layers import is_recurrent, parameter_names

        if is_recurrent(site.decoder):
            problem = "stands beside recurrent layers, which carry a state from token to token"
        elif "position_ids" not in parameter_names(site.decoder):
            problem = "gets its positions from a decoder that takes no position_ids"
    if problem is not None:
        raise ValueError(
            f"{site.name} {problem}: with a shard of each sequence the model would be wrong "
            "without a word"
        )
