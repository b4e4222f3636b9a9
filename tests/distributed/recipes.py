"""How a model is compiled, recomputes activations, and is wrapped for data parallel training."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import create_selective_checkpoint_contexts

KEPT = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]  # what is not recomputed

# What Inductor makes of a layer has tests of its own; AOT autograd and the partitioner decide what
# is recomputed. On a GPU Inductor is quick enough.
COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}

selective = functools.partial(create_selective_checkpoint_contexts, KEPT)


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


def shard_on_cpus() -> None:
    """accelerate passes an FSDP plugin over on CPUs: its state is told that it has not.

    What it does with one is the same there. For processes of their own.
    """
    start = AcceleratorState.__init__

    def told(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        start(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = told  # type: ignore[method-assign]
