"""transformers' Trainer with checkpoints that are whole, without pickle, and an end on Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import rotate_checkpoints

from nsa_flex.training.averages import AverageCallback
from nsa_flex.training.muon import muon_adamw
from nsa_flex.training.record import Record
from nsa_flex.training.saving import (
    PREFIX,
    load_state,
    random_state,
    save_state,
    set_random_state,
    written_aside,
)

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


# Where accelerate writes the weights of sharded models, as DCP.
SHARDED_WEIGHTS = "pytorch_model_fsdp_0"
OPTIMIZER = "optimizer.safetensors"
SCHEDULER = "scheduler.safetensors"


class Trainer(transformers.Trainer):
    """As transformers' own. Checkpoints are written aside and renamed; held-out losses are eager.

    Weights, optimizer, schedule and random states are safetensors; under FSDP weights and
    optimizer are DCP, which any number of ranks reads.
    """

    autocast_dtype: torch.dtype | None = None
    record_at: Callable[[int], Record]  # of checkpoints, by their step
    average: AverageCallback | None = None
    _random_of: str | None = None
    _aside: Path | None = None

    def use_muon(self, options: dict[str, Any]) -> None:
        """Instead of the optimizer of the arguments; `options` are torch.optim.Muon's."""
        settings = {
            "lr": self.args.learning_rate,
            "weight_decay": self.args.weight_decay,
            "betas": (self.args.adam_beta1, self.args.adam_beta2),
            "decayed": self.get_decay_parameter_names(self.model),
        }
        make: Any = lambda: muon_adamw  # noqa: E731 -- of what is no class, a factory is asked for
        self.optimizer_cls_and_kwargs = (make, {**settings, **options})

    def compute_loss_context_manager(self) -> contextlib.AbstractContextManager:
        """Autocast to `autocast_dtype`, unless accelerate runs its own."""
        if self.autocast_dtype is None:
            return super().compute_loss_context_manager()
        return torch.autocast(self.args.device.type, self.autocast_dtype)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the base class goes through all parameters at every step for it."""
        return 0

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As the base class's, without compiling layers for it a second time."""
        with torch.compiler.set_stance("force_eager"):
            return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        run, writes = Path(self.args.output_dir), self.args.should_save
        with written_aside(run, self.state.global_step, writes=writes) as aside:
            self._aside = aside
            self.accelerator.wait_for_everyone()  # the folder is there
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._aside = None
            self.accelerator.wait_for_everyone()  # everybody has written
            if writes:
                step = self.state.global_step
                self.record_at(step).write(aside / f"{PREFIX}{step}")
        self.accelerator.wait_for_everyone()  # it has its place
        if writes:
            rotate_checkpoints(output_dir=str(run), save_total_limit=self.args.save_total_limit)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._aside is None else str(self._aside)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Weights, config and tokenizer; what the base class pickles is in the run's config."""
        folder = self.args.output_dir if output_dir is None else output_dir
        if not self.args.should_save:
            return
        model: Any = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        model.save_pretrained(folder, state_dict=state_dict)
        if self.processing_class is not None:
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if self.is_fsdp_enabled:
            from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

            plugin = self.accelerator.state.fsdp_plugin
            save_fsdp_model(plugin, self.accelerator, self.model, output_dir)
            save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        elif self.args.should_save:
            save_state(folder / OPTIMIZER, self.optimizer.state_dict())
        if self.average is not None:
            self.average.save(folder)
        if self.args.should_save:
            save_state(folder / SCHEDULER, self.lr_scheduler.state_dict())

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder, ours = Path(checkpoint), [_settings(x) for x in self.optimizer.param_groups]
        if self.is_fsdp_enabled:
            from accelerate.utils import load_fsdp_optimizer

            plugin = self.accelerator.state.fsdp_plugin
            load_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, checkpoint)
        else:
            self.optimizer.load_state_dict(load_state(folder / OPTIMIZER))
        self.lr_scheduler.load_state_dict(load_state(folder / SCHEDULER))
        self._keep_settings(ours)

    def _keep_settings(self, ours: list[dict[str, Any]]) -> None:
        """Learning rate, decay and so on are those of the config, not of the checkpoint."""
        schedule: Any = self.lr_scheduler
        schedule.base_lrs = [group["initial_lr"] for group in ours]
        for i, group in enumerate(self.optimizer.param_groups):
            group.update(ours[i])
            factor = schedule.lr_lambdas[i](schedule.last_epoch)
            group["lr"] = schedule.base_lrs[i] * factor
        schedule._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _save_rng_state(self, output_dir: str) -> None:
        folder = Path(output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_state(folder / self._random_file(), random_state())

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """After the first batches, before which the data loader draws a number."""
        self._random_of = checkpoint

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class's. Ranks that the checkpoint did not have keep their random state."""
        found = super().get_batch_samples(*args, **kwargs)
        checkpoint, self._random_of = self._random_of, None
        if checkpoint is not None and (Path(checkpoint) / self._random_file()).exists():
            set_random_state(load_state(Path(checkpoint) / self._random_file()))
        return found

    def _random_file(self) -> str:
        return f"random-{self.args.process_index}.safetensors"


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
