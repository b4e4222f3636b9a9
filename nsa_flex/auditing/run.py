"""`audit`: every check on one callable, phase by phase, gathered in one report."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import platform
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nsa_flex.auditing.batches import Batch, InputError, batches_of
from nsa_flex.auditing.checks import Checks, error_finding
from nsa_flex.auditing.lint import Scope, lint
from nsa_flex.auditing.measuring import gradients_kept, parameters_of
from nsa_flex.auditing.mends import marked
from nsa_flex.auditing.report import AuditFinding, AuditReport, Phase, read_baseline
from nsa_flex.auditing.sources import is_allowed, place_of
from nsa_flex.parallel import SequenceShards
from nsa_flex.version import __version__


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
    mesh: DeviceMesh | dist.ProcessGroup | SequenceShards | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> AuditReport:
    """Find what keeps a function or model from compiling cleanly; measure what it costs compiled.

    For all batches, under `torch.no_grad()` and again with a backward: graph breaks, the number
    of graphs, recompilations with the guard that failed, host syncs and data-dependent operators
    (run eagerly), reads of values (run on the meta device), reads in the sources (`lint`); on
    CUDA also skipped CUDA graphs and what CUDA reports as synchronising. The callable runs a
    dozen times; parameters keep their values and their `.grad`. What it raises is a finding of
    kind `error`, with its line; that phase ends there, the others are reported.

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
            Where no output requires a gradient a note says so.
        decode: batches of single decoding steps, run under `torch.no_grad()` as a sweep of their
            own; functions that make them, where a cache is changed by each call, with room for
            a dozen steps if `measured`.
        dynamic: as in torch.compile.
        max_graphs: more graphs than that in one phase are a finding.
        lint_scope: "own" reads sources outside of installed packages, "all" those too.
        measured: also compile with Inductor: times cold and warm, memory, kernels, CUDA graphs.
        backend: what runs the graphs of the sweeps; by default `aot_eager`, which traces the
            backward too, where one follows, and generates no code. `eager` reports a read where
            Python hands over a float that changes.
        baseline: findings to set aside: a file of `write_baseline`, or fingerprints.
        name: what the report calls it.
        mesh: ranks that share sequences, of which each batch is this rank's part, and of which
            each calls this. A rank that attends its own tokens alone is a finding of kind
            `ranks-apart`.
        tell: called with a line of progress now and then.

    Raises:
        TypeError, ValueError: inputs that are no batches, or a bad baseline file.

    >>> report = audit(lambda x: x * x.max().item(), torch.ones(3), measured=False)
    >>> sorted({finding.kind for finding in report.findings})
    ['graph-break', 'host-sync']
    """
    work = Checks(model_or_fn, dynamic, backend, measured, tell)
    with gradients_kept(model_or_fn), _quiet():
        batches = _made(work, inputs, "inference")
        steps = [] if decode is None else _made(work, decode, "decode")
        if train is None:
            train = _requires_grad(model_or_fn, batches)
        if batches:
            work.phase("inference", batches, train=False)
        if batches and train:
            work.phase("training", batches, train=True)
        if steps:
            work.phase("decode", steps, train=False)
        if mesh is not None and batches:
            work.ranks(batches[0], SequenceShards.of(mesh))
        work.add(lint(model_or_fn, lint_scope))
        branches = work.branches(batches[-1], train) if batches else ()
    found = [marked(f) for f in _merged(work.findings)]
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
    if isinstance(baseline, (str, Path)):
        baseline = read_baseline(baseline)
    return report if baseline is None else report.against(baseline)


def _made(work: Checks, inputs: Any, phase: str) -> list[Batch]:
    """The batches; none where a function that makes one raises, which is a finding."""
    try:
        return batches_of(inputs)
    except InputError as error:
        work.add([error_finding(error)], phase)
        return []


def _merged(findings: list[AuditFinding]) -> list[AuditFinding]:
    """Each once, with all its phases; echoes of a finding on the same line are left out."""
    merged: dict[tuple[str, str, str], AuditFinding] = {}
    for f in findings:
        # Guards that differ in a number alone are one finding, and copies of caches of any size.
        numbered = f.kind in ("recompile", "cache-copy")
        key = f.kind, f.fingerprint if numbered else f.message, f.location
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
    return any(batch.requires_grad for batch in batches)


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


def _name_of(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _environment() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "nsa_flex": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device,
    }
