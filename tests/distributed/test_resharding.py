"""FSDP2 from the meta device; its checkpoints (DCP) go on with more ranks or fewer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.problem import (
    LENGTH,
    Group,
    Result,
    assert_equal,
    gradients,
    loss_of,
    mean_over_ranks,
    new_model,
    own_rows,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import shard
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh

from patching.tiny_models import tokens

ROWS = 6  # of a batch: divisible by 1, 2 and 3 ranks
STEPS = 2  # before the checkpoint, and after


@on_two
def test_a_checkpoint_goes_on_with_more_ranks_and_with_one(device: str, tmp_path: Path) -> None:
    """Three ranks on the CPU, over which no parameter divides evenly."""
    on_ranks(3 if device == "cpu" else 2, device, tmp_path, save_and_go_on, tmp_path)


def save_and_go_on(device: torch.device, folder: Path) -> None:
    exact, plain = uninterrupted(torch.float64, device), uninterrupted(torch.float32, device)
    world = dist.get_world_size()
    for before, after in ((world - 1, world), (world, 1)):
        case, path = f"{before} ranks, then {after}", folder / str(before)
        first = DeviceMesh(device.type, list(range(before)))
        if dist.get_rank() < before:
            train_and_save(first, device, path)
        dist.barrier()
        second = DeviceMesh(device.type, list(range(after)))
        if dist.get_rank() < after:
            assert_equal(case, load_and_train(second, device, path), plain, exact)
        dist.barrier()


def train_and_save(mesh: DeviceMesh, device: torch.device, path: Path) -> None:
    model = shard(new_model().to(device), mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, mesh.get_group())
    dcp.save(state_of(model, optimizer), checkpoint_id=path, process_group=mesh.get_group())


def load_and_train(mesh: DeviceMesh, device: torch.device, path: Path) -> Result:
    with torch.device("meta"):
        model = new_model()
    shard(model, mesh).to_empty(device=device)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(float("nan"))  # as memory that nobody has written
    model.init_weights()
    optimizer = optimizer_of(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return train(model, optimizer, STEPS, mesh.get_group())


def uninterrupted(dtype: torch.dtype, device: torch.device) -> Result:
    """One process, whole batches."""
    model = new_model(dtype).to(device)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0)
    return train(model, optimizer, STEPS)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, first: int, group: Group = None
) -> Result:
    """Some steps from the batch `first` on; the last one's loss and gradients."""
    sharded = group is not None
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        ids = batch(step)
        device = next(model.parameters()).device
        loss = loss_of(model, own_rows(ids, device, group) if sharded else ids.to(device))
        loss.backward()
        optimizer.step()
    return Result(mean_over_ranks(loss, group) if sharded else loss.detach(), gradients(model))


def batch(step: int) -> Tensor:
    torch.manual_seed(10 + step)
    return tokens(ROWS, LENGTH)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With this epsilon, rounding of gradients that are nearly 0 does not become whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}
