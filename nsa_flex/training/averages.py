"""An exponential moving average of the weights, beside those that train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from nsa_flex.training.saving import load_state, save_state

AVERAGES = "averages.safetensors"


class AverageCallback(TrainerCallback):
    """Moves the average after every step: a_t = decay a_(t-1) + (1 - decay) w_t; a_0 = w_0.

    Args:
        model: whose parameters are averaged, each in its own dtype and on its device.
        decay: 0 up to 1.
        checkpoint: that the average goes on from; one without average begins it with the weights.
    """

    def __init__(self, model: nn.Module, decay: float, checkpoint: Path | None) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.update = get_ema_multi_avg_fn(decay)
        self.averages: dict[str, Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The model is on its device, and has the checkpoint's weights."""
        self.averages = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        if self.checkpoint is not None and (self.checkpoint / AVERAGES).exists():
            for name, x in load_state(self.checkpoint / AVERAGES).items():
                self.averages[name].copy_(x)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Nothing is read on the host."""
        weights = [p.detach() for p in self.model.parameters()]
        self.update(list(self.averages.values()), weights, 0)

    def save(self, checkpoint: Path) -> None:
        """Into a checkpoint."""
        save_state(checkpoint / AVERAGES, self.averages)


@torch.no_grad()
def set_averages(model: nn.Module, averages: dict[str, Tensor]) -> None:
    """Put the average in the place of the weights."""
    for name, parameter in model.named_parameters():
        parameter.copy_(averages[name])
