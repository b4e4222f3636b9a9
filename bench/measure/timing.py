"""The one timer: what the device takes, and what a caller waits for; peak memory; a time limit.

Device time is by CUDA events around every call, with the caches flushed in between. Where the
host needs longer to queue a call than the device to run it, the device can be made to wait until
all is queued: the time is then that of the kernels back to back, as in a model that keeps its
device busy. What a caller waits for is told beside it, and never hidden: from an idle device to
the result.
"""

from __future__ import annotations

import faulthandler
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

CYCLES_PER_MS = 2_000_000  # of a GPU at 2 GHz; slower ones wait longer, which does no harm
MAX_WAIT_MS = 50.0
FLUSHED_BYTES = 256 * 2**20  # several times the L2 of any GPU
MIN_REPEATS, MAX_REPEATS = 3, 200
MAX_WAITS = 50  # calls from an idle device
SLOW_MS = 500.0  # what takes longer warms nothing up that matters: its first run counts
SLOW_REPEATS = 2
NEAR_HOST = 0.4  # of the device's time: closer, and a slow call of the host leaves gaps
BURST_MS = 3.0  # of calls too short for events around each
# Seconds until the signal comes again, and until the process ends: no signal gets into a C call.
AGAIN, GRACE = 5.0, 30.0

Mark = Callable[[], None]
Step = Callable[[Mark], object]
Call = Callable[[], Any]


@dataclass(frozen=True)
class Times:
    """Milliseconds of one interval over all repeats.

    host_ms: until the call returns, its kernels queued. wall_ms: until its result is there. Both
    from an idle device, medians, of the whole call.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int
    host_ms: float
    wall_ms: float

    def columns(self) -> dict[str, float | int]:
        """For a row, to a tenth of a microsecond."""
        found = {name: round(value, 4) for name, value in vars(self).items()}
        return {**found, "repeats": self.repeats}


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
    device waits for the host before every repeat where the host is not far ahead.
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
        repeats = len(stamps)
    else:
        repeats = min(max(int(budget_ms / max(first_ms, 1e-3)), MIN_REPEATS), MAX_REPEATS)
        if repeats > MIN_REPEATS:
            first, host_ms = clock.run(step, 2)
        device_ms = min(each[-1] - each[0] for each in first)
        wait_ms = 1.5 * host_ms if hide_host and host_ms > NEAR_HOST * device_ms else 0.0
        stamps, _ = clock.run(step, repeats, wait_ms)
    whole = _summary([s[-1] - s[0] for s in stamps])
    host_ms, wall_ms = clock.from_idle(step, min(repeats, MAX_WAITS)) or [whole.median_ms] * 2
    found = {"whole": whole}
    if len(stamps[0]) == 3:
        found["second"] = _summary([s[2] - s[1] for s in stamps])
    return {name: replace(x, host_ms=host_ms, wall_ms=wall_ms) for name, x in found.items()}


def milliseconds(
    name: str, call: Call, device: torch.device, budget_ms: float
) -> dict[str, float]:
    """Columns `{name}_ms`, the device's kernels back to back, and `{name}_wall_ms`, a caller's."""
    whole = measure(lambda mark: call(), device, budget_ms, hide_host=True)["whole"]
    return {f"{name}_ms": round(whole.median_ms, 4), f"{name}_wall_ms": round(whole.wall_ms, 4)}


def both_passes(
    attend: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor], budget_ms: float
) -> dict[str, float]:
    """`milliseconds` of a forward without gradients, and of one with the backward to `inputs`."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    grad = torch.randn_like(attend(*leaves))

    def forward() -> None:
        with torch.no_grad():
            attend(*leaves)

    def both() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)

    found: dict[str, float] = {}
    for name, step in (("forward", forward), ("forward_backward", both)):
        step()
        found |= milliseconds(name, step, grad.device, budget_ms)
    return found


def measure_burst(calls: Sequence[Call], repeats: int, *, captured: bool, most: int = 24) -> Times:
    """Time calls that are too short for events around each: a burst of them, in turn, on CUDA.

    `calls` do the same on inputs of their own, enough of them that the caches hold none. A burst
    takes about `BURST_MS`, at most `most` calls unless there are more inputs. With `captured` it
    is replayed from a CUDA graph; otherwise Python launches every call, which counts where it is
    slower than the device.
    """
    device = torch.device("cuda")
    for call in calls:
        call()
    single = _CudaClock(device).run(lambda mark: calls[0](), 1)[0][0]
    fitting = max(1, int(BURST_MS / max(single[-1] - single[0], 1e-3)))
    burst = [calls[i % len(calls)] for i in range(max(min(len(calls), most), min(most, fitting)))]

    def run() -> None:
        for call in burst:
            call()

    replay: Call = run
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay = graph.replay
    clock = _CudaClock(device, flushes=False)
    clock.run(lambda mark: replay(), 3)
    stamps, host_ms = clock.run(lambda mark: replay(), repeats)
    found = _summary([(s[-1] - s[0]) / len(burst) for s in stamps])
    idle = clock.from_idle(lambda mark: calls[0](), repeats)
    return replace(found, host_ms=host_ms / len(burst), wall_ms=idle[1])


def _summary(milliseconds: list[float]) -> Times:
    low, high = (float(x) for x in np.quantile(milliseconds, (0.2, 0.8)))
    return Times(statistics.median(milliseconds), low, high, len(milliseconds), 0.0, 0.0)


class _CudaClock:
    def __init__(self, device: torch.device, *, flushes: bool = True) -> None:
        self.device = device
        self.filler = torch.empty(FLUSHED_BYTES * flushes, dtype=torch.int8, device=device)

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

    def from_idle(self, step: Step, repeats: int) -> list[float]:
        """Medians of ms, from an idle device: until a call returns, until its result is there."""
        found = []
        for _ in range(repeats):
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            step(lambda: None)
            queued = time.perf_counter()
            torch.cuda.synchronize(self.device)
            found.append((queued - start, time.perf_counter() - start))
        return [1e3 * statistics.median(each) for each in zip(*found, strict=True)]


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

    def from_idle(self, step: Step, repeats: int) -> list[float]:
        """Nothing: a call on the CPU is done when it returns."""
        return []


def reset_peak(device: torch.device) -> None:
    """From now on `peak_of` counts."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_of(device: torch.device) -> int | None:
    """Most bytes that were allocated at once; None where they are not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


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


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the code inside once it has run so long, compilation or not.

    It comes again where that code goes on in spite of it. If nothing helps, every stack is printed
    and the process exits: what was measured is on disk. Call it in the main thread.

    >>> with time_limit(60):
    ...     pass
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=2)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)
