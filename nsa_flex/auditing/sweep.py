"""One callable compiled once and called with every batch: graphs, breaks, recompilations.

A failed guard says why torch compiled again, at which line, and how to save it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_flex.auditing.batches import Batch, split
from nsa_flex.auditing.mends import mend_of
from nsa_flex.auditing.report import AuditFinding, Graph, Phase, Recompile
from nsa_flex.auditing.sources import definition_of
from nsa_flex.hot_path import Finding, ForwardBackward, SyncDetector
from nsa_flex.hot_path.findings import is_machinery, is_stdlib, summary_location
from nsa_flex.hot_path.graphs import fullgraph_error, headline
from nsa_flex.hot_path.torch_internals import fresh_compiler, lookup_backend, optimize

_SIZE = re.compile(
    r"tensor '(?P<name>.*?)' size mismatch at index (?P<dim>\d+)\. "
    r"expected (?P<expected>\d+), actual (?P<actual>\d+)"
)
_NUMBER = re.compile(r"(?P<name>.+) == -?\d+(\.\d+)?")
# A guard over a symbol names the tensor and dimension, then quotes the line that asked.
_SYMBOL = re.compile(r"(?P<name>[\w.\[\]'\"]+)\.size\(\)\[(?P<dim>\d+)\]")
_QUOTED_LINE = re.compile(r"# (?P<file>[^#:]*\.py):(?P<line>\d+) in (?P<function>[\w<>]+)")

_MENDS = (
    ("dtype mismatch", "call it with one dtype, or cast where the data enters"),
    ("requires_grad mismatch", "give the argument the same requires_grad in every call"),
    ("stride mismatch", "give the argument one memory layout: .contiguous() where it is made"),
    ("rank mismatch", "give the argument the same number of dimensions in every call"),
    ("GLOBAL_STATE", "keep grad mode, autocast and the number of threads the same in every call"),
    (
        "cell_contents",
        "the function closes over a Python value that changes: pass it in as a tensor",
    ),
    (
        "__closure__",
        "the function closes over a Python value that changes: pass it in as a tensor",
    ),
    ("duck sizing", "two sizes are equal in one batch and not in another: pass another first"),
    ("___check_obj_id", "it is given another object in every call: make it once and keep it"),
    ("G[", "a global value changes between calls: pass it in as a tensor"),
)


# What Dynamo calls the rest of a function behind a graph break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+?)_at_\d+")


def original_name(text: str) -> str:
    """Functions by the names that their authors gave them.

    >>> original_name("model.py:5 in torch_dynamo_resume_in_forward_at_7")
    'model.py:5 in forward'
    """
    return _RESUMED.sub(r"\1", text)


@dataclass(frozen=True)
class Cause:
    """Reading of one failed guard; `cause` and the rest as in `Recompile`."""

    cause: str
    guard: str
    location: str
    mend: str


class GuardReader:
    """Tells recompilations that torch always makes from those that the code causes.

    Torch compiles for the first sizes and numbers that it meets and once more, with a symbol, for
    each that changes later; and it takes sizes 0 and 1 for constants. What goes beyond that is
    the code's doing.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[object, ...]] = set()

    def read(self, guards: list[str], batch: Batch, function: str) -> Cause:
        """The cause of one compilation.

        Args:
            guards: what failed in each compiled entry there was, the newest first.
            batch: for which it was compiled.
            function: `file:line in name`, the place where nothing better is known.
        """
        guards = [_plain(guard) for guard in guards]
        rest = [guard for guard in guards if not _is_small_size(guard, batch)]
        if not rest:
            mend = "torch takes a size of 1 for a constant"
            return Cause("size-one", _shown(guards[0]), _quoted(guards[0]) or function, mend)
        guard = rest[0]
        size = _SIZE.search(guard)
        cause, mend = "code", _mend(guard)
        if size:
            # Where sizes are 0 or 1 there are graphs of their own, each with its first lengths.
            place = function, size["name"], size["dim"], batch.small
            cause = "length" if place not in self._seen else "code"
            self._seen.add(place)
            mend = _size_mend(size["name"], size["dim"], again=cause == "code")
        elif "duck sizing" in guard:
            cause = "same-size"
        elif number := _NUMBER.fullmatch(_shown(guard)):
            value = function, number["name"], batch.small
            cause = "number" if value not in self._seen else "code"
            self._seen.add(value)
        return Cause(cause, _shown(guard), _quoted(guard) or function, mend)


