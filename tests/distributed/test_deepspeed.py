"""Ulysses by DeepSpeed itself, on two gloo processes; not run where it is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.problem import Result, gradients
from distributed.ranks import on_ranks
from distributed.test_sequence_parallel import LIMIT, batch, patched, targets, total_loss

import nsa_flex
from patching.tiny_models import relative_error

# Not imported: it looks for compilers, which takes seconds.
installed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"
)


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

    # Its collectives through shared memory would be compiled first; they are not asked for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
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
        found = Result(loss.detach(), gradients(model))
        for x in (found.loss, *found.gradients.values()):
            dist.all_reduce(x)
        assert relative_error(found.loss, wanted.loss) < LIMIT, kind
        for name, want in wanted.gradients.items():
            error = (found.gradients[name] - want).norm() / want.norm().clamp_min(1e-6)
            assert error < LIMIT, f"{kind}: gradient of {name} is off by {error}"
