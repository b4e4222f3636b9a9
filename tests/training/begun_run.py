"""A run that was stopped after step 8 of 12, and what tests look at when it goes on."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from training.small_config import small_config
from transformers import TrainerCallback

from nsa_flex.training.config import TrainConfig
from nsa_flex.training.run import train
from nsa_flex.training.trainer import Trainer

QUIET = {"eval_every": 0, "gates_every": 0, "heartbeat_seconds": 60.0}


def quiet_config(out: Path, texts: Path, **sections: Any) -> TrainConfig:
    """`small_config` without measurements; checkpoints at 4, 8 and 12."""
    sections["run"] = {**QUIET, **sections.get("run", {})}
    return small_config(out, texts, **sections)


class Stop(TrainerCallback):
    """A signal in step 7, so that the run ends after step 8."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)


def begin(
    out: Path,
    texts: Path,
    *,
    resume: bool = False,
    changes: Collection[str] = (),
    **sections: Any,
) -> Path:
    """Checkpoints 4 and 8."""
    config = quiet_config(out, texts, **sections)
    result = train(config, resume=resume, changes=changes, callbacks=[Stop()])
    assert result["steps"] == 8
    return out


def copied(run: Path, folder: Path) -> Path:
    """With the times of the files."""
    return Path(shutil.copytree(run, folder))


class Rows:
    """The rows that a Trainer trains on, one after another, as long as it is installed."""

    def __init__(self, monkeypatch: Any, seq_len: int = 64) -> None:
        self.rows: list[tuple[int, ...]] = []
        step = Trainer.training_step

        def noting(trainer: Any, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
            self.rows += map(tuple, inputs["input_ids"].view(-1, seq_len).tolist())
            return step(trainer, model, inputs, *args)

        monkeypatch.setattr(Trainer, "training_step", noting)
