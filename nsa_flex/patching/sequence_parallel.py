"""`sequence_parallel`: another's all-to-all gives the layers whole sequences with some heads."""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.parallel.heads import HeadShards
from nsa_flex.patching.layer import NSALayer
from nsa_flex.patching.sites import find_sites

ModelT = TypeVar("ModelT", bound=nn.Module)


def sequence_parallel(
    model: ModelT, mesh: DeviceMesh | dist.ProcessGroup | None, *, in_eval: bool = False
) -> ModelT:
    """Let Ulysses sequence parallelism exchange tokens for heads around the layers of `model`.

    In place. Each rank of `mesh` has a run of 1 / P of every row's tokens. DeepSpeed's
    `UlyssesSPAttentionHF.register_with_transformers(model, core_attn_implementation="nsa_flex",
    ...)`, which accelerate's `sp_size` calls, exchanges queries, keys, values and outputs; gates
    and φ go with their heads, and padding and documents are those of whole rows: give
    `attention_mask` and `position_ids` of this rank's tokens. Gradients of parameters are this
    rank's part, as in data parallelism.

    Args:
        model: a patched transformers decoder, or a model that holds one.
        mesh: of one dimension, or a process group, as of `mpu.get_sequence_parallel_group()`.
            None undoes it.
        in_eval: whether heads are exchanged in eval mode, too: not where DeepSpeed is told
            `disable_in_eval`, as accelerate tells it.

    Returns:
        `model`.

    Raises:
        TypeError: `mesh` is something else.
        ValueError: the model has no NSA layers, or the ranks do not divide its KV heads: the query
            heads of a group choose blocks together, and cannot be on several ranks.
    """
    layers = [each for each in model.modules() if isinstance(each, NSALayer)]
    shards = None if mesh is None else HeadShards(_one_dimension(mesh, model), in_eval)
    if shards is not None:
        _check(model, layers, shards)
    for layer in layers:
        layer.head_shards = shards
    return model


def _one_dimension(mesh: DeviceMesh | dist.ProcessGroup, model: nn.Module) -> DeviceMesh:
    if isinstance(mesh, dist.ProcessGroup):
        return DeviceMesh.from_group(mesh, next(model.parameters()).device.type)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh is a {type(mesh).__name__}; it must be a DeviceMesh or a ProcessGroup"
        )
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names}; expected the one that shares "
            "heads, mesh[name]"
        )
    return mesh


def _check(model: nn.Module, layers: list[NSALayer], shards: HeadShards) -> None:
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no NSA layers: call nsa_flex.patch(model) first"
        )
    from nsa_flex.patching.split_heads import check_heads_divide

    for site in find_sites(model):
        layer = getattr(site.module, "nsa", None)
        if site.adapter is not None or not isinstance(layer, NSALayer):
            raise ValueError(
                f"{site.name} is not a patched attention module of transformers: with a part of "
                "each sequence the model would be wrong without a word"
            )
        check_heads_divide(site.name, layer.shape, shards.size, "Ulysses sequence parallelism")
