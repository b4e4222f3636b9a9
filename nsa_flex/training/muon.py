"""Muon for matrices, AdamW for all else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from nsa_flex.training.models import decoder_layers


class MuonAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, each with its own parameters; one learning rate suits both.

    Args:
        muon, adamw: whose groups of parameters these become.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.parts: tuple[torch.optim.Optimizer, ...] = (muon, adamw)
        super().__init__(self._groups(), {})

    def _groups(self) -> list[dict[str, Any]]:
        """The dicts themselves: who sets a learning rate there sets that of the part."""
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Both parts'."""
        assert closure is None
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Both parts'."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Both parts'."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = self._groups()


def muon_adamw(
    model: Any,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    decayed: Collection[str],
    **options: Any,
) -> MuonAdamW:
    """Muon for the linear maps of decoder layers; NSA's own are small, and go to AdamW.

    Args:
        decayed: names of parameters with weight decay.
        options: of torch.optim.Muon.
    """
    matrices = {
        module.weight
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and "nsa" not in name.split(".")
    }
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    others = [(n, p) for n, p in named if p not in matrices]
    settings = {"lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon([p for _, p in named if p in matrices], **{**settings, **options})
    adamw = torch.optim.AdamW(
        [
            {"params": [p for n, p in others if n in decayed], "weight_decay": weight_decay},
            {"params": [p for n, p in others if n not in decayed], "weight_decay": 0.0},
        ],
        lr=lr,
        betas=betas,
    )
    return MuonAdamW(muon, adamw)
