"""Times of calls on CUDA: launched by Python one by one, or replayed from a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]


@dataclass(frozen=True)
class Clock:
    """How much is measured: most calls of a captured graph, and how often it is timed."""

    steps: int = 24
    repeats: int = 11

    def time(self, run: Call, calls: int) -> dict[str, float]:
        """Median, 20th and 80th percentile of µs a call, by CUDA events around `run`."""
        for _ in range(3):
            run()
        found = []
        for _ in range(self.repeats):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            found.append(1e3 * start.elapsed_time(stop) / calls)
        found.sort()
        low, middle, high = (found[int(q * (self.repeats - 1))] for q in (0.2, 0.5, 0.8))
        return {"median_us": round(middle, 2), "p20_us": round(low, 2), "p80_us": round(high, 2)}

    def in_a_graph(self, calls: Sequence[Call]) -> dict[str, float]:
        """Times of `calls`, in turn, captured."""
        order = self._several(calls)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in order:
                call()
        return self.time(graph.replay, len(order))

    def one_by_one(self, calls: Sequence[Call]) -> dict[str, float]:
        """Times of `calls`, in turn, launched by Python: what the host needs, if it is slower."""
        order = self._several(calls)

        def run() -> None:
            for call in order:
                call()

        return self.time(run, len(order))

    def _several(self, calls: Sequence[Call]) -> list[Call]:
        """`calls` over and over, as many as take some milliseconds; all have run before."""
        for call in calls:
            call()
        torch.cuda.synchronize()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        calls[0]()
        stop.record()
        torch.cuda.synchronize()
        most = max(1, int(3 / start.elapsed_time(stop)))
        count = max(min(len(calls), self.steps), min(self.steps, most))
        return list(itertools.islice(itertools.cycle(calls), count))
