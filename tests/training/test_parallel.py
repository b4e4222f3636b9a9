"""Training runs with DDP and FSDP2 on two processes are those of one, stopped and resumed too."""

from __future__ import annotations

import dataclasses
import itertools
import json
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
from distributed.problem import whole
from distributed.ranks import TWO_GPUS, start_ranks
from distributed.recipes import shard_on_cpus
from training.begun_run import Rows, begin, quiet_config
from training.small_config import CUDA, NSA, small_config, write_texts
from transformers import TrainerCallback

import nsa_flex
from nsa_flex.training import run as training_run
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.models import build_model
from nsa_flex.training.packing import PackedRows
from nsa_flex.training.run import leave_process_group, train
from nsa_flex.training.telemetry import last_of_each_step, read_rows
from nsa_flex.training.tokenization import BYTES
from reference import poisoned_memory


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_processes(
    check: Callable[..., None], *arguments: Any, device: str = "cpu", ranks: int = 2
) -> None:
    start_ranks(ranks, _start, ranks, device, free_port(), check, arguments)


def _start(
    rank: int,
    ranks: int,
    device: str,
    port: int,
    check: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if device == "cpu":
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    check(rank, *arguments)
    leave_process_group()


def test_a_process_leaves_its_group(tmp_path: Path) -> None:
    leave_process_group()  # there is none
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    leave_process_group()
    assert not dist.is_initialized()


def on_a_cpu() -> None:
    """Sharding runs there too; memory that nobody has written is NaN."""
    shard_on_cpus()
    training_run.check_device = lambda config: None
    poisoned_memory.install()


def run_config(rank: int, out: Path, texts: Path, options: dict[str, Any]) -> None:
    on_a_cpu()
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


@pytest.mark.kept(lambda parallel: parallel == "fsdp")
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


def rows_on_ranks(rank: int, out: Path, texts: Path) -> None:
    monkeypatch = pytest.MonkeyPatch()
    seen = Rows(monkeypatch)
    config = quiet_config(out, texts, training={"steps": 11, "batch_size": 1, "accumulate": 2})
    told = {"training.steps", "training.batch_size", "training.accumulate"}
    train(config, resume=True, changes=told)
    monkeypatch.undo()
    (out / f"rows-{rank}.json").write_text(json.dumps(seen.rows))


def test_rows_do_not_come_again_on_more_ranks(tmp_path: Path) -> None:
    """8 steps of 2 rows on one process, then 3 of 4 on two."""
    texts, out = write_texts(tmp_path / "texts"), tmp_path / "run"
    begin(out, texts)
    in_processes(rows_on_ranks, out, texts)
    ranks = [json.loads((out / f"rows-{rank}.json").read_text()) for rank in (0, 1)]
    data = quiet_config(out, texts).data
    stream = PackedRows(sorted(texts.iterdir()), BYTES, data, seed=0, held_out=False)
    expected = [row.ids.tolist() for row in itertools.islice(stream, 16, 28)]
    assert sorted(ranks[0] + ranks[1]) == sorted(expected)
    assert len(ranks[0]) == len(ranks[1]) == 6
    assert read_rows(out, "training")[-1]["tokens"] == (16 + 12) * 64


def run_on_cuda(rank: int, out: Path, texts: Path, options: dict[str, Any]) -> None:
    poisoned_memory.install()
    train(small_config(out, texts, **options))


@pytest.mark.gpu
@TWO_GPUS
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_on_two_gpus(tmp_path: Path, parallel: str) -> None:
    """As on one, to bfloat16's precision over twelve steps of Adam."""
    texts = write_texts(tmp_path / "texts")
    options = {**CUDA, "data": {"documents": "joined", "seq_len": 512}}
    train(small_config(tmp_path / "one", texts, **options))
    options["training"] = {"batch_size": 1}
    options["engine"] = {**CUDA["engine"], "parallel": parallel}
    in_processes(run_on_cuda, tmp_path / "two", texts, options, device="cuda")
    ours, theirs = curve(tmp_path / "two"), curve(tmp_path / "one")
    assert len(ours) == len(theirs) == 8
    for each, other in zip(ours, theirs, strict=True):
        assert each[:2] == pytest.approx(other[:2], rel=0.05)  # the step, and a loss
    nsa_flex.load(tmp_path / "two" / "model")


def check_same_model(run: Path, other: Path) -> None:
    ours, theirs = (nsa_flex.load(each / "model").state_dict() for each in (run, other))
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        torch.testing.assert_close(x, theirs[name], rtol=1e-3, atol=1e-3)


STARTS: dict[str, dict[str, Any]] = {
    "fresh": {"preset": "tiny", "nsa": NSA, "init": "dense"},
    "dense": {"preset": None, "checkpoint": "dense", "nsa": NSA, "init": "dense"},
    "patched": {"preset": None, "checkpoint": "patched", "nsa": {}},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense one and a patched one, whose sizes are not those of others."""
    folder = tmp_path_factory.mktemp("checkpoints")
    config = small_config(folder, folder)
    section = dataclasses.replace(config.model, attention="dense")
    torch.manual_seed(7)
    model = build_model(section, config.data, BYTES)
    model.save_pretrained(folder / "dense")
    sizes = nsa_flex.NSAConfig(**{**NSA, "compress_block_size": 4})
    nsa_flex.patch(model, sizes, init="dense").save_pretrained(folder / "patched")
    return folder


def start_config(start: str, folder: Path) -> TrainConfig:
    model = dict(STARTS[start])
    if "checkpoint" in model:
        model["checkpoint"] = str(folder / model["checkpoint"])
    return small_config(
        folder / "run", write_texts(folder / "texts"), model=model, engine={"parallel": "fsdp"}
    )


class StartedError(Exception):
    """The weights are there, which is all that is asked."""


class AtTheStart(TrainerCallback):
    """Keeps all parameters and buffers, whole, and ends the training."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.tensors = {name: whole(x).clone() for name, x in tensors_of(kwargs["model"]).items()}
        raise StartedError


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    return dict((*model.named_parameters(), *model.named_buffers()))


@pytest.mark.exhaustive
def test_weights_are_shared_out_from_rank_0(checkpoints: Path) -> None:
    in_processes(shared_out, checkpoints)


def shared_out(rank: int, folder: Path) -> None:
    """Parameters and buffers of all ranks are one process's; rank 1 never made or read them."""
    on_a_cpu()
    unwritten: list[bool] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        unwritten.append(all(bool(x.isnan().all()) for x in model.parameters()))
        return model

    training_run.build_model = build
    for start in STARTS:
        config = start_config(start, folder)
        torch.manual_seed(config.seed)
        expected = tensors_of(build_model(config.model, config.data, BYTES))
        at_start = AtTheStart()
        with pytest.raises(StartedError):
            train(config, callbacks=[at_start])
        assert unwritten.pop() == (rank == 1)
        assert at_start.tensors.keys() == expected.keys()
        assert any(name.endswith("inv_freq") for name in expected)
        assert any(name.endswith("gates.offset") for name in expected)
        for name, x in expected.items():
            assert torch.equal(at_start.tensors[name], x), (start, name)


def test_sharding_on_a_cpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    texts = write_texts(tmp_path / "texts")
    config = small_config(tmp_path / "run", texts, engine={"parallel": "fsdp"})
    with pytest.raises(
        ValueError, match=r"engine\.parallel is fsdp, and accelerate shards on GPUs"
    ):
        train(config)
    assert not (tmp_path / "run").exists()
