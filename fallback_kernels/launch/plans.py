"""Launch plans: what an operator does, recorded once and replayed for inputs of the same kind.

The body of an operator plans grids, tiles, workspaces and descriptors in Python, which takes the
host far longer than the launches do. All of it follows from shapes, strides, dtypes, alignment and
the operator's other arguments. A plan is kept by these and by the device; the second call with
the same ones records it, every later call replays it: allocations, operators of PyTorch and
Triton's launches with new pointers, on the caller's stream. Nothing in it depends on values,
addresses or the stream, so that a replay may be captured into a CUDA graph.

`NSA_FLEX_LAUNCH_PLANS=0` in the environment at import turns plans off for the whole process,
`without_plans()` for a while: every call then runs its operator's body.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import or_
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter
from triton import knobs

from nsa_flex.fallback_kernels.launch.packing import join_launches
from nsa_flex.fallback_kernels.launch.recorder import Recorder
from nsa_flex.fallback_kernels.launch.steps import Registers, Unrecordable, memory, resolved
from nsa_flex.fallback_kernels.launch.workspace import Workspace, insert_releases

Body = TypeVar("Body", bound=Callable[..., Any])

MAX_PLANS = 256  # of one operator; the oldest goes
MAX_RECENT = 4  # plans whose guards are tried before a key is made
DEVICES = {"cuda"}  # types of devices with plans; tests add the CPU

_PLAIN = frozenset((int, float, bool, type(None), str, torch.dtype))  # their values are in keys
_SEEN = object()  # called once with such inputs, not recorded yet
_all_plans: weakref.WeakSet[_Plans] = weakref.WeakSet()
_enabled = os.environ.get("NSA_FLEX_LAUNCH_PLANS") != "0"


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


def plans_enabled() -> bool:
    """Whether operators record and replay launch plans; else each call runs the body."""
    return _enabled


@contextmanager
def without_plans() -> Iterator[None]:
    """Turns launch plans off within, in all threads: autograd runs backwards in its own.

    Plans that exist are kept, and used again afterwards.
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def forget_plans() -> None:
    """Drops all plans; for tests and others that change what plans were made from."""
    for plans in _all_plans:
        plans.by_key.clear()
        plans.recent.clear()
        plans.known.clear()


def plan_problems() -> dict[str, set[str]]:
    """Why bodies could not be recorded, by operator."""
    return {plans.body.__name__: plans.problems for plans in _all_plans if plans.problems}


class Call(NamedTuple):
    """The arguments of an operator.

    tensors: in order. pointers: their addresses. rest: all other arguments, with the places of
    the tensors.
    """

    tensors: list[Tensor]
    pointers: list[int]
    rest: tuple[Any, ...]


