"""Streams that chunks of the fused choice, and windows of the selection, alternate between.

The last programs of a launch leave most of the device idle. On two streams they run beside the
next item's first ones, and what waits for memory beside what waits for arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Room = TypeVar("Room")


def in_turn(
    device: torch.device,
    items: Iterable[Item],
    rooms: Sequence[Room],
    launch: Callable[[Item, Room], None],
) -> None:
    """`launch` of every item, the rooms taking turns, each on a stream of its own.

    The streams start after what the current one was given before; what it is given afterwards
    waits for all of them, so that memory may be freed as if there had been one stream.
    """
    with _streams(device, len(rooms)) as streams:
        for index, item in enumerate(items):
            turn = index % len(rooms)
            with streams[turn]:
                launch(item, rooms[turn])


@contextmanager
def _streams(device: torch.device, number: int) -> Iterator[list[AbstractContextManager[object]]]:
    """Contexts of the current stream and of others."""
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
