"""Memory of the device while something runs."""

from __future__ import annotations

import torch


class PeakMemory:
    """Inside, counts memory above what there was: `bytes`, None where it is not counted."""

    bytes: int | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