class _Plans:
    """The plans of one operator.

    by_key: by `plan_key`. recent: lists of recent plans, by the `rest` of their calls.
    known: the same lists by `others` of `replay`, each with its `kept`.
    """

    def __init__(self, body: Callable[..., Any]) -> None:
        self.body = body
        self.by_key: dict[Any, Any] = {}
        self.recent: dict[tuple[Any, ...], list[Plan]] = {}
        self.known: dict[tuple[Any, ...], tuple[list[Plan], Any]] = {}
        self.problems: set[str] = set()
        self.recorded = self.replayed = 0

    def run(self, args: tuple[Any, ...]) -> Any:
        call = read_call(args)
        if call is None:
            return self.body(*args)
        plan = self._recent(call)
        if plan is not None:
            self.replayed += 1
            return plan(call.tensors, call.pointers)
        key = plan_key(call)
        if key is None:
            return self.body(*args)
        plan = self.by_key.get(key)
        if type(plan) is Plan:
            self._note(plan, call)
            self.replayed += 1
            return plan(call.tensors, call.pointers)
        if plan is None:
            while len(self.by_key) >= MAX_PLANS:
                self.by_key.pop(next(iter(self.by_key)), None)
                self.recent.clear()
                self.known.clear()
            self.by_key[key] = _SEEN
            return self.body(*args)
        if plan is _SEEN and not _is_capturing(call.tensors[0]):
            return self._record(key, args, call)
        return self.body(*args)

    def replay(
        self,
        tensors: list[Tensor],
        others: tuple[Any, ...],
        args: Callable[[], tuple[Any, ...]],
        kept: Any = None,
    ) -> Any:
        """What `run` returns, if a recent plan serves the call; else None, and nothing is done.

        For a caller that has checked that no mode watches operators, and can name in `others` what
        distinguishes its calls: their arguments are read once for each value of it.

        Args:
            tensors: of the call, in the order of its arguments.
            others: hashable; with the tensors' number it determines all else of the call.
            args: gives the arguments of the call.
            kept: an object whose `id` is in `others`; it is kept alive with them.
        """
        if not _enabled or _has_hooks():
            return None
        which = (torch._C._get_deterministic_algorithms(), len(tensors), *others)
        known = self.known.get(which)
        if known is None:
            call = read_call(args())
            if call is None or len(call.tensors) != len(tensors):
                return None
            assert all(x is y for x, y in zip(call.tensors, tensors, strict=True))
            if len(self.known) >= MAX_PLANS:
                self.known.clear()
                self.recent.clear()
            self.known[which] = known = (self.recent.setdefault(call.rest, []), kept)
        recent = known[0]
        for i, plan in enumerate(recent):
            if plan.guard(*tensors):  # which knows tensors without an address, too
                if i:  # the next call is likely to be such a one, too
                    recent[0], recent[i] = plan, recent[0]
                pointers = [x.data_ptr() for x in tensors]
                if not _are_aligned(pointers):
                    return None
                self.replayed += 1
                return plan(tensors, pointers)
        return None

    def _recent(self, call: Call) -> Plan | None:
        for plan in self.recent.get(call.rest, ()):
            if plan.knows(call):
                return plan
        return None

    def _note(self, plan: Plan, call: Call) -> None:
        recent = self.recent.setdefault(call.rest, [])
        if plan not in recent and plan.learn(call):
            recent.insert(0, plan)
            del recent[MAX_RECENT:]

    def _record(self, key: Any, args: tuple[Any, ...], call: Call) -> Any:
        self.by_key[key] = False  # no plan, unless this one comes to its end
        recorder = Recorder(call.tensors)
        with recorder.recording():
            out = self.body(*args)
        try:
            if recorder.problem is not None:
                raise Unrecordable(recorder.problem)
            self.by_key[key] = Plan(recorder, out)
            self.recorded += 1
        except Unrecordable as problem:
            self.problems.add(str(problem))
        return out


