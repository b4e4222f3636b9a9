"""How a model is compiled, recomputes activations, and is wrapped for data parallel training."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # what is not recomputed

# What Inductor makes of a layer has tests of its own; AOT autograd and the partitioner decide what
# is recomputed. On a GPU Inductor is quick enough.
COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}

selective = functools.partial(create_selective_checkpoint_contexts, KEPT)


def recompute(model: Any, kind: str) -> None:
    """Activation checkpointing of the decoder layers: kind "none", "full" or "selective"."""
    if kind == "none":
        return
    options = {"context_fn": selective} if kind == "selective" else {}
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer, **options)


def compile_layers(model: Any, backend: str) -> None:
    """Each decoder layer as one graph, its recomputation inside."""
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)


def ddp(model: nn.Module, device: torch.device) -> nn.Module:
    """Without `find_unused_parameters`: an unused parameter raises in the step after."""
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(model.to(device), device_ids=ids)


def fsdp(model: Any, device: torch.device) -> nn.Module:
    """FSDP2 on all ranks."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    return shard(model.to(device), mesh)


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """Whole decoder layers, then the rest."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS = {"ddp": ddp, "fsdp": fsdp}
