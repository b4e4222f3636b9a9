"""Streams that chunks of the fused choice, and windows of the selection, alternate between.

The last programs of a launch leave most of the device idle. On two streams they run beside the
next chunk's first ones, and what waits for memory beside what waits for arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache

import torch


@contextmanager
def lanes(device: torch.device, number: int) -> Iterator[list[AbstractContextManager[object]]]:
    """Contexts whose launches run beside one another: the current stream and others.

    All of them start after what the current stream was given before; what it is given afterwards
    waits for all of them, so that memory may be freed as if there had been one stream.
    """
    if device.type != "cuda" or number == 1:
        yield [nullcontext() for _ in range(number)]
        return
    current = torch.cuda.current_stream(device)
    others = [_stream(device, index) for index in range(1, number)]
    for other in others:
        other.wait_stream(current)
    try:
        yield [nullcontext(), *(torch.cuda.stream(other) for other in others)]
    finally:
        for other in others:
            current.wait_stream(other)


@lru_cache
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """One stream for each index: making them would take time in every call."""
    return torch.cuda.Stream(device)
