"""Steps of the Trainer: what they read on the host, and when."""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import transformers
from training.small_config import NSA, small_config, write_texts
from transformers import TrainerCallback

from nsa_flex.hot_path import SyncDetector
from nsa_flex.training import run
from nsa_flex.training.arguments import training_arguments
from nsa_flex.training.run import train
from nsa_flex.training.telemetry.callback import TelemetryCallback
from nsa_flex.training.trainer import Trainer

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


class OnFourGpus(transformers.TrainingArguments):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._n_gpu = 4


def test_a_process_trains_on_one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of several the Trainer makes an nn.DataParallel, which compiled layers refuse."""
    monkeypatch.setattr("nsa_flex.training.arguments.TrainingArguments", OnFourGpus)
    config = small_config(tmp_path / "run", tmp_path)
    arguments = training_arguments(config, "LlamaDecoderLayer")
    assert arguments.n_gpu == 1
    assert arguments.train_batch_size == config.training.batch_size


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


class Calls(TrainerCallback):
    """Every call of a function, in Python or C, in each step from the second on."""

    def __init__(self) -> None:
        self.of_step: dict[int, Counter[str]] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counting = self.of_step[state.global_step + 1] = Counter()
        sys.setprofile(self._note)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(None)

    def _note(self, frame: Any, event: str, called: Any) -> None:
        if event == "call":
            self._counting[f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self._counting[f"{called.__module__}.{called.__qualname__}"] += 1


def test_a_step_without_a_row_does_what_it_does_without_telemetry(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for counting itself; after a probe too, which leaves nothing behind."""
    every = {"log_every": 3, "gates_every": 3, "heartbeat_seconds": 60.0, **QUIET}

    def calls(name: str) -> dict[int, Counter[str]]:
        seen = Calls()
        config = small_config(tmp_path / name, texts, training={"steps": 7}, run=every)
        gc.collect()
        gc.disable()
        try:
            train(config, callbacks=[seen])
        finally:
            sys.setprofile(None)
            gc.enable()
        return seen.of_step

    told = calls("told")
    for event in ("on_train_begin", "on_step_end", "on_log"):
        monkeypatch.setattr(TelemetryCallback, event, getattr(TrainerCallback, event))
    silent = calls("silent")
    telemetry = "nsa_flex.training.telemetry"
    for step in (4, 5):  # between the rows of 3 and 6; the probe ran at 0 and 3
        assert silent[step].total() > 1000
        assert silent[step] - told[step] == {"transformers.trainer_callback.on_step_end": 1}
        assert told[step] - silent[step] == {
            f"{telemetry}.callback.on_step_end": 1,
            f"{telemetry}.session.step_ended": 1,
            f"{telemetry}.rows.stepped": 1,
            "time.monotonic": 1,
        }


def test_layers_are_recomputed_in_a_decoder_of_text_within_a_model(
    texts: Path, tmp_path: Path
) -> None:
    """Its config says too that there is no cache, in which a layer would find its own keys."""
    text = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=299
    )
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path / "gemma")
    losses = {
        kind: train(
            small_config(
                tmp_path / kind,
                texts,
                model={"preset": None, "checkpoint": str(tmp_path / "gemma"), "nsa": NSA},
                data={"documents": "joined", "seq_len": 64},
                training={"steps": 2},
                engine={"checkpointing": kind},
                run=QUIET,
            )
        )["loss"]
        for kind in ("none", "selective", "full")
    }
    assert losses["none"] == pytest.approx(losses["selective"], abs=1e-5)
    assert losses["none"] == pytest.approx(losses["full"], abs=1e-5)
