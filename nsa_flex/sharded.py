"""Parameters that are sharded over ranks (DTensors, as `fully_shard` makes them)."""

from __future__ import annotations

import torch
from torch import Tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; asked without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy `value`, the whole tensor, into `parameter`, in place.

    Of a sharded parameter each rank fills its shard with rank 0's value, so that random values
    agree: a collective operation, which every rank of its mesh must call.
    """
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
        value = distribute_tensor(value.contiguous(), mesh, placements)
    parameter.copy_(value)
