"""Times of a function on its device: CUDA events around every run, caches flushed in between.

Where the host needs longer to queue a run than the device to do it, the device can be made to wait
until all is queued: the time is then that of the kernels back to back, as in a model that keeps
its device busy. What the host needs is told beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz; slower ones wait longer, which does no harm
MAX_WAIT_MS = 50.0
FLUSHED_BYTES = 256 * 2**20  # several times the L2 of any GPU
MIN_REPEATS, MAX_REPEATS = 3, 200
SLOW_MS = 500.0  # what takes longer warms nothing up that matters: its first run counts
SLOW_REPEATS = 2

Mark = Callable[[], None]
Step = Callable[[Mark], None]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one interval over all repeats, and of the host to queue one run."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int
    host_ms: float

    def columns(self) -> dict[str, float | int]:
        """For a row, in microseconds' precision."""
        return {
            "median_ms": round(self.median_ms, 4),
            "p20_ms": round(self.p20_ms, 4),
            "p80_ms": round(self.p80_ms, 4),
            "host_ms": round(self.host_ms, 4),
            "repeats": self.repeats,
        }


def measure(
    step: Step,
    device: torch.device,
    budget_ms: float,
    *,
    hide_host: bool = False,
    first_run: AbstractContextManager[object] | None = None,
) -> dict[str, Times]:
    """Time `step`, which may call its argument once, between its two halves.

    The function has run before. One run is timed to set the number of repeats, so that they take
    about `budget_ms`, and, where they are many, two more warm up. Every repeat starts after a
    write of 256 MB (CUDA), which leaves nothing of its inputs in the caches. With `hide_host` the
    device waits for the host before every repeat where the host is the slower of the two.
    `first_run` is entered around the first run alone. A run of more than half a second is
    repeated once, and both count.

    Returns:
        "whole" and, if the step marked its middle, "second".
    """
    clock = _CudaClock(device) if device.type == "cuda" else _HostClock()
    with first_run or nullcontext():
        first, host_ms = clock.run(step, 1)
    first_ms = first[0][-1] - first[0][0]
    if first_ms > SLOW_MS:
        stamps = first + clock.run(step, SLOW_REPEATS - 1)[0]
    else:
        repeats = min(max(int(budget_ms / max(first_ms, 1e-3)), MIN_REPEATS), MAX_REPEATS)
        if repeats > MIN_REPEATS:
            first, host_ms = clock.run(step, 2)
        device_ms = min(each[-1] - each[0] for each in first)
        wait_ms = 1.5 * host_ms if hide_host and host_ms > 0.8 * device_ms else 0.0
        stamps, _ = clock.run(step, repeats, wait_ms)
    found = {"whole": _summary([s[-1] - s[0] for s in stamps], host_ms)}
    if len(stamps[0]) == 3:
        found["second"] = _summary([s[2] - s[1] for s in stamps], host_ms)
    return found


def _summary(milliseconds: list[float], host_ms: float) -> Times:
    low, high = (_percentile(milliseconds, share) for share in (0.2, 0.8))
    return Times(statistics.median(milliseconds), low, high, len(milliseconds), host_ms)


def _percentile(values: list[float], share: float) -> float:
    """Linear between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


class _CudaClock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.filler = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)

    def run(
        self, step: Step, repeats: int, wait_ms: float = 0.0
    ) -> tuple[list[list[float]], float]:
        """Stamps of each repeat in ms, and ms of the host for one of them."""
        events: list[list[torch.cuda.Event]] = []
        cycles = int(CYCLES_PER_MS * min(wait_ms, MAX_WAIT_MS))

        def mark() -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events[-1].append(event)

        torch.cuda.synchronize(self.device)
        start = time.perf_counter()
        for _ in range(repeats):
            self.filler.zero_()
            if cycles:
                torch.cuda._sleep(cycles)
            events.append([])
            mark()
            step(mark)
            mark()
        host_ms = 1e3 * (time.perf_counter() - start) / max(repeats, 1)
        torch.cuda.synchronize(self.device)
        return [[each[0].elapsed_time(e) for e in each] for each in events], host_ms


class _HostClock:
    def run(
        self, step: Step, repeats: int, wait_ms: float = 0.0
    ) -> tuple[list[list[float]], float]:
        """As for CUDA; everything is the host's time here, and there is nothing to wait for."""
        stamps: list[list[float]] = []

        def mark() -> None:
            stamps[-1].append(1e3 * time.perf_counter())

        for _ in range(repeats):
            stamps.append([])
            mark()
            step(mark)
            mark()
        spent = [each[-1] - each[0] for each in stamps]
        return stamps, statistics.fmean(spent) if spent else 0.0
