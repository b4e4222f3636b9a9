"""Ulysses by DeepSpeed itself, on two gloo processes; not run where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
from distributed.problem import (
    LENGTH,
    Result,
    assert_equal,
    gradients,
    new_model,
    whole_batch,
)
from distributed.ranks import on_ranks
from distributed.test_sequence_parallel import (
    assert_sums_equal,
    batch,
    patched,
    targets,
    total_loss,
)
from torch.utils.data import DataLoader

import nsa_flex

# Not imported: it looks for compilers, which takes seconds.
installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"
)


def begin(deepspeed: Any) -> None:
    # Its collectives through shared memory would be compiled first; they are not asked for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


@installed
def test_loss_and_gradients_of_one_process(tmp_path: Path) -> None:
    on_ranks(2, "cpu", tmp_path, exchanges)


def exchanges(_device: torch.device) -> None:
    """Whole, padded and packed rows."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    expected = {}
    for kind in ("whole", "padded", "packed"):
        model, call = patched(), batch(kind)
        loss = total_loss(model, call, targets(call))
        loss.backward()
        expected[kind] = Result(loss.detach(), gradients(model))

    begin(deepspeed)
    model = patched()
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model,
        core_attn_implementation="nsa_flex",
        sequence_parallel_size=2,
        micro_batch_size=2,
    )
    nsa_flex.sequence_parallel(model, mpu.get_sequence_parallel_group())
    for kind, wanted in expected.items():
        model.zero_grad()
        call = batch(kind)
        own = {
            name: x.chunk(2, 1)[dist.get_rank()]
            for name, x in {**call, "labels": targets(call)}.items()
        }
        labels = own.pop("labels")
        loss = total_loss(model, own, labels)
        loss.backward()
        assert_sums_equal(kind, Result(loss.detach(), gradients(model)), wanted)


PLAIN = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 0},
    "zero_allow_untested_optimizer": True,
}


@installed
def test_sp_size_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    on_ranks(2, "cpu", tmp_path, prepared)


def prepared(device: torch.device) -> None:
    """Documents that cross ranks; in float32, as DeepSpeed sums gradients no wider."""
    import deepspeed

    places = torch.cat([torch.arange(x) for x in (33, LENGTH["cpu"] - 33)])
    call = {"input_ids": whole_batch(device), "position_ids": places.repeat(4, 1)}
    labels = targets(call)
    results = []
    for dtype in (torch.float64, None):
        model = new_model(device, dtype)
        loss = total_loss(model, call, labels) / labels.numel()
        loss.backward()
        results.append(Result(loss.detach(), gradients(model)))

    begin(deepspeed)
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True)
    handler.sp_attn_implementation = "nsa_flex"
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=PLAIN),
        parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler),
    )
    model = new_model(device)
    call["labels"] = call["input_ids"]
    rows = [dict(zip(call, row, strict=True)) for row in zip(*call.values(), strict=True)]
    engine, _, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.0), DataLoader(rows, batch_size=4)
    )
    group = deepspeed.utils.groups._get_sequence_parallel_group()
    nsa_flex.sequence_parallel(engine.module, group)
    found = {}
    engine.step = lambda **_: found.update(gradients(engine.module))  # it would clear them

    own = next(iter(loader))
    own_labels = own.pop("shift_labels")
    assert own_labels.shape == (4, LENGTH["cpu"] // 2)
    loss = total_loss(engine, own, own_labels) / labels.numel()
    accelerator.backward(loss)  # gradients are summed over ranks that share rows
    total = loss.detach().clone()
    dist.all_reduce(total)
    assert_equal("sp_size", Result(total, found), results[1], results[0])
