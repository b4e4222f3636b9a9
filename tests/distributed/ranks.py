"""Runs a function on several processes that form one process group."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from reference import one_gloo_thread

TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
on_two = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, TWO_GPUS])]
)


# What ranks import, which takes seconds: once, in a process of which they are forks.
PRELOADED = [
    "accelerate",
    "nsa_flex.patching",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
]


def start_ranks(world: int, function: Callable[..., None], *args: Any) -> None:
    """Call `function(rank, *args)` on `world` new processes; what it raises is raised here."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    call = (dict(os.environ), function, args)
    # transformers.trainer imports torchao, which asks for the GPU: no fork could use it then. And
    # whether kernels are interpreted is read once, where they are imported.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    method = "spawn" if torch.cuda.is_available() or is_interpreted else "forkserver"
    mp.start_processes(_with_environment, call, nprocs=world, start_method=method)


def _with_environment(
    rank: int, environment: dict[str, str], function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    os.environ.clear()  # of the time when the first rank was started
    os.environ.update(environment)
    one_gloo_thread.install()
    function(rank, *args)


def on_ranks(
    world: int, device: str, folder: Path, function: Callable[..., None], *args: Any
) -> None:
    """Call `function(torch.device, *args)` on `world` processes: gloo on the CPU, NCCL on CUDA.

    What it raises on a rank is raised here.
    """
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)
    start_ranks(world, _rank, world, device, f"file://{rendezvous}", function, args)


def _rank(
    rank: int, world: int, kind: str, rendezvous: str, function: Callable[..., None], args: Any
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    options: dict[str, Any] = {}
    if kind == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=120),  # a rank that failed leaves the others waiting
        **options,
    )
    function(device, *args)
    dist.barrier()
    dist.destroy_process_group()
    # All is checked. The interpreter's end would take down groups that modules still hold beside
    # the threads of gloo, in no order, and may abort the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
