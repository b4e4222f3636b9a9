"""Optimizers, schedules and averages: what they are, and that stopped runs go on with them."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.begun_run import begin, quiet_config
from training.small_config import write_texts

import nsa_flex
from nsa_flex.training import arguments
from nsa_flex.training.arguments import OPTIMIZERS, training_arguments
from nsa_flex.training.muon import MuonAdamW
from nsa_flex.training.run import train
from nsa_flex.training.saving import load_state, save_state
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.trainer import Trainer

CHOICES: dict[str, dict[str, Any]] = {
    "muon": {"optimizer": "muon", "optimizer_options": {"ns_steps": 3}, "ema": 0.9},
    "fused": {"optimizer": "adamw_torch_fused", "schedule": "warmup_stable_decay"},
    "8-bit": {"optimizer": "adamw_torch_8bit", "schedule": "inverse_sqrt"},
    "4-bit": {"optimizer": "adamw_torch_4bit", "schedule": "polynomial"},
    "adafactor": {"optimizer": "adafactor", "schedule": "cosine_with_restarts"},
    "adagrad": {"optimizer": "adagrad", "schedule": "constant"},
    "rmsprop": {"optimizer": "rmsprop", "schedule": "linear"},
    "sgd": {"optimizer": "sgd", "optimizer_options": {"momentum": 0.9}},
}
KEPT = ("muon", "fused")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("optimizers") / "texts")


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """All that a finished run has trained."""
    return {
        f"{folder}/{name}": x
        for folder in ("model", "model-average")
        if (run / folder).exists()
        for name, x in load_file(run / folder / "model.safetensors").items()
    }


@pytest.mark.kept(lambda choice: choice in KEPT)
@pytest.mark.parametrize("choice", CHOICES)
def test_a_stopped_run_ends_as_one_that_was_not(tmp_path: Path, texts: Path, choice: str) -> None:
    training = CHOICES[choice]
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        train(quiet_config(tmp_path / "whole", texts, training=training))
        begin(tmp_path / "run", texts, training=training)
        assert not (tmp_path / "run" / "model").exists()
        train(quiet_config(tmp_path / "run", texts, training=training), resume=True)
    whole, resumed = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert whole.keys() == resumed.keys()
    assert ("ema" in training) == any(name.startswith("model-average/") for name in whole)
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []
    losses = [row["loss"] for row in read_rows(tmp_path / "run", "training")]
    assert losses[-1] < losses[0]


def test_every_name_is_one_of_transformers(tmp_path: Path, texts: Path) -> None:
    for name in OPTIMIZERS:
        config = quiet_config(tmp_path / "run", texts, training={"optimizer": name})
        optim = training_arguments(config, "LlamaDecoderLayer").optim
        assert optim == ("adamw_torch" if name == "muon" else name)


@pytest.mark.parametrize(
    ("optimizer", "options", "passes"),
    [
        ("auto", {"eps": 1e-5}, True),
        ("auto", {"eps": "1e-5"}, True),
        ("auto", {"amsgrad": True}, False),
        ("adafactor", {"clip_threshold": 5.0}, False),
        ("adafactor", {"scale_parameter": False}, True),
        ("sgd", {"momentum": 0.9}, True),
        ("sgd", {"momentun": 0.9}, False),
    ],
)
def test_an_option_that_no_optimizer_gets_is_an_error(
    tmp_path: Path, texts: Path, optimizer: str, options: dict[str, Any], passes: bool
) -> None:
    training = {"optimizer": optimizer, "optimizer_options": options}
    config = quiet_config(tmp_path / "run", texts, training=training)
    [name] = options
    raised = pytest.raises(ValueError, match=rf"optimizer_options\.{name}=.* has no effect: tra")
    with contextlib.nullcontext() if passes else raised:
        found = training_arguments(config, "LlamaDecoderLayer")
        assert float(Trainer.get_optimizer_cls_and_kwargs(found)[1][name]) == float(options[name])


@pytest.mark.parametrize(
    ("device", "cuda", "name"),
    [
        ("auto", True, "adamw_torch_fused"),
        ("cuda", True, "adamw_torch_fused"),
        ("auto", False, "adamw_torch"),
        ("cpu", True, "adamw_torch"),
    ],
)
def test_adamw_is_fused_on_cuda(
    tmp_path: Path,
    texts: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    cuda: bool,
    name: str,
) -> None:
    """By what the Trainer would be told on such a machine."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    told = lambda **options: SimpleNamespace(n_gpu=1, **options)  # noqa: E731
    monkeypatch.setattr(arguments, "TrainingArguments", told)
    config = quiet_config(tmp_path / "run", texts, engine={"device": device})
    assert training_arguments(config, "LlamaDecoderLayer").optim == name


def test_muon_takes_the_matrices_of_decoder_layers(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW what is left: embeddings, norms, and NSA's gates and compression."""
    made: list[MuonAdamW] = []
    create = Trainer.create_optimizer

    def noting(trainer: Any, *args: Any) -> Any:
        made.append(create(trainer, *args))
        return made[-1]

    monkeypatch.setattr(Trainer, "create_optimizer", noting)
    training = {"steps": 4, "optimizer": "muon", "schedule": "constant", "warmup_steps": 0}
    train(quiet_config(tmp_path / "run", texts, training=training))
    [optimizer] = made
    muon, adamw = optimizer.parts
    [matrices] = muon.param_groups
    assert len(matrices["params"]) == 2 * 7
    assert all(x.ndim == 2 for x in matrices["params"])
    model = nsa_flex.load(tmp_path / "run" / "model")
    num = sum(len(group["params"]) for part in optimizer.parts for group in part.param_groups)
    assert num == len(list(model.parameters()))
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.1, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-2}
    assert matrices is optimizer.param_groups[0]


