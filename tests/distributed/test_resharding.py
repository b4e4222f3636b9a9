"""FSDP2 from the meta device; its checkpoints (DCP) go on with more ranks or fewer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed.problem import (
    Group,
    Result,
    assert_equal,
    gradients,
    loss_of,
    mean_over_ranks,
    new_model,
    own_rows,
    whole_batch,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import shard
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

ROWS = 6  # of a batch: divisible by 1, 2 and 3 ranks
STEPS = 2  # before the checkpoint, and after


@on_two
def test_a_checkpoint_goes_on_with_more_ranks_and_with_one(device: str, tmp_path: Path) -> None:
    """Three ranks on the CPU, over which no parameter divides evenly."""
    on_ranks(3 if device == "cpu" else 2, device, tmp_path, save_and_go_on, tmp_path)


def save_and_go_on(device: torch.device, folder: Path) -> None:
    exact, plain = uninterrupted(device, torch.float64), uninterrupted(device)
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
    model = shard(new_model(device).to(device), mesh)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, device, mesh.get_group())
    page()["save"](path, model, optimizer, mesh.get_group())


def load_and_train(mesh: DeviceMesh, device: torch.device, path: Path) -> Result:
    with torch.device("meta"):
        model = new_model(device)
    shard(model, mesh).to_empty(device=device)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(float("nan"))  # as memory that nobody has written
    model.init_weights()
    optimizer = optimizer_of(model)
    page()["load"](path, model, optimizer, mesh.get_group())
    return train(model, optimizer, STEPS, device, mesh.get_group())


def page() -> dict[str, Any]:
    """What the training page's code for checkpoints of DCP defines."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "train.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "dcp.save" in block), names)
    return names


def uninterrupted(device: torch.device, dtype: torch.dtype | None = None) -> Result:
    """One process, whole batches; in float64 on the CPU."""
    place = torch.device("cpu") if dtype == torch.float64 else device
    model = new_model(device, dtype).to(place)
    optimizer = optimizer_of(model)
    train(model, optimizer, 0, device)
    return train(model, optimizer, STEPS, device)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    device: torch.device,
    group: Group = None,
) -> Result:
    """Some steps from the batch `first` on, of `device`; the last one's loss and gradients."""
    place = next(model.parameters()).device
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        batch = whole_batch(device, rows=ROWS, seed=step).to(place)
        loss = loss_of(model, batch if group is None else own_rows(batch, group))
        loss.backward()
        optimizer.step()
    loss = loss.detach() if group is None else mean_over_ranks(loss, group)
    return Result(loss, gradients(model))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With this epsilon, rounding of gradients that are nearly 0 does not become whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
