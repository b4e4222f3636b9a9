"""`audit`: every check on one callable, phase by phase, gathered in one report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import nsa_flex
from nsa_flex.auditing.baseline import read_baseline
from nsa_flex.auditing.batches import Batch, batches_of
from nsa_flex.auditing.excerpts import is_allowed, place_of
from nsa_flex.auditing.guards import original_name
from nsa_flex.auditing.lint import Scope, lint
from nsa_flex.auditing.measuring import measure, peak_bytes
from nsa_flex.auditing.mends import mend_of
from nsa_flex.auditing.nsa_branches import branches_of
from nsa_flex.auditing.parameters import gradients_kept, parameters_of
from nsa_flex.auditing.report import AuditFinding, AuditReport, BranchRun, Phase
from nsa_flex.auditing.sweep import Swept, sweep
from nsa_flex.hot_path import Finding, ForwardBackward, find_syncs, find_value_reads

# On the meta device a read of a value raises one of these; anything else is a missing kernel.
_VALUE_READS = (
    "meta tensor",
    "Cannot copy out of meta",
    "data-dependent",
    "is not on the expected",
)


def audit(
    model_or_fn: Callable,
    inputs: Any,
    *,
    train: bool | None = None,
    decode: Any = None,
    dynamic: bool | None = None,
    max_graphs: int | None = None,
    lint_scope: Scope = "own",
    measured: bool = True,
    backend: str | None = None,
    baseline: str | Path | Iterable[str] | None = None,
    name: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> AuditReport:
    """Find what keeps a function or model from compiling cleanly; measure what it costs compiled.

    For all batches, under `torch.no_grad()` and again with a backward: graph breaks, the number
    of graphs, recompilations with the guard that failed, host syncs and data-dependent operators
    (run eagerly), reads of values (run on the meta device), reads in the sources (`lint`); on
    CUDA also skipped CUDA graphs and what CUDA reports as synchronising. The callable runs a
    dozen times; parameters keep their values and their `.grad`.

    A recompilation is a finding if the code causes it. What torch.compile does with any code is a
    note: a second graph when a size changes for the first time (`dynamic=None`), and one of its
    own for sizes of 0 or 1. A finding on a line with the comment `# audit: allow`, or below such
    a line, is set aside.

    Args:
        model_or_fn: function or module, compiled or not, NSA or not.
        inputs: a batch or a list of batches, see `batches_of`: a tuple of positional or a mapping
            of keyword arguments, or a function that makes one. Give several lengths and batch
            sizes: recompilations show between batches.
        train: whether to run the backward as well; None: if parameters or inputs require grad.
        decode: batches of single decoding steps, run under `torch.no_grad()` as a sweep of their
            own; functions that make them, where a cache is changed by each call.
        dynamic: as in torch.compile.
        max_graphs: more graphs than that in one phase are a finding.
        lint_scope: "own" reads sources outside of installed packages, "all" those too.
        measured: also compile with Inductor: times cold and warm, memory, kernels, CUDA graphs.
        backend: what runs the graphs of the sweeps; by default `eager`, and `aot_eager`, which
            traces the backward too, where one follows. Neither generates code.
        baseline: findings to set aside: a file of `write_baseline`, or fingerprints.
        name: what the report calls it.
        tell: called with a line of progress now and then.

    Raises:
        TypeError, ValueError: inputs that are no batches, or a bad baseline file. What the
            callable raises on its first batch is raised too.

    >>> report = audit(lambda x: x * x.max().item(), torch.ones(3), measured=False)
    >>> sorted({finding.kind for finding in report.findings})
    ['graph-break', 'host-sync', 'meta-run']
    """
    batches = batches_of(inputs)
    steps = [] if decode is None else batches_of(decode)
    if train is None:
        train = _requires_grad(model_or_fn, batches)
    work = _Audit(model_or_fn, dynamic, backend, measured, tell)
    with gradients_kept(model_or_fn), _quiet():
        work.phase("inference", batches, train=False)
        if train:
            work.phase("training", batches, train=True)
        if steps:
            work.phase("decode", steps, train=False)
        work.add(lint(model_or_fn, lint_scope))
        branches = work.branches(batches[-1], train)
    found = _merged(work.findings)
    if max_graphs is not None:
        found += _too_many(work.phases, max_graphs)
    report = AuditReport(
        target=name or _name_of(model_or_fn),
        findings=tuple(f for f in found if not is_allowed(f.location)),
        allowed=tuple(f for f in found if is_allowed(f.location)),
        notes=tuple(dict.fromkeys(work.notes)),
        phases=tuple(work.phases),
        branches=branches,
        environment=_environment(),
    )
    return report if baseline is None else report.against(_fingerprints(baseline))


@dataclasses.dataclass
class _Audit:
    """One audit at work: what it has found so far."""

    fn: Callable
    dynamic: bool | None
    backend: str | None
    measured: bool
    tell: Callable[[str], None]
    findings: list[AuditFinding] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    phases: list[Phase] = dataclasses.field(default_factory=list)
    _eager_only: set[tuple[str, int]] = dataclasses.field(default_factory=set)

    def add(self, findings: Iterable[AuditFinding], phase: str | None = None) -> None:
        phases = () if phase is None else (phase,)
        self.findings += [dataclasses.replace(f, phases=f.phases or phases) for f in findings]

    def phase(self, name: str, batches: list[Batch], *, train: bool) -> None:
        """All checks of one phase."""
        eager = self._syncs(name, batches, train)
        reads = self._value_reads(name, batches[0], train)
        swept = sweep(
            self.fn,
            batches,
            name=name,
            train=train,
            dynamic=self.dynamic,
            backend=self.backend or ("aot_eager" if train else "eager"),
            tell=self.tell,
        )
        phase = swept.phase
        self._add_syncs(eager, swept, name)
        self.add((f for f in reads if place_of(f.location)[:2] not in self._eager_only), name)
        self.add(swept.findings, name)
        self._note_recompiles(phase)
        if self.measured:
            phase = self._measure(phase, batches[0], train)
        self.phases.append(phase)

    def _add_syncs(self, eager: list[Finding], swept: Swept, name: str) -> None:
        """Findings of eager and compiled code; what compiled code does not do is a note."""
        compiled = [
            dataclasses.replace(f, location=original_name(f.location)) for f in swept.syncs
        ]
        breaks = {place_of(f.location)[:2] for f in swept.findings}
        confirmed = {key for f in compiled for key in _keys(f)}
        for f in eager:
            if _works_in_a_graph(f) or place_of(f.location)[:2] in breaks or _keys(f) & confirmed:
                self.add([_finding(f)], name)
            else:  # `if not torch.compiler.is_compiling():` or the like.
                self.notes.append(f"{name}: in eager mode only, {f.detail} at {f.location}")
                self._eager_only.add(place_of(f.location)[:2])
        known = {key for f in eager for key in _keys(f)}
        self.add((_finding(f) for f in compiled if not _keys(f) & known), name)

    def _syncs(self, name: str, batches: list[Batch], train: bool) -> list[Finding]:
        found: list[Finding] = []
        with torch.set_grad_enabled(train):
            step = ForwardBackward(self.fn) if train else self.fn
            for batch in batches:
                self.tell(f"{name}: looking for syncs, {batch.label}")
                found += find_syncs(lambda batch=batch: batch.call(step))
        return found

    def _value_reads(self, name: str, batch: Batch, train: bool) -> list[AuditFinding]:
        self.tell(f"{name}: running without data")
        values = batch.make()
        args, kwargs = ((), dict(values)) if isinstance(values, Mapping) else (values, {})
        with torch.set_grad_enabled(train):
            step = ForwardBackward(self.fn) if train else self.fn
            try:
                found = find_value_reads(step, *args, **kwargs)
            except Exception as error:  # What cannot be copied, such as open files.
                self.notes.append(f"{name}: not run on the meta device: {_first_line(error)}")
                return []
        reads = [f for f in found if any(text in f.detail for text in _VALUE_READS)]
        self.notes += [
            f"{name}: the meta device cannot run it: {f.detail} at {f.location}"
            for f in found
            if f not in reads
        ]
        return [_finding(f) for f in reads]

    def _note_recompiles(self, phase: Phase) -> None:
        text = {
            "length": "torch compiled again when this size changed for the first time; {0.mend} "
            "saves one compilation: {0.guard}",
            "number": "torch compiled again when this number first changed: {0.guard}",
            "size-one": "sizes of 0 or 1 have a graph of their own in torch: {0.guard}",
            "same-size": "two sizes were equal when torch made a graph (duck sizing): {0.guard}",
        }
        for each in phase.recompiles:
            if each.cause in text:
                self.notes.append(f"{phase.name}: {text[each.cause].format(each)}")

    def _measure(self, phase: Phase, batch: Batch, train: bool) -> Phase:
        def tell(line: str) -> None:
            self.tell(f"{phase.name}: {line}")

        numbers = {"peak_bytes_eager": float(peak_bytes(self.fn, batch, train=train))}
        try:
            result = measure(self.fn, batch, train=train, dynamic=self.dynamic, tell=tell)
        except Exception as error:  # No C++ compiler, or a bug of Inductor: say so, go on.
            self.notes.append(f"{phase.name}: not measured compiled: {_first_line(error)}")
            return dataclasses.replace(phase, measured=numbers)
        self.add(map(_finding, result.syncs), phase.name)
        skips = dict.fromkeys(result.skip_reasons)
        self.add(
            (
                AuditFinding(
                    "cudagraph-skip", _first_line(r), _place_in(r), mend_of("cudagraph-skip", "")
                )
                for r in skips
            ),
            phase.name,
        )
        return dataclasses.replace(
            phase,
            measured={**result.numbers, **numbers},
            kernels=result.kernels,
            cudagraphs=result.cudagraphs,
        )

    def branches(self, batch: Batch, train: bool) -> tuple[BranchRun, ...]:
        """Of `nsa_attention`, if the callable reaches it."""
        self.tell("looking for branches of nsa_attention")
        step = ForwardBackward(self.fn) if train else self.fn
        with torch.set_grad_enabled(train):
            return branches_of(lambda: batch.call(step))


def _keys(found: Finding) -> set[tuple[str, int | str]]:
    """Its line, and what it is: inside a graph only the function's first line is known."""
    file, line, _ = place_of(found.location)
    return {(file, line), (file, found.detail)}


