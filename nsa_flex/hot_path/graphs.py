"""Graph breaks, graph counts and recompiles of torch.compile.

The compiler is reset before and after each question, since torch remembers shapes that it has
seen: code compiled earlier in the process compiles again at its next call. Graphs are counted
without what torch's caches have on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from nsa_flex.hot_path.backward import ForwardBackward
from nsa_flex.hot_path.findings import (
    Finding,
    Report,
    error_location,
    summary_location,
    unique,
)
from nsa_flex.hot_path.torch_internals import (
    TorchDynamoException,
    fresh_compiler,
    graphs_from_no_file,
    lookup_backend,
    optimize,
)

Inputs = tuple[Any, ...] | Mapping[str, Any]


class _Watcher:
    """A torch.compile backend that counts the graphs it is given and notes the recompiles."""

    def __init__(self, backend: str) -> None:
        self.compile = lookup_backend(backend)
        self.graphs = 0
        self.recompiles: list[Finding] = []
        self._failed_guards: list[Finding] = []

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        self.graphs += 1
        # One compilation may have failed several cached entries; the newest comes first.
        self.recompiles += self._failed_guards[:1]
        self._failed_guards.clear()
        return self.compile(module, example_inputs)

    def guard_failed(self, failure: Any) -> None:
        code = failure.orig_code
        where = f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
        self._failed_guards.append(Finding("recompile", " ".join(failure.reason.split()), where))


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
    with fresh_compiler() as reasons:
        optimize(fn, watcher, watcher.guard_failed, None)(*args, **kwargs)
        breaks = _breaks(reasons)
    if breaks:
        return breaks
    with fresh_compiler():
        return fullgraph_error(fn, args, kwargs)


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
    # Graphs that an earlier process left behind bring guards of their own.
    with graphs_from_no_file(), fresh_compiler() as reasons:
        compiled = optimize(fn, watcher, watcher.guard_failed, dynamic)
        for each in inputs:
            compiled(**each) if isinstance(each, Mapping) else compiled(*each)
        breaks = _breaks(reasons)
    return Report((*breaks, *unique(watcher.recompiles)), watcher.graphs)


def _forward_of(fn: Callable) -> Callable:
    return fn.fn if isinstance(fn, ForwardBackward) else fn


def _breaks(reasons: Iterable[Any]) -> list[Finding]:
    return unique(
        Finding("graph-break", headline(r.reason), summary_location(reversed(r.user_stack)))
        for r in reasons
        if r.graph_break
    )


def fullgraph_error(fn: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Finding]:
    try:
        torch.compile(fn, backend="eager", fullgraph=True)(*args, **kwargs)
    except (TorchDynamoException, RuntimeError) as error:
        return [Finding("graph-break", headline(str(error)), error_location(error))]
    return []


def headline(reason: str) -> str:
    """First line of torch's reason and its explanation, without hints and links."""
    first, *rest = (line.strip() for line in reason.strip().splitlines())
    if first.startswith("generic_jump"):
        return f"data-dependent branching ({first})"
    explanations = [line for line in rest if line.startswith("Explanation: ")]
    return ": ".join([first, *(e.removeprefix("Explanation: ") for e in explanations[:1])])
