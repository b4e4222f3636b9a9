"""Steps of the Trainer: what they read on the host, and that the shorter way gives the same."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from training.small_config import small_config, write_texts
from transformers import TrainerCallback

from nsa_flex.hot_path import SyncDetector
from nsa_flex.training import run
from nsa_flex.training.arguments import training_arguments
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.telemetry.callback import TelemetryCallback
from nsa_flex.training.trainer import Trainer, _skip_walks

QUIET = {"eval_every": 0, "save_every": 0}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


class Reads(TrainerCallback):
    """What each step from the second on reads, its row and the loading of a batch included."""

    def __init__(self) -> None:
        self.of_step: dict[int, list[str]] = {}
        self._syncs: SyncDetector | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(state.global_step)
        self._syncs = SyncDetector()
        self._syncs.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._note(state.global_step)

    def _note(self, step: int) -> None:
        if self._syncs is not None:
            self._syncs.__exit__(None, None, None)
            self.of_step[step] = [found.detail for found in self._syncs.findings]


def fused(*args: Any) -> Any:
    """Arguments with the optimizer of CUDA: the other reads its count of steps on the CPU."""
    arguments = training_arguments(*args)
    arguments.optim = transformers.training_args.OptimizerNames.ADAMW_TORCH_FUSED
    return arguments


@pytest.mark.parametrize("documents", ["separate", "joined"])
def test_only_rows_read_on_the_host(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, documents: str
) -> None:
    """The loss and the norm of the gradients for each row; what the probe found, if it ran."""
    monkeypatch.setattr(run, "training_arguments", fused)
    reads = Reads()
    options = {"training": {"steps": 5}, "data": {"documents": documents}}
    every = {"log_every": 2, "gates_every": 4, **QUIET}
    train(small_config(tmp_path / "run", texts, run=every, **options), callbacks=[reads])
    row = ["Tensor.item()"] * 2
    measured = [*row, "Tensor.tolist()"]
    del reads.of_step[5]  # with the mean loss of the whole run
    assert reads.of_step == {1: [], 2: row, 3: [], 4: measured}


def test_the_probe_runs_before_the_row_is_read(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def noted(name: str, owner: type, method: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            happened.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, method, call)

    noted("step ended", TelemetryCallback, "on_step_end")
    noted("read", Trainer, "_maybe_log_save_evaluate")
    probe = run._probe

    def noted_probe(*args: Any) -> Any:
        call = probe(*args)
        return lambda: (happened.append("probe"), call())

    monkeypatch.setattr(run, "_probe", noted_probe)
    every = {"log_every": 2, "gates_every": 2, **QUIET}
    train(small_config(tmp_path / "run", texts, training={"steps": 2}, run=every))
    assert happened[:6] == ["probe", "step ended", "read", "step ended", "probe", "read"]


class Modes(TrainerCallback):
    """Whether all modules train, at the start of each step; calls of `train` since the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all_train: list[bool] = []
        self.calls: list[int] = []
        self._count = 0
        set_mode = nn.Module.train

        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            self._count += 1
            return set_mode(module, mode)

        monkeypatch.setattr(nn.Module, "train", train)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.all_train.append(all(module.training for module in kwargs["model"].modules()))
        self.calls.append(self._count)
        self._count = 0


def test_modules_are_gone_through_after_an_evaluation_alone(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = Modes(monkeypatch)
    every = {"log_every": 10, "gates_every": 0, "eval_every": 2, "eval_rows": 1, "save_every": 0}
    train(
        small_config(tmp_path / "run", texts, training={"steps": 5}, run=every), callbacks=[modes]
    )
    assert modes.all_train == [True] * 5
    gone_through = [step for step, calls in enumerate(modes.calls, 1) if calls and step > 1]
    assert gone_through == [3, 5]


def test_the_step_is_transformers_own(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bitwise: losses and norms of the gradients."""
    training = {"steps": 3, "accumulate": 2, "max_grad_norm": 0.5}
    every = {"log_every": 1, "gates_every": 0, **QUIET}
    names = ("step", "loss", "grad_norm")

    def curve(name: str) -> list[list[Any]]:
        train(small_config(tmp_path / name, texts, training=training, run=every))
        return [[row[name] for name in names] for row in read_rows(tmp_path / name, "training")]

    ours = curve("ours")
    assert len(ours) == 3
    for method in ("training_step", "_clip_grad_norm"):
        monkeypatch.setattr(Trainer, method, getattr(transformers.Trainer, method))
    assert curve("theirs") == ours


def test_what_is_not_used_has_no_gradient_left() -> None:
    """`zero_grad` as torch's, `set_to_none=False` too."""
    model = nn.Linear(2, 2)
    _skip_walks(model, model, list(model.parameters()))
    for keep in (False, True):
        model(torch.ones(2)).sum().backward()
        model.zero_grad(set_to_none=not keep)
        assert (model.weight.grad is not None) == keep
    assert model.weight.grad is not None
    assert model.weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_of_the_trained_model_changes_itself_alone(
    copied: Callable[[nn.Module], nn.Module],
) -> None:
    """As the average of weights that a callback keeps."""
    from nsa_flex.training.trainer import _skip_walks

    model = nn.Sequential(nn.Linear(2, 2))
    _skip_walks(model, model, list(model.parameters()))
    twin = copied(model)
    twin.eval()
    assert [module.training for module in twin.modules()] == [False, False]
    assert [module.training for module in model.modules()] == [True, True]
    for each in (model, twin):
        each(torch.ones(2)).sum().backward()
    twin.zero_grad()
    assert all(x.grad is None for x in twin.parameters())
    assert all(x.grad is not None for x in model.parameters())
