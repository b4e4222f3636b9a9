"""Training runs with DDP and FSDP2 on two processes are those of one, stopped and resumed too."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from distributed.recipes import shard_on_cpus
from training.small_config import small_config, write_texts
from transformers import TrainerCallback

import nsa_flex
from nsa_flex.training import run as training_run
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import last_of_each_step, read_rows


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_processes(check: Callable[..., None], *arguments: Any, ranks: int = 2) -> None:
    mp.spawn(_start, (ranks, free_port(), check, arguments), nprocs=ranks)


def _start(
    rank: int, ranks: int, port: int, check: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    check(rank, *arguments)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_config(rank: int, out: Path, texts: Path, options: dict[str, Any]) -> None:
    shard_on_cpus()
    training_run.check_device = lambda config: None
    config = small_config(out, texts, **options)

    def stop_in_the_middle(step: int) -> None:
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(config, callbacks=[AtStep(stop_in_the_middle)])["stopped"]
    train(config, resume=True)


class AtStep(TrainerCallback):
    """Calls a function with the number of each step."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state.global_step)


def curve(out: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "held_out_loss")
    rows = last_of_each_step(read_rows(out, "training"))
    return [tuple(row[name] for name in names if row[name] is not None) for row in rows]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_on_two_processes(tmp_path: Path, parallel: str) -> None:
    """Two ranks of one row, stopped and resumed, against one rank of two: the same curve.

    To float32's precision over twelve steps of Adam. The sharded checkpoint is read by one
    process afterwards.
    """
    texts = write_texts(tmp_path / "texts")
    data = {"documents": "joined"}
    train(small_config(tmp_path / "one", texts, data=data))
    options = {
        "data": data,
        "training": {"batch_size": 1},
        "engine": {"parallel": parallel},
    }
    two = tmp_path / "two"
    in_processes(run_config, two, texts, options)
    ours, theirs = curve(two), curve(tmp_path / "one")
    assert len(ours) == len(theirs) == 8
    for each, other in zip(ours, theirs, strict=True):
        assert each == pytest.approx(other, rel=1e-4)
    assert (two / "checkpoint-12" / "pytorch_model_fsdp_0").is_dir() == (parallel == "fsdp")
    assert not list(two.rglob("*.bin")) + list(two.rglob("*.pt"))
    check_same_model(two, tmp_path / "one")
    shutil.rmtree(two / "model")  # as if the run had been killed at the very end
    assert train(small_config(two, texts, **options), resume=True)["steps"] == 12
    check_same_model(two, tmp_path / "one")


def check_same_model(run: Path, other: Path) -> None:
    ours, theirs = (nsa_flex.load(each / "model").state_dict() for each in (run, other))
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-3, atol=1e-3)


def test_sharding_on_a_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    texts = write_texts(tmp_path / "texts")
    config = small_config(tmp_path / "run", texts, engine={"parallel": "fsdp"})
    with pytest.raises(
        ValueError, match=r"engine\.parallel is fsdp, and accelerate shards on GPUs"
    ):
        train(config)
    assert not (tmp_path / "run").exists()
