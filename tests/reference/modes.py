"""Modes of torch that hold within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic_algorithms(wanted: bool = True, *, warn_only: bool = False) -> Iterator[None]:
    """Within, `torch.use_deterministic_algorithms(wanted)`; afterwards it is off."""
    torch.use_deterministic_algorithms(wanted, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Within, RuntimeError where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
