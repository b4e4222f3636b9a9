"""One callable compiled once and called with every batch: graphs, breaks, recompilations."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from nsa_flex.auditing.batches import Batch, split
from nsa_flex.auditing.definition import definition_of
from nsa_flex.auditing.guards import GuardReader, original_name
from nsa_flex.auditing.mends import mend_of
from nsa_flex.auditing.phases import AuditFinding, Graph, Phase, Recompile
from nsa_flex.hot_path import Finding, ForwardBackward, SyncDetector
from nsa_flex.hot_path.findings import is_machinery, summary_location
from nsa_flex.hot_path.graphs import fullgraph_error, headline
from nsa_flex.hot_path.torch_internals import fresh_compiler, lookup_backend, optimize

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
        if r.graph_break
    ]


def _skipped_whole(fn: Callable, batch: Batch, train: bool) -> list[AuditFinding]:
    """Torch may skip a function without a word; it says why when it must not."""
    with fresh_compiler(), torch.set_grad_enabled(train):
        found = fullgraph_error(fn, *split(batch.make()))
    return [AuditFinding(f.kind, f.detail, f.location, mend_of(f.kind, f.detail)) for f in found]
