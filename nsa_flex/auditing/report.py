"""What an audit found and measured; prints as a table, converts to JSON and HTML."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import linecache
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_flex.auditing.html import page, seconds, size, skips
from nsa_flex.auditing.sources import place_of, shortened


@dataclass(frozen=True)
class AuditFinding:
    """One thing that does not belong in code that is to be compiled, and how to mend it.

    Args:
        kind: `graph-break`, `recompile`, `host-sync`, `data-dependent`, `device-copy`,
            `cuda-sync`, `meta-run`, `cudagraph-skip`, `cache-copy`, `lint`, `too-many-graphs`,
            `ranks-apart` or `error`.
        message: what happened, with torch's own reason where it gives one.
        location: `file:line in function` of the innermost frame outside torch.
        mend: what to do about it.
        phases: in which of `inference`, `training`, `decode`, `ranks` and `sources` it was seen,
            and, if rank 0 of several did not see it, `rank 1` and the like.
    """

    kind: str
    message: str
    location: str
    mend: str = ""
    phases: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The same for the same finding after lines have moved: what baselines compare."""
        file, line, function = place_of(self.location)
        code = linecache.getline(file, line).strip() if line else ""
        message = re.sub(r"0x[0-9a-f]+|\d+", "#", self.message)
        if self.kind == "recompile":
            message = re.sub(r" == .*", " ==", message)  # The value is another every time.
        text = "\0".join((self.kind, message, Path(file).name, function, code))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        where = f" ({', '.join(self.phases)})" if self.phases else ""
        lines = [f"{self.kind}{where}: {self.message}", f"  at {shortened(self.location)}"]
        return "\n".join([*lines, f"  mend: {self.mend}"] if self.mend else lines)


@dataclass(frozen=True)
class Graph:
    """One compiled graph: how many operations, in which frame, and the batch that asked for it."""

    number: int
    operations: int
    frame: str
    batch: int


@dataclass(frozen=True)
class Recompile:
    """Why a batch was not served by the graphs there were.

    cause is `length` or `number` (torch met a second size, or value of a Python number, and made
    it a symbol), `size-one` (torch takes sizes 0 and 1 for constants), `same-size` (two sizes
    were equal when a graph was made) or `code`: only the last is a finding.
    """

    batch: int
    cause: str
    guard: str
    location: str
    mend: str


