"""The weights of a sharded model: rank 0 makes or reads them, the others get their shards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa_flex.sharded import is_sharded


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Within, modules get parameters on the meta device; buffers are computed."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        yield


def reserve(model: nn.Module) -> None:
    """Put what `model` has on the meta device on the CPU, without writing it.

    Addresses without pages behind them: accelerate finds the optimizer's parameters by address.
    Tied parameters stay tied.
    """
    made: dict[Tensor, Tensor] = {}

    def on_cpu(x: Tensor) -> Tensor:
        if x not in made:
            made[x] = torch.empty_like(x, device="cpu")
            if isinstance(x, nn.Parameter):
                made[x] = nn.Parameter(made[x], requires_grad=x.requires_grad)
        return made[x]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None and x.is_meta:
                    tensors[name] = on_cpu(x)  # type: ignore[assignment]


@contextlib.contextmanager
def from_rank_0(accelerator: Any) -> Iterator[None]:
    """Within, what accelerate shards by FSDP2 gets rank 0's values; the others' are not read.

    The model is sharded on the meta device. Its tensors follow one at a time, so that no GPU holds
    more than its shards and one tensor.
    """
    from accelerate.utils import fsdp_utils

    plugin, before = accelerator.state.fsdp_plugin, fsdp_utils.fsdp2_load_full_state_dict
    plugin.cpu_ram_efficient_loading = True
    # accelerate's own takes every tensor of the state for a shard, and fails at the gates' buffer.
    fsdp_utils.fsdp2_load_full_state_dict = _share_out
    try:
        yield
    finally:
        fsdp_utils.fsdp2_load_full_state_dict = before
        plugin.cpu_ram_efficient_loading = False


def _share_out(accelerator: Any, model: nn.Module, state: dict[str, Tensor], **_: Any) -> None:
    """Fill a sharded model on the meta device from rank 0's `state`; collective."""
    filled = {}
    for name, x in model.state_dict().items():
        if accelerator.is_main_process:
            value = state[name].detach().to(accelerator.device, x.dtype)
        else:
            value = torch.empty(x.shape, dtype=x.dtype, device=accelerator.device)
        filled[name] = _shard(x, value.contiguous())
    model.load_state_dict(filled, assign=True)


def _shard(like: Tensor, value: Tensor) -> Tensor:
    """Rank 0's `value`, whole or sharded as `like` is."""
    if not is_sharded(like):
        dist.broadcast(value, 0)
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements)  # type: ignore[attr-defined]
