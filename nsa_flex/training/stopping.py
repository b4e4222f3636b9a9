"""Ctrl-C and SIGTERM end a run after its step, with a row and a checkpoint."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopCallback(TrainerCallback):
    """Ends the training where a signal asked for it; the last step gets a row in any case.

    Ranks of a job agree on it at logging steps, when they wait for one another anyway.
    """

    def __init__(self) -> None:
        self.asked = False
        self.stopped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A resumed run logs and saves where its config says, not where its checkpoint did."""
        state.compute_steps(args, state.max_steps)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Row, checkpoint and end, if asked for; a row at the last step."""
        if state.global_step >= state.max_steps:
            control.should_log = True
        elif self._agreed(args, control):
            self.stopped = True
            control.should_log = control.should_save = control.should_training_stop = True

    def _agreed(self, args: TrainingArguments, control: TrainerControl) -> bool:
        if args.world_size == 1:
            return self.asked
        if not control.should_log:
            return False
        asked = torch.tensor(int(self.asked), device=args.device)
        torch.distributed.all_reduce(asked, torch.distributed.ReduceOp.MAX)
        return bool(asked)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Within, the first signal asks for the end, and the second acts as it would have."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in _SIGNALS}

        def ask(number: int, frame: Any) -> None:
            self.asked = True
            for each, handler in before.items():
                signal.signal(each, handler)

        for number in _SIGNALS:
            signal.signal(number, ask)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
