"""What a compiled call costs, and which backends and kernels the branches of NSA take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import nsa_flex.attention
import nsa_flex.backends.fused
import nsa_flex.dispatch
from nsa_flex import backends
from nsa_flex.auditing.batches import Batch, split
from nsa_flex.auditing.report import BranchRun
from nsa_flex.hot_path import Finding, ForwardBackward, SyncDetector
from nsa_flex.hot_path.syncs import cuda_sync_warnings
from nsa_flex.hot_path.torch_internals import cudagraph_skips, fresh_cache, fresh_compiler


def parameters_of(fn: Any) -> list[nn.Parameter]:
    """Of a module, of the one a method is bound to, and what a function names or closes over."""
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or () if _is_filled(c)]
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    globals_ = [getattr(fn, "__globals__", {}).get(name) for name in names]
    held = [fn, getattr(fn, "__self__", None), *cells, *globals_]
    own = [p for p in held if isinstance(p, nn.Parameter)]
    return own + [p for m in held if isinstance(m, nn.Module) for p in m.parameters()]


@contextlib.contextmanager
def gradients_kept(fn: Any) -> Iterator[None]:
    """Parameters' `.grad` is None inside and what it was before afterwards."""
    before = [(p, p.grad) for p in parameters_of(fn)]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def _is_filled(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not None
    return False


LISTED_KERNELS = 12
MOST_CALLS = 12  # of one batch: a cache in it needs room for so many steps


@dataclass
class Measured:
    """Numbers of one phase, and the syncs and skips that compiled code showed."""

    numbers: dict[str, float] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()
    cudagraphs: int | None = None
    skip_reasons: tuple[str, ...] = ()
    syncs: tuple[Finding, ...] = ()


def measure(
    fn: Callable, batch: Batch, *, train: bool, dynamic: bool | None, tell: Callable[[str], None]
) -> Measured:
    """Compile for one batch with an empty cache, then from a full one; time and profile a call.

    All calls, `MOST_CALLS` at most, get the same tensors: CUDA graphs are recorded for them.
    On CUDA with `mode="reduce-overhead"`: skips of CUDA graphs and synchronisations are counted.
    """
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    mode = "reduce-overhead" if cuda else None
    result = Measured()

    def compiled_call() -> Callable[[], None]:
        step = torch.compile(fn, dynamic=dynamic, mode=mode)
        return lambda: run(ForwardBackward(step) if train else step)

    args, kwargs = split(batch.make())
    leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_leaf]

    def run(step: Callable) -> None:
        if cuda:
            torch.compiler.cudagraph_mark_step_begin()
        # As zero_grad does: gradients lie in memory that the next replay writes to.
        for x in (*parameters_of(fn), *leaves):
            x.grad = None
        step(*args, **kwargs)

    with fresh_cache(), torch.set_grad_enabled(train):
        with fresh_compiler(), cudagraph_skips() as skips:
            tell("compiling with an empty cache")
            call = compiled_call()
            result.numbers["compile_seconds_cold"] = _seconds(call)
            if cuda:  # A replay allocates nothing: look at the call that is recorded.
                result.numbers["peak_bytes_compiled"] = _cuda_peak(call)
            call()
            result.numbers["step_seconds"] = min(_seconds(call) for _ in range(3))
            result.kernels = _kernels(call)
            if cuda:
                result.syncs = tuple(_syncs(call))
        with fresh_compiler():
            tell("compiling from the cache")
            result.numbers["compile_seconds_warm"] = _seconds(compiled_call())
    if cuda:
        result.cudagraphs = skips.count
        unexplained = skips.count - len(skips.reasons)
        result.skip_reasons = (*skips.reasons, *["torch gives no reason"] * unexplained)
    return result


def peak_bytes(fn: Callable, batch: Batch, *, train: bool) -> float:
    """Most bytes that tensors made by one eager call held at once."""
    with torch.set_grad_enabled(train):
        step = ForwardBackward(fn) if train else fn
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return _cuda_peak(batch.bind(step))
        call = batch.bind(step)
        with _LiveBytes() as live:
            call()
        return live.peak


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _cuda_peak(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _syncs(call: Callable[[], Any]) -> list[Finding]:
    detector = SyncDetector()
    with cuda_sync_warnings(detector):
        call()
    return detector.findings


def _kernels(call: Callable[[], Any]) -> tuple[dict[str, Any], ...]:
    """Longest first: CUDA kernels, or what ran on the CPU where there are none."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, acc_events=True) as profiler:
        call()
    averages = profiler.key_averages()
    on_device = [e for e in averages if e.device_type == torch.autograd.DeviceType.CUDA]
    times = {e.key: (e.count, e.self_device_time_total) for e in on_device}
    if not times:
        times = {e.key: (e.count, e.self_cpu_time_total) for e in averages}
    longest = sorted(times.items(), key=lambda item: -item[1][1])[:LISTED_KERNELS]
    return tuple(
        {"name": name, "calls": calls, "microseconds": round(total, 1)}
        for name, (calls, total) in longest
    )


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators inside have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0.0
        self._known: set[int] = set()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = tree_leaves((args, kwargs))
        self._known |= {key for x in inputs if (key := _storage(x)) and key not in self._alive}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            key = _storage(x)
            if key and key not in self._alive and key not in self._known:
                storage = x.untyped_storage()
                self._alive[key] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {k: v for k, v in self._alive.items() if not v[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def _storage(x: Any) -> int:
    if not isinstance(x, torch.Tensor):
        return 0
    with contextlib.suppress(NotImplementedError, RuntimeError):  # Tensors without memory.
        return x.untyped_storage()._cdata
    return 0


_MARK = "nsa_flex branch "
_TOGETHER = "all three"


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
    kernels = _kernels_by_branch(profiler.events() or [])
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


def _kernels_by_branch(events: Any) -> dict[str, tuple[str, ...]]:
    found: dict[str, dict[str, float]] = {}
    for event in events:
        if event.name.startswith(_MARK):
            times = found.setdefault(event.name.removeprefix(_MARK), {})
            _add(event, times)
    return {
        branch: tuple(sorted(times, key=lambda name: -times[name])[:LISTED_KERNELS])
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
