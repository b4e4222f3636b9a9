"""The progress bar of `nsa-flex train`: loss, tokens a second, MFU, time left."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nsa_flex.training.data_report import DATA_REPORT, in_a_line
from nsa_flex.training.flops import flops_per_token, peak_flops


class ProgressCallback(TrainerCallback):
    """A bar on a terminal, a line for each logging step elsewhere; rank 0 alone.

    Args:
        console: where it goes.
        tokens_per_step, seq_len: for tokens a second and MFU.
    """

    def __init__(self, console: Console, tokens_per_step: int, seq_len: int) -> None:
        self.console, self.tokens_per_step, self.seq_len = console, tokens_per_step, seq_len
        self.bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._last = (0, 0.0)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Open the bar."""
        if not state.is_world_process_zero:
            return
        peak = peak_flops(args.device)
        self.peak = None if peak is None else peak * args.world_size
        self.flops = flops_per_token(kwargs["model"], self.seq_len)
        self._last = (state.global_step, time.perf_counter())
        report = Path(args.output_dir) / DATA_REPORT
        if report.exists():
            self.console.print(in_a_line(json.loads(report.read_text())), soft_wrap=True)
        self.bar.start()
        self.task = self.bar.add_task("", total=state.max_steps, completed=state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Move on; nothing is read."""
        if state.is_world_process_zero:
            self.bar.update(self.task, completed=state.global_step)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Say what the trainer logs."""
        if not state.is_world_process_zero or logs is None:
            return
        if "eval_loss" in logs:
            self._last = (state.global_step, time.perf_counter())  # its time is no step's
            self._say(state, f"held-out loss {logs['eval_loss']:.4f}{_held_out(logs)}")
        elif "loss" in logs:
            self._say(state, f"loss {logs['loss']:.4f}{self._speed(state.global_step)}")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the bar."""
        self.close()

    def close(self) -> None:
        """Close the bar, also where the training failed."""
        self.bar.stop()

    def _speed(self, step: int) -> str:
        (before, start), now = self._last, time.perf_counter()
        self._last = (step, now)
        if step == before:
            return ""
        rate = (step - before) * self.tokens_per_step / (now - start)
        mfu = "" if self.peak is None else f", MFU {rate * self.flops / self.peak:.1%}"
        return f", {rate:,.0f} tokens/s{mfu}"

    def _say(self, state: TrainerState, text: str) -> None:
        if self.console.is_terminal:
            self.bar.update(self.task, description=text)
        else:
            line = f"step {state.global_step}/{state.max_steps}: {text}"
            self.console.print(line, markup=False, soft_wrap=True)


def _held_out(logs: dict[str, Any]) -> str:
    names = {"eval_perplexity": "perplexity", "eval_bits_per_byte": "bits a byte"}
    return "".join(f", {word} {logs[name]:.4g}" for name, word in names.items() if name in logs)