def _plain(guard: str) -> str:
    """On one line, without the number of the compilation."""
    return re.sub(r"^\d+/\d+(_\d+)?: ", "", " ".join(guard.split()))


def _shown(guard: str) -> str:
    """Without the comment that quotes sources."""
    return guard.partition(" # ")[0]


def _is_small_size(guard: str, batch: Batch) -> bool:
    """Whether it failed because a size is 0 or 1, or because it was when the graph was made.

    A symbol stands for sizes of two and more: no graph over it serves a size of 0 or 1.
    """
    size = _SIZE.search(guard)
    if size:
        return bool({"0", "1"} & {size["expected"], size["actual"]})
    symbols = [(re.findall(r"\w+", name)[-1], int(dim)) for name, dim in _SYMBOL.findall(guard)]
    return any(
        place == dim and (path.isdigit() or path.rpartition(".")[2] == name)
        for name, dim in symbols
        for path, place in batch.small
    )


def _size_mend(name: str, dim: str, *, again: bool) -> str:
    mark = _mark_dynamic(name, dim)
    if not again:
        return mark
    return (
        "every size has a graph of its own: compiled with dynamic=False, or unrolled (a loop over "
        f"the size); {mark} makes torch raise at the line that prevents one graph"
    )


def _mend(guard: str) -> str:
    symbol = _SYMBOL.search(guard)
    if symbol:
        return (
            f"what it computes depends on dimension {symbol['dim']} of {symbol['name']}: make it "
            "one computation for all lengths (mask, pad, torch.where); "
            f"{_mark_dynamic(*symbol.groups())} makes torch raise at the line that prevents it"
        )
    for text, mend in _MENDS:
        if text in guard:
            return mend
    value, equals, _ = guard.partition(" == ")
    if equals:
        return (
            f"{value} changes between calls and the graph is built on its value: keep it, or make "
            "it a tensor (of a module: a buffer)"
        )
    return "keep this the same in every call"


def _mark_dynamic(name: str, dim: str) -> str:
    return f"torch._dynamo.mark_dynamic({name}, {dim}) before the first call"


def _quoted(guard: str) -> str | None:
    """The user's line in a guard's comment, whose path torch shortens at its front."""
    for match in _QUOTED_LINE.finditer(guard):
        file = _whole_path(match["file"])
        if file is not None:
            return f"{file}:{match['line']} in {original_name(match['function'])}"
    return None


def _whole_path(end: str) -> str | None:
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    return next((file for file in files if file.endswith(end)), None)


_TRACE_LINE = re.compile(r'File ".*", line (\d+), in (\w+)')

Tell = Callable[[str], None]


@dataclass
class _Recorder:
    """A torch.compile backend that notes each graph, each run of one, and each failed guard."""

    backend: str
    function: str  # where the audited function is defined
    graphs: list[Graph] = field(default_factory=list)
    runs: list[list[int]] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    _reader: GuardReader = field(default_factory=GuardReader)
    _batch: Batch | None = None
    _failed: list[tuple[str, Any]] = field(default_factory=list)
    _stopped: bool = False

    def stop(self) -> None:
        """Note nothing more: what is called from now on is no batch of the sweep."""
        self._stopped = True

    def start(self, batch: Batch) -> None:
        self._batch = batch
        self.runs.append([])

    def __call__(self, module: torch.fx.GraphModule, example_inputs: Any) -> Callable:
        if self._stopped:
            return lookup_backend(self.backend)(module, example_inputs)
        number, batch = len(self.graphs), len(self.runs) - 1
        self._note_recompile(batch)
        operations = sum(node.op.startswith("call_") for node in module.graph.nodes)
        self.graphs.append(Graph(number, operations, _frame(module), batch))
        compiled = lookup_backend(self.backend)(module, example_inputs)

        def run(*args: Any) -> Any:
            if number not in self.runs[-1]:
                self.runs[-1].append(number)
            return compiled(*args)

        return run

    def guard_failed(self, failure: Any) -> None:
        self._failed.append((failure.reason, failure.orig_code))

    def _note_recompile(self, number: int) -> None:
        failed, self._failed = self._failed, []
        if not failed or self._batch is None:
            return
        code = failed[0][1]
        where = f"{code.co_filename}:{code.co_firstlineno} in {original_name(code.co_name)}"
        where = self.function if is_machinery(code.co_filename) else where
        guards = [reason for reason, other in failed if other is code]
        cause = self._reader.read(guards, self._batch, where)
        self.recompiles.append(
            Recompile(number, cause.cause, cause.guard, cause.location, cause.mend)
        )