def rates(run: Path) -> list[float]:
    return [row["learning_rate"] for row in read_rows(run, "training")]


def test_a_stable_rate_decays_at_the_end(tmp_path: Path, texts: Path) -> None:
    """In the last fifth, or as the options say."""
    training = {"steps": 10, "warmup_steps": 2, "schedule": "warmup_stable_decay"}
    run = {"log_every": 1}
    train(quiet_config(tmp_path / "run", texts, training=training, run=run))
    assert rates(tmp_path / "run")[:2] == [0.0, 0.005]
    assert rates(tmp_path / "run")[2:9] == [0.01] * 7
    assert 0 < rates(tmp_path / "run")[9] < 0.01
    training |= {"schedule_options": {"num_decay_steps": 4, "decay_type": "linear"}}
    train(quiet_config(tmp_path / "other", texts, training=training, run=run))
    assert rates(tmp_path / "other")[6:] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_a_resumed_run_begins_to_decay(tmp_path: Path, texts: Path) -> None:
    """An option of the schedule is a change that must be told, and is named by its key."""
    stable = {"schedule": "warmup_stable_decay", "schedule_options": {"num_decay_steps": 1}}
    begin(tmp_path / "run", texts, training={**stable, "steps": 12})
    stable["schedule_options"] = {"num_decay_steps": 4, "decay_type": "linear"}
    config = quiet_config(tmp_path / "run", texts, training=stable, run={"log_every": 1})
    with pytest.raises(
        ValueError, match=r"change it with --change training\.schedule_options\.nu"
    ):
        train(config, resume=True)
    train(config, resume=True, changes={"training.schedule_options"})
    assert rates(tmp_path / "run")[-4:] == pytest.approx([0.01, 0.0075, 0.005, 0.0025])


def test_the_average_is_that_of_the_weights(tmp_path: Path, texts: Path) -> None:
    """Against a loop over the checkpoints of every step; the model itself is not averaged."""
    training = {"steps": 3, "ema": 0.5}
    run = {"log_every": 1, "save_every": 1, "keep": 9}
    config = quiet_config(tmp_path / "run", texts, training=training, run=run)
    train(config)
    states = [
        load_file(tmp_path / "run" / f"checkpoint-{step}" / "model.safetensors")
        for step in (1, 2, 3)
    ]
    saved = [
        load_state(tmp_path / "run" / f"checkpoint-{step}" / "averages.safetensors")
        for step in (1, 2, 3)
    ]
    for name, x in saved[0].items():
        expected = x
        for state, average in zip(states[1:], saved[1:], strict=True):
            expected = 0.5 * expected + 0.5 * state[name]
            torch.testing.assert_close(average[name], expected, rtol=0, atol=1e-7)
    ours = tensors(tmp_path / "run")
    assert all(torch.equal(ours[f"model/{name}"], x) for name, x in states[-1].items())
    assert all(torch.equal(ours[f"model-average/{name}"], x) for name, x in saved[-1].items())
    for lost in (["model", "model-average"], ["model-average"]):  # killed before it was written
        for name in lost:
            shutil.rmtree(tmp_path / "run" / name)
        train(config, resume=True)
        again = tensors(tmp_path / "run")
        assert ours.keys() == again.keys()
        assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": "adamw"}, "training.optimizer is adamw; expected one of auto, adamw_torch"),
        ({"schedule": "greedy"}, "training.schedule is greedy; expected one of cosine, linear"),
    ],
)
def test_unknown_names(
    tmp_path: Path, texts: Path, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train(quiet_config(tmp_path / "run", texts, training=training))
    assert not (tmp_path / "run").exists()


def test_a_missing_package_is_named(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_flex.training.arguments.find_spec", lambda name: None)
    config = quiet_config(tmp_path / "run", texts, training={"optimizer": "adamw_8bit"})
    with pytest.raises(ModuleNotFoundError, match="adamw_8bit needs bitsandbytes, which is not"):
        train(config)


@pytest.mark.parametrize("training", [{"ema": 0.9}, {"optimizer": "muon"}])
def test_what_shards_refuse(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch, training: dict[str, Any]
) -> None:
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    config = quiet_config(tmp_path / "run", texts, training=training, engine={"parallel": "fsdp"})
    with pytest.raises(ValueError, match=r"does not go with engine\.parallel fsdp"):
        train(config)


def test_a_state_names_no_class_of_others(tmp_path: Path) -> None:
    class Foreign(torch.Tensor):
        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape)

        def __init__(self, inner: torch.Tensor) -> None:
            self.inner = inner

        def __tensor_flatten__(self) -> Any:
            return ["inner"], []

        @staticmethod
        def __tensor_unflatten__(inner: Any, context: Any, *sizes: Any) -> Any:
            raise AssertionError

        @classmethod
        def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    save_state(tmp_path / "state.safetensors", {"x": Foreign(torch.ones(3))})
    with pytest.raises(ValueError, match=r"has a tensor of \S*test_optimizers\.Foreign"):
        load_state(tmp_path / "state.safetensors")


def test_what_several_tensors_share_is_written_once(tmp_path: Path) -> None:
    """bitsandbytes keeps one table for the moments of all parameters."""
    table, other = torch.arange(5.0), torch.arange(5.0)
    state = {"a": table, "b": [table, other], "empty": [torch.empty(0), torch.empty(0)]}
    save_state(tmp_path / "state.safetensors", state)
    read = load_state(tmp_path / "state.safetensors")
    assert all(torch.equal(x, table) for x in (read["a"], *read["b"]))
    assert len(load_file(tmp_path / "state.safetensors")) == 4
