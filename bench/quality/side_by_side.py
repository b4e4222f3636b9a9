"""Processes of a study, several side by side on each GPU, for a few minutes at a time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POLL_SECONDS = 2.0
SECONDS = "{seconds}"  # in a command: how long the process may take


@dataclass(frozen=True)
class Job:
    """A run, in a process of its own.

    Args:
        name: of its log.
        command: arguments of Python. One that is told `SECONDS` ends by itself.
        after: names of jobs that it needs the results of.
    """

    name: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()

    @property
    def ends_itself(self) -> bool:
        """Whether it is told how long it may take."""
        return any(SECONDS in part for part in self.command)


@dataclass(frozen=True)
class Limits:
    """How many processes at a time, and how long.

    Args:
        side_by_side: processes at a time, on each GPU.
        gpus: how many there are; without any, processes share the CPU.
        seconds: until the last process has ended.
        closing: of these for a stopped run: checkpoint and held-out losses.
        least: a run is started only if as many seconds are left before the closing.
    """

    side_by_side: int = 2
    gpus: int = 0
    seconds: float = 540.0
    closing: float = 45.0
    least: float = 90.0


def start_in(logs: Path, limits: Limits) -> Callable[[Job, int, float], Any]:
    """What starts a job on a GPU by its number among those that this process sees.

    Args:
        logs: folder of what the processes print, a file each.
    """

    def start(job: Job, gpu: int, seconds: float) -> subprocess.Popen:
        command = [part.replace(SECONDS, f"{seconds:.0f}") for part in job.command]
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / f"{job.name}.log").open("a") as log:
            environment = environment_on(gpu, limits.gpus)
            return subprocess.Popen(
                [sys.executable, *command], stdout=log, stderr=log, env=environment
            )

    return start


def environment_on(gpu: int, gpus: int) -> dict[str, str]:
    """This process's, in which one GPU of several is to be seen."""
    found = dict(os.environ)
    if gpus > 1:
        seen = [each for each in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        found["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)
    return found


def run_jobs(
    jobs: Sequence[Job],
    limits: Limits,
    begun: float,
    is_done: Callable[[Job], bool],
    collect: Callable[[], Any],
    start: Callable[[Job, int, float], Any],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[str]:
    """Start, watch and stop jobs, in their order; returns what failed, in words.

    Args:
        begun: the clock's time from which the limits count.
        is_done: whether a job needs to be run no more.
        collect: called again and again, to take over what jobs have written.
        start: makes something with the `poll`, `terminate` and `kill` of a process, for a job on a
            GPU with so many seconds.
    """
    waiting = [job for job in jobs if not is_done(job)]
    missing = {job.name: job for job in waiting}
    running: dict[Job, Any] = {}
    places: dict[Job, int] = {}  # GPUs of the running ones
    gpus = max(limits.gpus, 1)
    failed: list[str] = []
    asked = False
    killed: set[Job] = set()
    while waiting or running:
        left = begun + limits.seconds - clock()
        ended = [job for job, process in running.items() if process.poll() is not None]
        collect()
        for job in ended:
            code = running.pop(job).poll()
            del places[job]
            if code and job not in killed:
                failed.append(f"{job.name} ended with {code}")
            elif is_done(job):
                del missing[job.name]
        ready = [job for job in waiting if not missing.keys() & {*job.after}]
        if left < limits.closing + limits.least or not (ready or running):
            waiting.clear()
            ready.clear()
        while ready and len(running) < limits.side_by_side * gpus:
            job = ready.pop(0)
            waiting.remove(job)
            places[job] = min(range(gpus), key=list(places.values()).count)
            running[job] = start(job, places[job], left - limits.closing)
        if left < limits.closing and not asked:
            asked = True
            for job, process in running.items():
                if not job.ends_itself:
                    process.terminate()
        if left < 2 * POLL_SECONDS:
            for process in running.values():
                process.kill()
            killed |= {*running}
        sleep(POLL_SECONDS)
    return failed
