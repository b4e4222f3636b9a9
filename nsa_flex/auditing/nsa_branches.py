"""Which backend each branch of `nsa_attention` takes while code runs, and its kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import nsa_flex.attention
import nsa_flex.backends.fused
import nsa_flex.dispatch
from nsa_flex import backends
from nsa_flex.auditing.phases import BranchRun

_MARK = "nsa_flex branch "
_TOGETHER = "all three"
_LISTED = 12


def branches_of(prepare: Callable[[], Callable[[], Any]]) -> tuple[BranchRun, ...]:
    """Run what `prepare` returns eagerly; one entry for each branch, backend and reason.

    Kernels are names from the profiler: CUDA kernels where there are any, else operators that
    took time on the CPU, the longest first. Empty where `nsa_attention` is not called.
    """
    chosen: list[Any] = []
    call = prepare()
    with _watched(chosen):
        call()
    if not chosen:
        return ()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    call = prepare()
    with _watched([]), profile(activities=activities, acc_events=True) as profiler:
        call()
    kernels = _kernels(profiler.events() or [])
    runs = tuple(
        BranchRun(c.branch, c.backend, c.reason, kernels.get(c.branch, ()))
        for c in dict.fromkeys(chosen)
    )
    if _TOGETHER not in kernels:
        return runs
    reason = "each branch has a kernel that the core operator knows"
    return (*runs, BranchRun(_TOGETHER, "core", reason, kernels[_TOGETHER]))


@contextlib.contextmanager
def _watched(chosen: list[Any]) -> Iterator[None]:
    """Within, note each choice of backends, and mark each branch's stretch for the profiler."""
    attention, table, fused = nsa_flex.attention, nsa_flex.dispatch.IMPLEMENTATIONS, backends.fused
    choose, before, attend = attention.choose_backends, dict(table), fused.attend

    def noted(*args: Any, **kwargs: Any) -> Any:
        choices = choose(*args, **kwargs)
        chosen.extend(choices.values())
        return choices

    def marked(branch: str, function: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            with record_function(_MARK + branch):
                return function(*args, **kwargs)

        return run

    attention.choose_backends = noted
    fused.attend = marked(_TOGETHER, attend)
    table.update({key: marked(key[1], function) for key, function in before.items()})
    try:
        yield
    finally:
        attention.choose_backends = choose
        fused.attend = attend
        table.update(before)


def _kernels(events: Any) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.name.startswith(_MARK):
            times = found.setdefault(event.name.removeprefix(_MARK), {})
            _add(event, times)
    return {
        branch: tuple(sorted(times, key=lambda name: -times[name])[:_LISTED])
        for branch, times in found.items()
    }


def _add(event: Any, times: dict[str, float]) -> None:
    """Kernels below `event` with their microseconds; CPU operators where there is no CUDA."""
    for child in event.cpu_children:
        _add(child, times)
    for kernel in event.kernels:
        times[kernel.name] = times.get(kernel.name, 0.0) + kernel.duration
    if not torch.cuda.is_available() and not event.name.startswith(_MARK):
        times[event.name] = times.get(event.name, 0.0) + event.self_cpu_time_total
