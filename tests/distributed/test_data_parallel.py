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
from distributed.recipes import COMPILERS, WRAPPERS
from torch._dynamo.utils import counters

from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare


@on_two
@pytest.mark.exhaustive
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_loss_and_gradients_of_one_process(wrapper: str, device: str, tmp_path: Path) -> None:
    on_ranks(2, device, tmp_path, every_recipe, wrapper)


def every_recipe(device: torch.device, wrapper: str) -> None:
    exact, plain = one_process(device, torch.float64), one_process(device)
    for compiled, kind in itertools.product((False, True), ("none", "full", "selective")):
        torch._dynamo.reset()
        counters.clear()
        model = new_model(device)
        engine = EngineSection(compile=compiled, checkpointing=kind)
        prepare(model, engine, compiler=COMPILERS[device.type])
        found = two_steps(WRAPPERS[wrapper](model, device), own_rows(whole_batch(device)))
        assert (counters["stats"]["unique_graphs"] > 0) == compiled
        assert not counters["graph_break"]
        assert_equal(f"{wrapper}, compiled {compiled}, recomputation {kind}", found, plain, exact)


def two_steps(model: Any, ids: torch.Tensor) -> Result:
    """The second one: in it DDP complains of parameters that the first left unused."""
    for _ in range(2):
        model.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
    return Result(mean_over_ranks(loss), gradients(model))
