"""A report as text for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nsa_flex.auditing.excerpts import shortened
from nsa_flex.auditing.phases import Phase

if TYPE_CHECKING:
    from nsa_flex.auditing import report as _report

_RULE = "─"


def table(report: _report.AuditReport) -> str:
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


def _branches(report: _report.AuditReport) -> str:
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


def skips(count: int | None) -> str:
    """How CUDA graphs fared.

    >>> skips(0), skips(2), skips(None)
    ('taken', '2 skipped', 'not tried')
    """
    if count is None:
        return "not tried"
    return f"{count} skipped" if count else "taken"


def seconds(value: float | None) -> str:
    """`1.2 s`, `3.4 ms`, or a dash."""
    if value is None:
        return "-"
    return f"{value:.1f} s" if value >= 1 else f"{1e3 * value:.2f} ms"


def size(value: float | None) -> str:
    """`3.2 MiB`, or a dash."""
    if value is None:
        return "-"
    return f"{value / 2**20:.1f} MiB" if value < 2**30 else f"{value / 2**30:.2f} GiB"
