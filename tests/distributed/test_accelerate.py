"""accelerate's DDP and FSDP2 on two ranks find the loss and gradients that one process finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from distributed.problem import (
    Result,
    assert_equal,
    gradients,
    loss_of,
    mean_over_ranks,
    new_model,
    one_process,
    own_rows,
    whole_batch,
)
from distributed.ranks import on_ranks, on_two
from distributed.recipes import COMPILERS, selective, shard_on_cpus
from torch._dynamo.utils import counters

# The others are those of plain torch.
RECIPES = [(False, "none"), (False, "selective"), (True, "full")]


@on_two
@pytest.mark.exhaustive
@pytest.mark.parametrize("sharded", [None, "LlamaDecoderLayer"], ids=["ddp", "fsdp"])
def test_loss_and_gradients_of_one_process(
    sharded: str | None, device: str, tmp_path: Path
) -> None:
    on_ranks(2, device, tmp_path, every_recipe, sharded)


def every_recipe(device: torch.device, sharded: str | None) -> None:
    if device.type == "cpu":
        shard_on_cpus()
    exact, plain = one_process(device, torch.float64), one_process(device)
    for compiled, kind in RECIPES:
        accelerator = accelerator_for(device, sharded, compiled)
        assert (accelerator.distributed_type == DistributedType.FSDP) == (sharded is not None)
        counters.clear()
        found = two_steps(accelerator, kind)
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        assert_equal(f"compiled {compiled}, recomputation {kind}", found, plain, exact)


def accelerator_for(device: torch.device, sharded: str | None, compiled: bool) -> Accelerator:
    """A fresh one: accelerate keeps its first settings for the whole process."""
    torch._dynamo.reset()
    AcceleratorState._reset_state(reset_partial_state=True)
    options: dict[str, Any] = {"cpu": device.type == "cpu"}
    if sharded is not None:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[sharded],
        )
    if compiled:
        options["dynamo_plugin"] = TorchDynamoPlugin(
            backend=COMPILERS[device.type], use_regional_compilation=True
        )
    return Accelerator(**options)


def two_steps(accelerator: Accelerator, kind: str) -> Result:
    """Two of them: in the second DDP complains of parameters that the first left unused."""
    model = new_model(accelerator.device)
    if kind != "none":
        options = {"context_fn": selective} if kind == "selective" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = own_rows(whole_batch(accelerator.device))
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        accelerator.backward(loss)
        optimizer.step()
    return Result(mean_over_ranks(loss), gradients(model))
