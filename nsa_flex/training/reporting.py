"""What a run tells TensorBoard and W&B, by transformers' callbacks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import get_reporting_integration_callbacks

from nsa_flex.training.arguments import rank
from nsa_flex.training.config import TrainConfig


def check_reporters(config: TrainConfig) -> None:
    """Raise ModuleNotFoundError if a package that `run.report_to` names is not installed."""
    for name in config.run.report_to:
        if find_spec(name) is None:
            raise ModuleNotFoundError(
                f"run.report_to names {name}, which is not installed; install it with: "
                "pip install 'nsa-flex[report]'",
                name=name,
            )


@contextlib.contextmanager
def reporting(config: TrainConfig) -> Iterator[list[TrainerCallback]]:
    """The callbacks that `run.report_to` names; what they write is whole when the context ends.

    Both write into the run's folder. W&B is offline unless WANDB_MODE says otherwise; every
    session of a run is one of its group.
    """
    names, out = list(config.run.report_to), Path(config.out)
    session: Any = None
    mode: Any = os.environ.get("WANDB_MODE", "offline")
    if "wandb" in names and rank() == 0:
        import wandb

        session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "nsa-flex"),
            group=out.name,
            dir=str(out),
            config=config.to_dict(),
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
    callbacks = [make() for make in get_reporting_integration_callbacks(names)]
    for each in callbacks:
        if hasattr(each, "tb_writer"):
            each.logging_dir = str(out / "tensorboard")
    try:
        yield callbacks
    finally:
        for each in callbacks:
            if getattr(each, "tb_writer", None) is not None:
                each.tb_writer.close()
        if session is not None:
            session.finish()
