"""Streams that the chunks of a launch alternate between.

The last CTAs of a launch leave most of the device idle. On two streams they run beside the next
chunk's first ones, and memory-bound kernels beside compute-bound ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import TypeVar

import torch

from nsa_flex.fallback_kernels.launch.recorder import current_recorder

Chunk = TypeVar("Chunk")
Workspace = TypeVar("Workspace")


def round_robin(
    device: torch.device,
    chunks: Iterable[Chunk],
    workspaces: Sequence[Workspace],
    launch: Callable[[Chunk, Workspace], None],
) -> None:
    """`launch` of every chunk, round-robin over the workspaces, each with a stream of its own.

    The streams start after what the current one was given before; what it is given afterwards
    waits for all of them, so that memory may be freed as if there had been one stream.
    """
    with _streams(device, len(workspaces)) as streams:
        for index, chunk in enumerate(chunks):
            number = index % len(workspaces)
            with streams[number]:
                launch(chunk, workspaces[number])


@contextmanager
def _streams(device: torch.device, number: int) -> Iterator[list[AbstractContextManager[object]]]:
    """Contexts of the current stream and of others."""
    if device.type != "cuda" or number == 1 or not torch.cuda.is_initialized():
        yield [nullcontext() for _ in range(number)]
        return
    current = torch.cuda.current_stream(device)
    others = [_stream(device, index) for index in range(1, number)]
    recorder = current_recorder()
    for other in others:
        other.wait_stream(current)
    if recorder is not None:
        recorder.fork(device, others)
    try:
        yield [nullcontext(), *(_on(other) for other in others)]
    finally:
        for other in others:
            current.wait_stream(other)
        if recorder is not None:
            recorder.join(device, others)


class _on:  # a context that is entered many times
    """Makes the stream the current one, and records its launches as on that stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.stack = ExitStack()
        self.stack.enter_context(torch.cuda.stream(self.stream))
        recorder = current_recorder()
        if recorder is not None:
            self.stack.enter_context(recorder.on_stream(self.stream))

    def __exit__(self, *error: object) -> None:
        self.stack.close()


@lru_cache
def _stream(device: torch.device, index: int) -> torch.cuda.Stream:
    """One stream for each index: making them would take time in every call."""
    return torch.cuda.Stream(device)
