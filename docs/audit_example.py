"""A small model with faults, for the page in audit.md: nsa-flex audit docs.audit_example:faulty.

`mended` computes the same without them.
"""

from __future__ import annotations

import torch
from torch import nn


class Faulty(nn.Module):
    """Mixes tokens, scales by what it saw, and drops padding: four faults."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)
        self.calls = 0

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # a counter in Python: a graph for every value
        longest = lengths.max().item()  # the host waits; the graph ends here
        x = self.mix(x[:, :longest]) * self.calls
        if x.abs().amax() > 10.0:  # so does this branch
            x = x / x.abs().amax()
        if x.shape[1] > 50:  # another graph for long inputs
            x = x + x.mean(1, keepdim=True)
        return x


class Mended(nn.Module):
    """The same for the compiler's sake: masks, torch.where, and a counter that is a tensor."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(32, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        calls = self.calls + 1
        self.calls.copy_(calls)
        place = torch.arange(x.shape[1], device=x.device)
        inside = place[:, None] < lengths.amax()
        x = torch.where(inside, self.mix(x) * calls, 0.0)
        largest = x.abs().amax()
        x = torch.where(largest > 10.0, x / largest, x)
        is_long = torch.full((), x.shape[1], device=x.device) > 50
        return torch.where(is_long, x + x.mean(1, keepdim=True), x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four lengths."""
    return [
        (torch.randn(2, length, 32), torch.tensor([length // 2, length - 3]))
        for length in (24, 40, 64, 31)
    ]


def faulty() -> tuple[nn.Module, list]:
    """For `nsa-flex audit docs.audit_example:faulty`."""
    return Faulty(), batches()


def mended() -> tuple[nn.Module, list]:
    """For `nsa-flex audit docs.audit_example:mended`."""
    return Mended(), batches()
