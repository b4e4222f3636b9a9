"""FSDP2 from the meta device; its checkpoints (DCP) go on with more ranks or fewer.

So do those of FSDP2 beside context parallelism, on a mesh of another shape.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.problem import (
    CONFIG,
    Result,
    assert_equal,
    gradients,
    mean_over_ranks,
    new_model,
    own_rows,
    whole_batch,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import nsa_flex
from patching.tiny_models import relative_error

STEPS = 2  # before the checkpoint, and after
# Sums of some thousand float64 terms in another order, in four steps of AdamW.
ROUNDING = 1e-10
# transformers computes the loss in float32, and then a mean over four ranks is one of means.
ROUNDING_OF_LOSS = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Run:
    """Where, on batches of so many rows, and in what dtype; by default that of the device."""

    device: torch.device
    rows: int = 6  # divisible by 1, 2 and 3 ranks
    dtype: torch.dtype | None = None

    def new_model(self) -> Any:
        return new_model(self.device, self.dtype)


@on_two
def test_a_checkpoint_goes_on_with_more_ranks_and_with_one(device: str, tmp_path: Path) -> None:
    """Three ranks on the CPU, over which no parameter divides evenly."""
    on_ranks(3 if device == "cpu" else 2, device, tmp_path, save_and_go_on, tmp_path)


def save_and_go_on(device: torch.device, folder: Path) -> None:
    run = Run(device)
    exact, plain = uninterrupted(Run(device, dtype=torch.float64)), uninterrupted(run)
    world = dist.get_world_size()
    for before, after in ((world - 1, world), (world, 1)):
        case, path = f"{before} ranks, then {after}", folder / str(before)
        first = DeviceMesh(device.type, list(range(before)))
        if dist.get_rank() < before:
            train_and_save(run, first, path)
        dist.barrier()
        second = DeviceMesh(device.type, list(range(after)))
        if dist.get_rank() < after:
            assert_equal(case, load_and_train(run, second, path), plain, exact)
        dist.barrier()


@pytest.mark.exhaustive
def test_context_parallelism_goes_on_with_another_mesh(tmp_path: Path) -> None:
    on_ranks(4, "cpu", tmp_path, change_the_mesh, tmp_path, [(2, 2), (4, 1), (1, 4)])


def test_context_parallelism_goes_on_with_one_rank(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, change_the_mesh, tmp_path, [(2, 1), (1, 1)])


def change_the_mesh(device: torch.device, folder: Path, shapes: list[tuple[int, int]]) -> None:
    """Ranks that share tokens, by ranks that shard parameters: saved with the first of these."""
    run = Run(device, rows=4, dtype=torch.float64)
    expected = uninterrupted(run)
    for place, (cp, dp) in enumerate(shapes):
        ranks = torch.arange(cp * dp).view(cp, dp)
        mesh = DeviceMesh(device.type, ranks, mesh_dim_names=("cp", "dp"))
        if dist.get_rank() >= cp * dp:
            continue
        if place == 0:
            train_and_save(run, mesh, folder / "saved")
            continue
        found, case = load_and_train(run, mesh, folder / "saved"), f"{shapes[0]}, then {cp, dp}"
        assert relative_error(found.loss, expected.loss) < ROUNDING_OF_LOSS, case
        assert found.gradients.keys() == expected.gradients.keys(), case
        for name, gradient in found.gradients.items():
            assert relative_error(gradient, expected.gradients[name]) < ROUNDING, f"{case}: {name}"


def train_and_save(run: Run, mesh: DeviceMesh, path: Path) -> None:
    model = on_mesh(run.new_model().to(run.device), mesh)
    optimizer = optimizer_of(model)
    train(run, model, optimizer, 0, mesh)
    page()["save"](path, model, optimizer, group_of(mesh))


def load_and_train(run: Run, mesh: DeviceMesh, path: Path) -> Result:
    with torch.device("meta"):
        model = run.new_model()
    on_mesh(model, mesh).to_empty(device=run.device)
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.fill_(float("nan"))  # as memory that nobody has written
    model.init_weights()
    optimizer = optimizer_of(model)
    page()["load"](path, model, optimizer, group_of(mesh))
    return train(run, model, optimizer, STEPS, mesh)


def on_mesh(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2, beside context parallelism if the mesh has an axis for it."""
    if mesh.ndim == 2:
        nsa_flex.context_parallel(model, mesh["cp"])
    return shard(model, mesh)


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Of all its ranks; of a mesh of two dimensions these are one rank, or all there are."""
    is_all = mesh.size() == dist.get_world_size()
    return dist.group.WORLD if is_all else mesh.get_group(0)  # type: ignore[return-value]


def share_of(mesh: DeviceMesh) -> Callable[[Tensor], dict[str, Tensor]]:
    """This rank's part of a batch: its rows, and of these its tokens."""
    if mesh.ndim == 1:
        return lambda ids: whole_rows(own_rows(ids, mesh.get_group()))

    def own_tokens(ids: Tensor) -> dict[str, Tensor]:
        rows = own_rows(ids, mesh.get_group("dp"))
        config = CONFIG[rows.device.type]
        return nsa_flex.shard_batch(rows, mesh["cp"], config, labels=rows)

    return own_tokens


def whole_rows(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "labels": ids}


def page() -> dict[str, Any]:
    """What the training page's code for checkpoints of DCP defines."""
    text = (Path(__file__).parents[2] / "docs" / "guide" / "train.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "dcp.save" in block), names)
    return names


def uninterrupted(run: Run) -> Result:
    """One process, whole batches; in float64 on the CPU."""
    model = run.new_model().to("cpu" if run.dtype == torch.float64 else run.device)
    optimizer = optimizer_of(model)
    train(run, model, optimizer, 0)
    return train(run, model, optimizer, STEPS)


def train(
    run: Run,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    first: int,
    mesh: DeviceMesh | None = None,
) -> Result:
    """Some steps from the batch `first` on; the last one's loss and gradients."""
    place = next(model.parameters()).device
    share = whole_rows if mesh is None else share_of(mesh)
    for step in range(first, first + STEPS):
        optimizer.zero_grad()
        batch = whole_batch(run.device, rows=run.rows, seed=step).to(place)
        loss = model(**share(batch), use_cache=False).loss
        loss.backward()
        optimizer.step()
    loss = loss.detach() if mesh is None else mean_over_ranks(loss, group_of(mesh))
    return Result(loss, gradients(model))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With this epsilon, rounding of gradients that are nearly 0 does not become whole steps."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