class Plan:
    """Steps in order, and where the results are afterwards."""

    __slots__ = (
        *("guard", "index", "offsets", "pointers"),
        *("results", "steps", "tensors", "workspace"),
    )

    def __init__(self, recorder: Recorder, out: Any) -> None:
        """The plan of what was recorded; out: what the body returned."""
        self.results = _results(recorder, out)
        returned = {x.register for x in _listed(self.results) if x is not None}
        inputs = set(range(recorder.num_inputs))
        workspace = Workspace.of(recorder, returned | inputs)
        kept = returned | inputs | set(recorder.constants) | set(workspace.offsets)
        insert_releases(recorder.steps, kept)
        self.steps = join_launches(recorder.steps)
        device = recorder.owners[0].device
        self.index = device.index if device.type == "cuda" else None
        self.offsets = tuple(workspace.offsets.items())
        self.workspace = None
        if workspace.size:
            self.workspace = memory((workspace.size,), (1,), torch.uint8, device)
        # Registers behind the inputs, as they are before the first step. A constant that was
        # returned this time is the caller's: the plan keeps a copy.
        self.tensors: list[Tensor | None] = []
        for register in range(recorder.num_inputs, len(recorder.owners)):
            x = recorder.constants.get(register)
            self.tensors.append(x.clone() if x is not None and register in returned else x)
        self.pointers = [0 if x is None else x.data_ptr() for x in self.tensors]
        self.guard: Any = None  # of `_guard`; False where there can be none

    def learn(self, call: Call) -> bool:
        """Makes the guard for such calls, if their tensors are aligned; whether there is one."""
        if self.guard is None and _are_aligned(call.pointers):
            self.guard = _guard(call.tensors)
        return bool(self.guard)

    def knows(self, call: Call) -> bool:
        """Whether the plan serves a call that has the `rest` of one that it served.

        The guard is one function in C++, stricter than a key: it also compares types, dispatch
        keys and modes.
        """
        return _are_aligned(call.pointers) and self.guard(*call.tensors)

    def __call__(self, tensors: list[Tensor], pointers: list[int]) -> Any:
        index, stream = self.index, 0
        if index is not None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    return self(tensors, pointers)
            stream = torch._C._cuda_getCurrentRawStream(index)
        pointers = pointers + self.pointers
        registers = Registers([*tensors, *self.tensors], pointers, stream)
        if self.workspace is not None:
            workspace = self.workspace()
            base = workspace.data_ptr()
            for register, offset in self.offsets:
                pointers[register] = base + offset
        for step in self.steps:
            step(registers)
        results = self.results
        if type(results) is tuple:
            return tuple([resolved(x, registers) for x in results])
        return resolved(results, registers)


def read_call(args: tuple[Any, ...]) -> Call | None:
    """The parts of a call; None where it is not to be planned."""
    if not _enabled:
        return None
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return None  # somebody watches the operators
    tensors: list[Tensor] = []
    rest: list[Any] = [torch._C._get_deterministic_algorithms()]
    if not _split(args, rest, tensors) or not tensors or _has_hooks():
        return None
    return Call(tensors, [x.data_ptr() for x in tensors], tuple(rest))


def _split(args: Any, rest: list[Any], tensors: list[Tensor]) -> bool:
    for x in args:
        kind = type(x)
        if kind is Tensor or kind is Parameter:
            tensors.append(x)
            rest.append(Tensor)
        elif kind in _PLAIN:
            rest.append(kind)
            rest.append(x)
        elif kind is list or kind is tuple:
            rest.append(len(x))
            if not _split(x, rest, tensors):
                return False
        else:
            return False
    return True


def plan_key(call: Call) -> Any:
    """All that the body's Python may depend on; None: not to be planned.

    Of a tensor: shape, strides, dtype, alignment, and which others are the same object.
    """
    tensors = call.tensors
    device = tensors[0].device
    if device.type not in DEVICES:
        return None
    kinds = [
        (x.shape, x.stride(), x.dtype, pointer & 15)
        for x, pointer in zip(tensors, call.pointers, strict=True)
    ]
    numbers = {id(x): i for i, x in enumerate(tensors)}
    same = tuple([numbers[id(x)] for x in tensors]) if len(numbers) < len(tensors) else None
    return (device.index, same, call.rest, *kinds)


def _guard(tensors: list[Tensor]) -> Any:
    """Whether other tensors are all different objects and else like these, as compiled code asks.

    False where these are not all different, or torch has no such function.
    """
    guards: Any = torch._C._dynamo.guards  # torch's stubs lack the class
    try:
        guard = guards.TensorGuards(
            *tensors,
            dynamic_dims_sizes=[list(x.shape) for x in tensors],
            dynamic_dims_strides=[list(x.stride()) for x in tensors],
        )
    except (AttributeError, TypeError):
        return False
    return guard.check if guard.check(*tensors) else False


def _are_aligned(pointers: list[int]) -> bool:
    """To 16 bytes, which Triton compiles for."""
    return not reduce(or_, pointers) & 15


def _has_hooks() -> bool:
    """Whether Triton has hooks that it calls at launches, as a profiler sets."""
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if hook is not None and getattr(hook, "calls", True):
            return True
    return False


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
