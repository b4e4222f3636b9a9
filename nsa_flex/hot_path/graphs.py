"""Graph breaks, graph counts and recompiles of torch.compile.

The private names of torch that this package leans on for compilation all stand in this file.
`torch._dynamo.reset()` is called before and after each question, since torch remembers shapes
that it has seen: code compiled earlier in the process compiles again at its next call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.backends.registry import lookup_backend

from nsa_flex.hot_path.backward import ForwardBackward
from nsa_flex.hot_path.findings import (
    Finding,
    Report,
    summary_location,
    traceback_location,
    unique,
)

Inputs = tuple[Any, ...] | Mapping[str, Any]
# The limit that makes torch give up and run eagerly would hide the recompiles that are counted.
_NO_LIMIT = 1 << 20


class _Watcher:
    """A torch.compile backend that notes each graph it is given, and why, then delegates."""

    def __init__(self, backend: str) -> None:
        self.compile = lookup_backend(backend)
        self.graphs = 0
        self.findings: list[Finding] = []
        self._failed_guards: list[Finding] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        self.graphs += 1
        # One compilation may have failed several cached entries; the newest comes first.
        self.findings += self._failed_guards[:1]
        self._failed_guards.clear()
        reason = getattr(module, "compile_subgraph_reason", None)
        if reason is not None and reason.graph_break:
            where = summary_location(reversed(reason.user_stack))
            self.findings.append(Finding("graph-break", _one_line(reason.reason), where))
        return self.compile(module, example_inputs)

    def guard_failed(self, failure: Any) -> None:
        code = failure.orig_code
        where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
        self._failed_guards.append(Finding("recompile", _one_line(failure.reason), where))


def find_graph_breaks(fn: Callable, *args: Any, **kwargs: Any) -> list[Finding]:
    """Compile `fn` for these inputs (no code is generated) and list its graph breaks.

    Compiled first with breaks allowed, so that all of them are found; if there are none, once
    more with `fullgraph=True`, which also refuses functions that torch skips as a whole. A
    custom autograd function's backward is traced with its forward. `ForwardBackward` is
    unwrapped: the call of backward itself is no part of a compiled region.

    >>> len(find_graph_breaks(lambda x: torch.relu(x) + 1, torch.ones(3)))
    0
    """
    fn = _forward_of(fn)
    watcher = _Watcher("eager")
    with _fresh_compiler():
        _compiled(fn, watcher)(*args, **kwargs)
    if watcher.findings:
        return unique(watcher.findings)
    with _fresh_compiler():
        return _fullgraph_error(fn, args, kwargs)


def count_graphs(
    fn: Callable, inputs: Iterable[Inputs], *, dynamic: bool | None = None, backend: str = "eager"
) -> Report:
    """Compile `fn` once, call it on every element of `inputs` in turn, count the graphs.

    Args:
        fn: function or module.
        inputs: each a tuple of positional or a mapping of keyword arguments.
        dynamic: as in torch.compile; None lets torch turn a size that changes into a symbol.
        backend: what runs the graphs; the default generates no code.

    Returns:
        `Report.graphs` counts every graph compiled over the sweep, so 1 is one graph for all
        inputs; its findings are the recompiles with the guard that failed, and graph breaks.

    >>> inputs = [(torch.ones(size),) for size in (8, 9, 10)]
    >>> count_graphs(lambda x: x + 1, inputs).graphs
    2
    """
    fn = _forward_of(fn)
    watcher = _Watcher(backend)
    with _fresh_compiler():
        compiled = _compiled(fn, watcher, dynamic=dynamic)
        for each in inputs:
            compiled(**each) if isinstance(each, Mapping) else compiled(*each)
    return Report(tuple(unique(watcher.findings)), watcher.graphs)


def _forward_of(fn: Callable) -> Callable:
    return fn.fn if isinstance(fn, ForwardBackward) else fn


def _compiled(fn: Callable, watcher: _Watcher, dynamic: bool | None = None) -> Callable:
    optimize = torch._dynamo.optimize(watcher, guard_fail_fn=watcher.guard_failed, dynamic=dynamic)
    return optimize(fn)


def _fullgraph_error(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Finding]:
    try:
        torch.compile(fn, backend="eager", fullgraph=True)(*args, **kwargs)
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError) as error:
        stack = getattr(error, "real_stack", None)
        where = (
            summary_location(reversed(stack)) if stack else traceback_location(error.__traceback__)
        )
        return [Finding("graph-break", _one_line(str(error)), where)]
    return []


@contextlib.contextmanager
def _fresh_compiler() -> Iterator[None]:
    limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(limits):
            yield
    finally:
        torch._dynamo.reset()


def _one_line(text: str) -> str:
    return " ".join(text.split())
