"""The kernels that calls would launch on a GPU which is not there, ready to be compiled.

Host code runs on tensors that hold nothing, as `explain` runs it; Triton is asked for each kernel
that is launched, and stopped before it compiles. Nothing here knows a kernel's name or file.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import json
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITCallable, JITFunction

from nsa_flex.bench.tools.matrix_calls import calls
from nsa_flex.dispatch import unsupported
from nsa_flex.explaining.rehearsal import pretending
from nsa_flex.fallback_kernels.common import arch
from nsa_flex.fallback_kernels.common.launches import intercepting_launches
from nsa_flex.fallback_kernels.launch import plans

Call = tuple[str, Callable[[], None]]  # with its name
GPU = torch.device("cuda:0")
# Compute capabilities, and the bytes of shared memory that a CTA may have there.
DEVICES = {
    sm: arch.Device(divmod(sm, 10), kib << 10)
    for sm, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()
}


@dataclass(frozen=True)
class Entry:
    """A kernel as one architecture would compile it.

    sm: the architecture. module, kernel: where it is. call: the first that launches it.
    wanted: types, constants and options, as Triton writes them. key: changes where what is
    compiled does; not where lines move, nor with comments.
    """

    sm: int
    module: str
    kernel: str
    call: str
    wanted: str
    key: str


class Target:
    """In the place of Triton's driver: a device of this architecture, which runs nothing."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)


def entries(sm: int, launched: Iterable[Call] | None = None) -> list[Entry]:
    """All kernels that these calls, or `calls`, launch on this architecture, each once."""
    found: dict[str, Entry] = {}
    running = [""]

    def note(*, fn: Any, compile: dict[str, Any], **_others: Any) -> bool:
        wanted = compile["specialization_data"]
        key = hashlib.sha256(f"{sm}{source_of(fn.jit_function)}{_plain(wanted)}".encode())
        entry = Entry(sm, fn.module, fn.name, running[0], wanted, key.hexdigest()[:16])
        found.setdefault(entry.key, entry)
        return True  # do not compile

    with _asked_by(note), targeting(sm), arch.imagining(GPU, DEVICES[sm]), _dispatching(sm):
        for running[0], call in calls() if launched is None else launched:
            _launch(call)
    return list(found.values())


def compiled(entry: Entry) -> Any:
    """Triton's compiled kernel; raises what the compiler raises."""
    kernel = getattr(importlib.import_module(entry.module), entry.kernel)
    with targeting(entry.sm):
        return kernel.preload(entry.wanted)


@contextmanager
def targeting(sm: int) -> Iterator[None]:
    """Within, Triton compiles for this architecture."""
    driver: Any = triton.runtime.driver
    before = driver._active  # its own `reset_active` wants a GPU
    driver.set_active(Target(sm))
    try:
        yield
    finally:
        driver._active = before


def _launch(call: Callable[[], None]) -> None:
    def run(kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kernel.run(*args, grid=grid, warmup=True, **kwargs)

    deterministic = getattr(call, "deterministic", False)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    plans.forget_plans()
    try:
        with intercepting_launches(run), pretending(GPU):
            call()
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def _dispatching(sm: int) -> Iterator[None]:
    """Within, dispatch knows the shared memory of this architecture's devices."""
    before, unsupported._shared_memory = (
        unsupported._shared_memory,
        lambda: DEVICES[sm].shared_memory,
    )
    try:
        yield
    finally:
        unsupported._shared_memory = before


@contextmanager
def _asked_by(hook: Callable[..., bool]) -> Iterator[None]:
    """Within, Triton asks `hook` before it compiles."""
    before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, hook
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook = before


def _plain(wanted: str) -> str:
    """What is wanted, without what repeats it or names this installation."""
    held = json.loads(wanted)
    for name in ("key", "target"):
        held.pop(name, None)
    for name in ("extern_libs", "backend_name", "sanitize_overflow", "instrumentation_mode"):
        held["options"].pop(name, None)
    return json.dumps(held, sort_keys=True)


@functools.cache
def source_of(kernel: JITFunction) -> str:
    """The source of a kernel and of all that it calls, without lines, comments and docstrings."""
    parts: dict[Any, str] = {}
    _read(kernel, parts)
    return "\n".join(sorted(parts.values()))


def _read(value: Any, parts: dict[Any, str]) -> None:
    if not isinstance(value, JITCallable) or value in parts:
        return
    tree = ast.parse(textwrap.dedent(value.src))
    body: list[ast.stmt] = tree.body[0].body  # type: ignore[attr-defined]
    if ast.get_docstring(tree.body[0]) is not None:  # type: ignore[arg-type]
        del body[0]
    parts[value] = ast.unparse(tree)
    scope, nodes = value.fn.__globals__, list(ast.walk(tree))
    names = sorted({node.id for node in nodes if isinstance(node, ast.Name)} & scope.keys())
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for name in names:
        members = [scope[name]]
        if isinstance(scope[name], types.ModuleType):
            members = [vars(scope[name]).get(each) for each in sorted(attributes)]
        for each in members:
            _read(each, parts)
            if isinstance(each, (triton.language.constexpr, int, float, str)):
                parts[name] = f"{name} = {each}"