def _works_in_a_graph(found: Finding) -> bool:
    """A graph holds such copies as operators: that it runs without a break says nothing."""
    return found.kind == "device-copy" or found.detail in ("Tensor.cpu()", "Tensor.numpy()")


def _finding(found: Finding) -> AuditFinding:
    return AuditFinding(
        found.kind, found.detail, found.location, mend_of(found.kind, found.detail)
    )


def _merged(findings: list[AuditFinding]) -> list[AuditFinding]:
    """Each once, with all its phases; echoes of a finding on the same line are left out."""
    merged: dict[tuple[str, str, str], AuditFinding] = {}
    for f in findings:
        # Guards that differ in a number alone are one finding.
        key = f.kind, f.fingerprint if f.kind == "recompile" else f.message, f.location
        phases = (*merged[key].phases, *f.phases) if key in merged else f.phases
        first = merged.get(key, f)
        merged[key] = dataclasses.replace(first, phases=tuple(dict.fromkeys(phases)))
    echoes = ("lint", "meta-run")
    seen = {place_of(f.location)[:2] for f in merged.values() if f.kind not in echoes}
    return [
        f for f in merged.values() if f.kind not in echoes or place_of(f.location)[:2] not in seen
    ]


def _too_many(phases: list[Phase], most: int) -> list[AuditFinding]:
    return [
        AuditFinding(
            "too-many-graphs",
            f"{len(phase.graphs)} graphs, at most {most} expected",
            f"{phase.name} sweep",
            "see the recompilations and breaks of this phase",
            (phase.name,),
        )
        for phase in phases
        if len(phase.graphs) > most
    ]


def _requires_grad(fn: Any, batches: list[Batch]) -> bool:
    if any(p.requires_grad for p in parameters_of(fn)):
        return True
    leaves = (x for batch in batches for x in tree_leaves(batch.make()))
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch's warnings about breaks and recompilations are in the report already."""
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(max(logger.level, logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _fingerprints(baseline: str | Path | Iterable[str]) -> frozenset[str]:
    if isinstance(baseline, (str, Path)):
        return read_baseline(baseline)
    return frozenset(baseline)


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _first_line(error: object) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if isinstance(error, Exception) else text


def _place_in(reason: str) -> str:
    """The last `File "...", line n, in f` of a stack trace that torch quotes, if any."""
    lines = re.findall(r'File "(.+?)", line (\d+), in (\w+)', reason)
    return "{}:{} in {}".format(*lines[-1]) if lines else "<no user frame>"


def _environment() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "nsa_flex": nsa_flex.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }
