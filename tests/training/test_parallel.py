"""DDP and FSDP2 on two processes compute what one does: loss, every gradient, checkpoints."""

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
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from training.small_config import small_config, write_texts
from transformers import TrainerCallback

import nsa_flex
from nsa_flex.sharded import is_sharded
from nsa_flex.training import run
from nsa_flex.training.config import EngineSection
from nsa_flex.training.models import prepare
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import last_of_each_step, read_rows
from patching.tiny_models import NSA, VOCABULARY, tiny_model

RANKS = 2
ROWS = 2  # of a rank
MODES = [
    EngineSection(compile=False),
    *(EngineSection(checkpointing=kind) for kind in ("none", "full", "selective")),
]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def in_processes(check: Callable[..., None], *arguments: Any, ranks: int = RANKS) -> None:
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


def new_model() -> Any:
    """Float64, with gates and φ that are no start; equal in every process."""
    torch.manual_seed(11)
    model = nsa_flex.patch(tiny_model().train(), NSA).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.normal_(std=0.3)
    return model


def tokens() -> Tensor:
    """(RANKS · ROWS, 72), equal in every process."""
    return torch.randint(
        2, VOCABULARY, (RANKS * ROWS, 72), generator=torch.Generator().manual_seed(7)
    )


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


def expected() -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one process, eager, on all rows."""
    model = new_model()
    loss = loss_of(model, tokens())
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters()}


def full(x: Tensor) -> Tensor:
    return x.full_tensor() if is_sharded(x) else x


def check_equal(model: nn.Module, loss: Tensor, what: str) -> None:
    """Mean loss of the ranks and each parameter's gradient, to float64's precision."""
    wanted, gradients = expected()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / RANKS, wanted, msg=lambda text: f"{what}: {text}")
    found = {name.removeprefix("module."): x.grad for name, x in model.named_parameters()}
    assert found.keys() == gradients.keys(), what
    for name, gradient in gradients.items():
        assert found[name] is not None, f"{what}: {name} has no gradient"
        torch.testing.assert_close(
            full(found[name]), gradient, msg=lambda text, name=name: f"{what}: {name}: {text}"
        )
    assert all(gradient.abs().max() > 0 for gradient in gradients.values()), what


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def plain_torch(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    mine = tokens()[rank * ROWS : (rank + 1) * ROWS]
    for wrap in (ddp, fsdp):
        for mode in MODES:
            torch.compiler.reset()
            model = new_model()
            prepare(model, mode, compiler="aot_eager")
            wrapped = wrap(model)
            loss = loss_of(wrapped, mine)
            loss.backward()
            check_equal(wrapped, loss, f"{wrap.__name__} {mode}")
    torch.compiler.reset()
    save_from_meta(folder)


def test_plain_torch(tmp_path: Path) -> None:
    """DDP and FSDP2, eager, and compiled with no, full and selective checkpointing; then DCP."""
    in_processes(plain_torch, tmp_path)
    loaded = trained_state(tmp_path)
    in_processes(reload, tmp_path, loaded, ranks=1)


def save_from_meta(folder: Path) -> None:
    """Sharded on the meta device, started, trained a step, saved."""
    with torch.device("meta"):
        model = nsa_flex.patch(tiny_model().train(), NSA)
    model = fsdp(model)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())  # the start is rank 0's all the same
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, tokens()).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "dcp"))
    after = {name: full(x).detach() for name, x in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save({"weights": after, "loss": loss_of_full(after)}, folder / "expected.pt")
    dist.barrier()


def loss_of_full(weights: dict[str, Tensor]) -> Tensor:
    model = nsa_flex.patch(tiny_model().train(), NSA)
    model.load_state_dict(weights, strict=False)
    return loss_of(model, tokens()).detach()


def trained_state(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "expected.pt", weights_only=True)


def reload(rank: int, folder: Path, wanted: dict[str, Any]) -> None:
    """What two ranks saved, on another number of them: weights, optimizer and the next step."""
    dist.init_process_group("gloo")
    torch.manual_seed(rank + 50)
    model = fsdp(nsa_flex.patch(tiny_model().train(), NSA))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    weights, state = get_state_dict(model, optimizer)
    read = {"model": weights, "optimizer": state}
    dcp.load(read, checkpoint_id=str(folder / "dcp"))
    set_state_dict(
        model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optimizer"]
    )
    for name, x in model.named_parameters():
        assert torch.equal(full(x).detach(), wanted["weights"][name]), name
        assert optimizer.state[x]["step"] == 1, name
        assert full(optimizer.state[x]["exp_avg"]).abs().max() > 0, name
    torch.testing.assert_close(loss_of(model, tokens()).detach(), wanted["loss"])


def shard_on_cpus() -> None:
    """accelerate passes an FSDP plugin over on CPUs: its state is told that it has not.

    What it does with one is the same there.
    """
    run.check_device = lambda config: None
    start = AcceleratorState.__init__

    def told(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        start(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = told  # type: ignore[method-assign]


def through_accelerate(rank: int) -> None:
    mine = tokens()[rank * ROWS : (rank + 1) * ROWS]
    accelerator = Accelerator(cpu=True)
    for mode in MODES[::3]:  # neither, and compiled with selective checkpointing
        torch.compiler.reset()
        model = new_model()
        prepare(model, mode, compiler="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        loss = loss_of(model, mine)
        accelerator.backward(loss)
        check_equal(model, loss, f"accelerate, {mode}")


def test_through_accelerate() -> None:
    in_processes(through_accelerate)


def run_config(rank: int, out: Path, texts: Path, options: dict[str, Any]) -> None:
    shard_on_cpus()
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
