"""Launch plans: what an operator does, recorded once and replayed for inputs of the same kind.

The body of an operator plans grids, tiles, workspaces and descriptors in Python, which takes the
host far longer than the launches do. All of it follows from shapes, strides, dtypes, alignment and
the operator's other arguments. A plan is kept by these and by the device; the second call with
the same ones records it, every later call replays it: allocations, operators of PyTorch and
Triton's launches with new pointers, on the caller's stream. Nothing in it depends on values,
addresses or the stream, so that a replay may be captured into a CUDA graph.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton import knobs

from nsa_flex.fallback_kernels.common.plan_lifetimes import insert_releases
from nsa_flex.fallback_kernels.common.plan_recorder import Recorder, Unrecordable
from nsa_flex.fallback_kernels.common.plan_steps import Registers, Step, memory, resolved
from nsa_flex.fallback_kernels.common.plan_workspace import Workspace

Body = TypeVar("Body", bound=Callable[..., Any])

MAX_PLANS = 256  # of one operator; the oldest goes
DEVICES = {"cuda"}  # whose operators are planned; tests add the CPU

_SEEN = object()  # called once with such inputs, not recorded yet
_all_plans: weakref.WeakSet[_Plans] = weakref.WeakSet()


def planned(body: Body) -> Body:
    """Decorates the body of an operator that returns a tensor, a tuple of tensors or None.

    The body must not ask for values of tensors and has no state; a body that cannot be recorded
    (`plan_problems` says why) runs as it is.
    """
    plans = _Plans(body)
    _all_plans.add(plans)

    @functools.wraps(body)
    def call(*args: Any, **kwargs: Any) -> Any:
        return body(*args, **kwargs) if kwargs else plans.run(args)

    call.plans = plans  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def forget_plans() -> None:
    """Every operator plans anew; for whoever changes what plans depend on, as tests do."""
    for plans in _all_plans:
        plans.by_key.clear()


def plan_problems() -> dict[str, set[str]]:
    """Why bodies could not be recorded, by operator."""
    return {plans.body.__name__: plans.problems for plans in _all_plans if plans.problems}


class _Plans:
    """The plans of one operator, by `plan_key`."""

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body
        self.by_key: dict[Any, Any] = {}
        self.problems: set[str] = set()
        self.recorded = self.replayed = 0

    def run(self, args: tuple[Any, ...]) -> Any:
        tensors: list[Tensor] = []
        key = plan_key(args, tensors)
        if key is None:
            return self.body(*args)
        plan = self.by_key.get(key)
        if type(plan) is Plan:
            self.replayed += 1
            return plan(tensors)
        if plan is None:
            while len(self.by_key) >= MAX_PLANS:
                self.by_key.pop(next(iter(self.by_key)), None)
            self.by_key[key] = _SEEN
            return self.body(*args)
        if plan is _SEEN and not _is_capturing(tensors[0]):
            return self._record(key, args, tensors)
        return self.body(*args)

    def _record(self, key: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        self.by_key[key] = False  # no plan, unless this one comes to its end
        recorder = Recorder(tensors)
        with recorder.recording():
            out = self.body(*args)
        try:
            if recorder.problem is not None:
                raise Unrecordable(recorder.problem)
            self.by_key[key] = Plan.of(recorder, out)
            self.recorded += 1
        except Unrecordable as problem:
            self.problems.add(str(problem))
        return out


class Plan:
    """Steps in order, and where the results are afterwards."""

    __slots__ = ("device", "offsets", "pointers", "results", "steps", "tensors", "workspace")

    def __init__(
        self,
        steps: list[Step],
        registers: range,
        constants: dict[int, Tensor],
        results: Any,
        device: torch.device,
        workspace: Workspace,
    ) -> None:
        self.offsets = tuple(workspace.offsets.items())
        self.workspace = None
        if workspace.size:
            self.workspace = memory((workspace.size,), (1,), torch.uint8, device)
        self.steps = steps
        # Of the registers behind the operator's own tensors, before the first step.
        self.tensors = [constants.get(register) for register in registers]
        self.pointers = [0 if x is None else x.data_ptr() for x in self.tensors]
        self.results = results
        self.device = device

    @classmethod
    def of(cls, recorder: Recorder, out: Any) -> Plan:
        results = _results(recorder, out)
        returned = {x.register for x in _listed(results) if x is not None}
        inputs = set(range(recorder.num_inputs))
        workspace = Workspace.of(recorder, returned | inputs)
        kept = returned | set(recorder.constants) | set(workspace.offsets)
        insert_releases(recorder.steps, kept)
        # What was returned this time is the caller's already.
        constants = {r: x.clone() if r in returned else x for r, x in recorder.constants.items()}
        others = range(recorder.num_inputs, len(recorder.owners))
        device = recorder.owners[0].device
        return cls(recorder.steps, others, constants, results, device, workspace)

    def __call__(self, tensors: list[Tensor]) -> Any:
        if self.device.type != "cuda":
            return self._replay(tensors, 0)
        index = self.device.index
        if torch._C._cuda_getDevice() == index:
            return self._replay(tensors, torch._C._cuda_getCurrentRawStream(index))
        with torch.cuda.device(index):
            return self._replay(tensors, torch._C._cuda_getCurrentRawStream(index))

    def _replay(self, tensors: list[Tensor], stream: int) -> Any:
        registers = Registers(tensors, self.tensors, self.pointers, stream)
        if self.workspace is not None:
            workspace = self.workspace()
            base, pointers = workspace.data_ptr(), registers.pointers
            for register, offset in self.offsets:
                pointers[register] = base + offset
        for step in self.steps:
            step(registers)
        results = self.results
        if type(results) is tuple:
            return tuple([resolved(x, registers) for x in results])
        return resolved(results, registers)


def plan_key(args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
    """All that the body's Python may depend on, and the tensors in order; None: not to be planned.

    Of a tensor: shape, strides, dtype, alignment, and which others are the same object.
    """
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None  # somebody watches the operators
    parts: list[Any] = []
    if not _add_parts(args, parts, tensors) or not tensors:
        return None
    device = tensors[0].device
    if device.type not in DEVICES or _has_hooks():
        return None
    numbers = {id(x): i for i, x in enumerate(tensors)}
    same = tuple([numbers[id(x)] for x in tensors]) if len(numbers) < len(tensors) else None
    return (device.index, torch.are_deterministic_algorithms_enabled(), same, *parts)


def _add_parts(args: Any, parts: list[Any], tensors: list[Tensor]) -> bool:
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            parts.append((x.shape, x.stride(), x.dtype, x.data_ptr() & 15))
            tensors.append(x)
        elif kind in (int, float, bool, type(None), str, torch.dtype):
            parts.append((kind, x))
        elif kind is list or kind is tuple:
            parts.append(len(x))
            if not _add_parts(x, parts, tensors):
                return False
        else:
            return False
    return True


def _has_hooks() -> bool:
    """Whether somebody, a profiler for one, wants to be told of launches by Triton."""
    runtime = knobs.runtime
    return any(
        hook is not None and getattr(hook, "calls", True)
        for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook)
    )


def _is_capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _results(recorder: Recorder, out: Any) -> Any:
    if out is None or isinstance(out, Tensor):
        return None if out is None else recorder.result(out)
    if isinstance(out, (tuple, list)):
        return tuple(None if x is None else recorder.result(x) for x in out)
    raise Unrecordable(f"it returns {type(out).__name__}")


def _listed(results: Any) -> tuple[Any, ...]:
    # References are tuples by name: the type tells.
    return results if type(results) is tuple else (results,)