@dataclass(frozen=True)
class Swept:
    """The phase, its breaks and recompilations, and the syncs of its compiled code."""

    phase: Phase
    findings: list[AuditFinding]
    syncs: list[Finding]


def _frame(module: torch.fx.GraphModule) -> str:
    """`function:line` of the graph's first operation, in the outermost function; "" if unknown."""
    for node in module.graph.nodes:
        trace = node.meta.get("stack_trace", "")
        if node.op.startswith("call_") and trace:
            lines = _TRACE_LINE.findall(trace)
            return f"{original_name(lines[0][1])}:{lines[0][0]}" if lines else ""
    return ""


def sweep(
    fn: Callable,
    batches: list[Batch],
    *,
    name: str,
    train: bool,
    dynamic: bool | None,
    backend: str,
    tell: Tell,
) -> Swept:
    """Compile `fn` once and call it with every batch; no earlier compilation is remembered.

    Args:
        train: with a backward after each call; else under `torch.no_grad()`.
        dynamic: as in torch.compile.
        backend: what runs the graphs.
        tell: called with a line before each batch.
    """
    recorder = _Recorder(backend, definition_of(fn))
    breaks: list[AuditFinding] = []
    with fresh_compiler() as reasons, torch.set_grad_enabled(train):
        compiled = optimize(fn, recorder, recorder.guard_failed, dynamic)
        call = ForwardBackward(compiled) if train else compiled
        for batch in batches:
            tell(f"{name}: compiling for {batch.label}")
            recorder.start(batch)
            bound = batch.bind(call)
            del reasons[:]  # those of the code that makes the batch
            bound()
            breaks += _breaks(reasons)
        recorder.stop()
        tell(f"{name}: looking for syncs in compiled code")
        bound = batches[-1].bind(call)
        with SyncDetector(compiled=True) as detector:
            bound()
    breaks = list(dict.fromkeys(breaks))
    if not recorder.graphs and not breaks:
        breaks = _skipped_whole(fn, batches[0], train)
    causes = [r for r in recorder.recompiles if r.cause == "code"]
    findings = breaks + [AuditFinding("recompile", r.guard, r.location, r.mend) for r in causes]
    phase = Phase(
        name,
        tuple(batch.label for batch in batches),
        tuple(recorder.graphs),
        tuple(tuple(run) for run in recorder.runs),
        tuple(recorder.recompiles),
        len(breaks),
    )
    return Swept(phase, findings, detector.findings)


def _breaks(reasons: list[Any]) -> list[AuditFinding]:
    return [
        AuditFinding(
            "graph-break",
            headline(r.reason),
            original_name(summary_location(reversed(r.user_stack))),
            mend_of("graph-break", f"{headline(r.reason)}\n{r.reason}"),
        )
        for r in reasons
        if r.graph_break and not _is_echo(r.user_stack)
    ]


def _is_echo(stack: Any) -> bool:
    """Of Python's library alone: it is compiled by itself where the caller's graph broke."""
    return bool(stack) and all(is_stdlib(entry.filename) for entry in stack)


def _skipped_whole(fn: Callable, batch: Batch, train: bool) -> list[AuditFinding]:
    """Torch may skip a function without a word; it says why when it must not."""
    with fresh_compiler(), torch.set_grad_enabled(train):
        found = fullgraph_error(fn, *split(batch.make()))
    return [AuditFinding(f.kind, f.detail, f.location, mend_of(f.kind, f.detail)) for f in found]
