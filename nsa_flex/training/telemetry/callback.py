"""Telemetry for transformers' Trainer, and for the trainers built on it (TRL's, for instance)."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nsa_flex.training.telemetry.observe import Probe
from nsa_flex.training.telemetry.session import Telemetry


class TelemetryCallback(TrainerCallback):
    """Writes the artefacts of `nsa_flex.telemetry` beside a Trainer's checkpoints.

    Rows of training.csv come at the trainer's logging steps. Pass
    `TrainingArguments(logging_nan_inf_filter=False)`: the trainer hides losses that are not finite
    otherwise, and reads every step's.

    Args:
        folder: of the run; the trainer's `output_dir` if None.
        probe: as of `Telemetry`; by default the first row of the training set, where it can be
            indexed and has no padding.
        measures: false leaves gates and backends out.
        tokens_per_step: of one optimizer step on all ranks, for the tokens column.
        first_tokens: trained on before; `tokens_per_step` for each step done, if None.
        gates_every, heartbeat_seconds, strict, tokens_per_byte: as of `Telemetry`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        probe: Probe | None = None,
        measures: bool = True,
        tokens_per_step: int | None = None,
        first_tokens: int | None = None,
        gates_every: int = 100,
        heartbeat_seconds: float = 10.0,
        strict: bool = False,
        tokens_per_byte: float | None = None,
    ) -> None:
        self.folder, self.probe = folder, probe
        self.tokens_per_step, self.first_tokens = tokens_per_step, first_tokens
        self.gates_every, self.heartbeat_seconds = gates_every, heartbeat_seconds
        self.strict, self.measures = strict, measures
        self.tokens_per_byte = tokens_per_byte
        self.session: Telemetry | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the files and measure the probe once."""
        probe = self.probe
        if probe is None and self.measures:
            probe = _first_row(kwargs.get("train_dataloader"), args.device)
        self.session = Telemetry(
            kwargs["model"],
            args.output_dir if self.folder is None else self.folder,
            probe=probe,
            gates_every=self.gates_every,
            heartbeat_seconds=self.heartbeat_seconds,
            strict=self.strict,
            first_step=state.global_step,
            tokens_per_byte=self.tokens_per_byte,
        )
        before = self.first_tokens
        if before is None:
            before = (self.tokens_per_step or 0) * state.global_step
        self.session.tokens = before
        self.session.__enter__()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the step; before a row, run the probe while the device still computes."""
        assert self.session is not None
        self.session.step_ended(
            state.global_step,
            tokens=self.tokens_per_step,
            calls=args.gradient_accumulation_steps,
        )
        if control.should_log:
            self.session.measure()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """A row of the losses that the trainer logs; callbacks after this one log more of it."""
        if self.session is None or logs is None or not {"loss", "eval_loss"} & logs.keys():
            return
        logs |= self.session.record(
            loss=logs.get("loss"),
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            held_out_loss=logs.get("eval_loss"),
        )

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The heartbeat says that it evaluates."""
        if self.session is not None:
            self.session.phase("evaluating")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the last lines and close the files."""
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Close the files; `error` is what ended the training too early."""
        if self.session is not None:
            self.session.__exit__(None if error is None else type(error), error, None)
            self.session = None


def _first_row(loader: Any, device: Any) -> dict[str, Any] | None:
    """The first row as the trainer would batch it, without labels; None if there is none to have.

    A data set that is only iterated over is left alone.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        return None
    batch = dict(loader.collate_fn([dataset[0]]))
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and not bool(mask.all()):
        return None
    batch.pop("labels", None)
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
