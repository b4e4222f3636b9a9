"""What held up the host while it launched steps: our code, Python's GC, or the machine."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from nsa_flex.bench.report.rows import Row


class HostCosts:
    """Counts while it is entered; `since_last` tells.

    gc_ms: in Python's garbage collector.
    process_ms: CPU time of all threads.
    steal_ms: in which the machine's CPUs were given to others; of virtual machines on Linux.
    preempted: times that a thread of the process lost its CPU to another one.
    page_faults: those that waited for the disk.
    What `timed` names, in ms.
    """

    def __init__(self) -> None:
        self._seconds = {"gc_ms": 0.0}
        self._before = _of_the_process()

    def __enter__(self) -> HostCosts:
        gc.callbacks.append(self._collects)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collects)

    @contextlib.contextmanager
    def timed(self, name: str, owner: type, *methods: str) -> Iterator[None]:
        """Within, the seconds inside `methods` of `owner` are those of `name`."""
        self._seconds[name] = 0.0
        with contextlib.ExitStack() as stack:
            for method in methods:
                stack.enter_context(
                    mock.patch.object(owner, method, self._timed(name, getattr(owner, method)))
                )
            yield

    def since_last(self) -> Row:
        """What happened since the last call, and from now on the next one's."""
        before, self._before = self._before, _of_the_process()
        row: Row = {name: round(1e3 * seconds, 2) for name, seconds in self._seconds.items()}
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        return row | {name: round(now - before[name], 2) for name, now in self._before.items()}

    def _timed(self, name: str, call: Any) -> Any:
        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return timed

    def _collects(self, phase: str, about: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._seconds["gc_ms"] += now - self._began


def _of_the_process() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "process_ms": 1e3 * (used.ru_utime + used.ru_stime),
        "steal_ms": 1e3 * _stolen(),
        "preempted": used.ru_nivcsw,
        "page_faults": used.ru_majflt,
    }


def _stolen() -> float:
    """Seconds of all CPUs since the machine started; 0 where the system does not tell."""
    file = Path("/proc/stat")
    fields = file.read_text().split("\n", 1)[0].split() if file.exists() else []
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0
