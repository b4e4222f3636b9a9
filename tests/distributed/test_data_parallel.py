"""DDP and FSDP2 on two ranks find the loss and every gradient that one process finds."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
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
from distributed.recipes import WRAPPERS, compile_layers, recompute

# What Inductor makes of a layer has tests of its own; AOT autograd and the partitioner decide what
# is recomputed. On a GPU Inductor is quick enough.
COMPILERS = {"cpu": "aot_eager", "cuda": "inductor"}


@on_two
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_loss_and_gradients_of_one_process(wrapper: str, device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, every_recipe, wrapper)


def every_recipe(device: torch.device, wrapper: str) -> None:
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        exact, plain = one_process(torch.float64, device), one_process(dtype, device)
        for compiled, kind in itertools.product((False, True), ("none", "full", "selective")):
            compiler = COMPILERS[device.type] if compiled else None
            model = wrap(wrapper, device, dtype, compiler, kind)
            found = two_steps(model, own_rows(whole_batch(), device))
            case = f"{wrapper}, {dtype}, compiled {compiled}, recomputation {kind}"
            assert_equal(case, found, plain, exact)


def wrap(
    wrapper: str, device: torch.device, dtype: torch.dtype, compiler: str | None, kind: str
) -> Any:
    torch._dynamo.reset()
    model = new_model(dtype)
    recompute(model, kind)
    compile_layers(model, compiler)
    return WRAPPERS[wrapper](model, device)


def two_steps(model: Any, ids: torch.Tensor) -> Result:
    """The second one: in it DDP complains of parameters that the first left unused."""
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
    return Result(mean_over_ranks(loss), gradients(model))