@dataclass(frozen=True)
class Phase:
    """One sweep over the batches: `inference`, `training` or `decode`.

    Args:
        name: which.
        batches: label of each batch, in order.
        graphs: all that were compiled.
        runs: for each batch the numbers of the graphs that ran.
        recompiles: each with the batch that caused it.
        breaks: number of places where the graph broke.
        measured: compile seconds cold and warm, step seconds, peak bytes; empty if not measured.
        kernels: what ran in one compiled call, as dicts of name, calls and microseconds.
        cudagraphs: None if not tried, else the number of skips.
    """

    name: str
    batches: tuple[str, ...]
    graphs: tuple[Graph, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    breaks: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()
    cudagraphs: int | None = None

    @property
    def recompiles_by_code(self) -> int:
        """Number of recompilations that the code causes."""
        return sum(each.cause == "code" for each in self.recompiles)


@dataclass(frozen=True)
class BranchRun:
    """Which backend computed a branch of `nsa_attention`, why, and the kernels it launched."""

    branch: str
    backend: str
    reason: str
    kernels: tuple[str, ...] = ()


_RULE = "─"


def table(report: AuditReport) -> str:
    """The verdict, a row for each phase, the branches, then findings and notes."""
    where = ", ".join(f"{name} {value}" for name, value in report.environment.items())
    parts = [f"{report.target}: {report.verdict}\n{where}", _phases(report.phases)]
    parts += [_branches(report)] if report.branches else []
    for title, findings in (
        ("Findings", report.findings),
        ("Known, from the baseline", report.known),
        ("Allowed by a comment", report.allowed),
    ):
        parts += [f"{title}\n" + "\n".join(map(str, findings))] if findings else []
    parts += (
        ["Notes\n" + "\n".join(f"- {shortened(note)}" for note in report.notes)]
        if report.notes
        else []
    )
    return "\n\n".join(parts)


def _phases(phases: tuple[Phase, ...]) -> str:
    head = ["phase", "batches", "graphs", "breaks", "recompiles", "of the code", "CUDA graphs"]
    head += ["compile cold / warm", "step", "peak memory"]
    return _columns([head, *map(_row, phases)])


def _row(phase: Phase) -> list[str]:
    numbers = phase.measured
    cold, warm = (seconds(numbers.get(f"compile_seconds_{k}")) for k in ("cold", "warm"))
    peak = numbers.get("peak_bytes_compiled", numbers.get("peak_bytes_eager"))
    counts = [len(phase.batches), len(phase.graphs), phase.breaks, len(phase.recompiles)]
    counts.append(phase.recompiles_by_code)
    step = seconds(numbers.get("step_seconds"))
    return [
        phase.name,
        *map(str, counts),
        skips(phase.cudagraphs),
        f"{cold} / {warm}",
        step,
        size(peak),
    ]


def _branches(report: AuditReport) -> str:
    rows = [["branch", "backend", "why", "kernels"]]
    rows += [
        [b.branch, b.backend, b.reason, ", ".join(kernel[:40] for kernel in b.kernels[:3])]
        for b in report.branches
    ]
    return _columns(rows)


def _columns(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join(_RULE * w for w in widths))
    return "\n".join(line.rstrip() for line in lines)


@dataclass(frozen=True)
class AuditReport:
    """The result of `audit`.

    Args:
        target: what was audited.
        findings: what is wrong, and new if a baseline was given.
        known: findings that the baseline lists.
        allowed: findings on lines that carry an allow comment.
        notes: what a reader should know but need not mend.
        phases: the sweeps.
        branches: of `nsa_attention`, where it was called.
        environment: versions and devices.
    """

    target: str
    findings: tuple[AuditFinding, ...] = ()
    known: tuple[AuditFinding, ...] = ()
    allowed: tuple[AuditFinding, ...] = ()
    notes: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    branches: tuple[BranchRun, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when nothing (new) was found."""
        return not self.findings

    @property
    def verdict(self) -> str:
        """`clean`, or the number of findings."""
        count = len(self.findings)
        return "clean" if self.ok else f"{count} finding{'s' if count > 1 else ''}"

    @property
    def graphs(self) -> dict[str, int]:
        """Number of graphs of each phase."""
        return {phase.name: len(phase.graphs) for phase in self.phases}

    def against(self, baseline: Iterable[str]) -> AuditReport:
        """The same report with the findings set aside whose fingerprints `baseline` has.

        As many of one fingerprint as there: the next one like them is new.
        """
        left = Counter(baseline)
        new: list[AuditFinding] = []
        known = list(self.known)
        for finding in self.findings:
            (known if left[finding.fingerprint] > 0 else new).append(finding)
            left[finding.fingerprint] -= 1
        return dataclasses.replace(self, findings=tuple(new), known=tuple(known))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; findings carry their fingerprints."""
        plain = dataclasses.asdict(self)
        for name in ("findings", "known", "allowed"):
            for entry, finding in zip(plain[name], getattr(self, name), strict=True):
                entry["fingerprint"] = finding.fingerprint
        return {"ok": self.ok, "graphs": self.graphs, **plain}

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_html(self) -> str:
        """One page that needs no other file: graphs, breaks and recompilations drawn.

        Raises:
            ModuleNotFoundError: jinja2 is missing; the message names the extra that brings it.
        """
        return page(self)

    def __str__(self) -> str:
        return table(self)


VERSION = 2


def write_baseline(report: AuditReport, file: str | Path) -> None:
    """Save every finding of `report`, known ones included, as the baseline of later audits."""
    every = (*report.known, *report.findings)
    entries = [
        {
            "fingerprint": finding.fingerprint,
            "kind": finding.kind,
            "message": finding.message,
            "location": finding.location,
        }
        for finding in every
    ]
    text = json.dumps({"version": VERSION, "findings": entries}, indent=2)
    Path(file).write_text(text + "\n")


def read_baseline(file: str | Path) -> Counter[str]:
    """Fingerprints of the findings that `write_baseline` saved, and how many there are of each.

    Raises:
        ValueError: the file is no baseline.
        FileNotFoundError: there is no such file.
    """
    try:
        saved = json.loads(Path(file).read_text())
        if saved["version"] == VERSION:
            return Counter(entry["fingerprint"] for entry in saved["findings"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no baseline of nsa-flex audit") from error
    raise ValueError(
        f"{file} is a baseline of version {saved['version']}, expected {VERSION}: write it anew"
    )
