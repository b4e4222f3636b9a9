"""What is sharded over ranks: parameters (DTensors, as `fully_shard` makes them), sequences."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import Tensor
from torch.nn import functional as F

# Where `context_parallel` lies, which puts a function of its own in the place of SDPA.
_CONTEXT_PARALLEL = "torch.distributed.tensor.experimental."


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor; asked without importing torch.distributed.tensor."""
    return hasattr(tensor, "device_mesh")


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """`value`, a whole tensor, as `parameter` is: a DTensor of rank 0's value if that is one.

    Then it is a collective operation, which every rank of its mesh must call.
    """
    if not is_sharded(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.contiguous(), mesh, placements)


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy `value`, the whole tensor, into `parameter`, in place.

    Of a sharded parameter each rank fills its shard with rank 0's value, so that random values
    agree: a collective operation, which every rank of its mesh must call.
    """
    parameter.copy_(sharded_like(parameter, value))


def of_rank(parameter: Tensor) -> Tensor:
    """What tensor parallelism left this rank of a parameter, as a plain tensor.

    Of one that is on all ranks gradients are summed over them: each rank has those of its heads.
    One that `fully_shard` splits as well, over another dimension, is not whole here: it is given
    back as it is.
    """
    if not is_sharded(parameter):
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(parameter, DTensor)
    placements = parameter.placements
    if len(placements) > 1:
        return parameter
    if not torch.is_grad_enabled():
        return parameter.to_local()
    parts = [Partial() if each.is_replicate() else each for each in placements]
    # Its backward makes the sum.
    return parameter.redistribute(placements=placements).to_local(grad_placements=parts)


def refuse_context_parallel() -> None:
    """ValueError inside torch's `context_parallel`, where each rank has a shard of a sequence."""
    sdpa = F.scaled_dot_product_attention
    if isinstance(sdpa, FunctionType) and (sdpa.__module__ or "").startswith(_CONTEXT_PARALLEL):
        raise ValueError(
            "the call is inside torch's context_parallel, which gives each rank a shard of the "
            "sequence, and NSA would attend the shard alone: call outside it, with whole "
            "sequences, or share sequences out by nsa_flex.context_parallel(model, mesh) and "
            "nsa_flex.shard_batch"
        )
