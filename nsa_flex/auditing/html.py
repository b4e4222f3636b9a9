"""A report as one page of HTML: verdict, a drawing of each sweep, findings with their sources."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from nsa_flex.auditing.drawings import kernel_bars, sweep_drawing
from nsa_flex.auditing.excerpts import excerpt, place_of, shortened
from nsa_flex.auditing.page_style import SCRIPT, STYLE
from nsa_flex.auditing.phases import AuditFinding, Phase, Recompile
from nsa_flex.auditing.text import seconds, size

if TYPE_CHECKING:
    from nsa_flex.auditing.report import AuditReport


def page(*reports: AuditReport) -> str:
    """All reports on one page; it loads nothing from anywhere."""
    title = ", ".join(report.target for report in reports)
    body = "".join(_report(report) for report in reports)
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Audit of {escape(title)}</title><style>{STYLE}</style></head>"
        f"<body><main>{body}</main><script>{SCRIPT}</script></body></html>\n"
    )


def _report(report: AuditReport) -> str:
    parts = [_head(report), *map(_phase, report.phases), _branches(report)]
    parts.append(_findings("Findings", report.findings, "finding"))
    parts.append(_findings("Known, from the baseline", report.known, "known"))
    parts.append(_findings("Allowed by a comment", report.allowed, "known"))
    if report.notes:
        notes = "".join(f"<li>{_code(shortened(note))}</li>" for note in report.notes)
        parts.append(
            f'<section class="card"><h2>Notes</h2><ul class="notes">{notes}</ul></section>'
        )
    return "".join(parts)


def _head(report: AuditReport) -> str:
    count = len(report.findings)
    text = "clean" if report.ok else f"{count} finding" + ("s" if count > 1 else "")
    environment = " · ".join(f"{name} {value}" for name, value in report.environment.items())
    tiles = [
        ("graphs", sum(report.graphs.values())),
        ("graph breaks", sum(phase.breaks for phase in report.phases)),
        ("recompilations by the code", _by_code(report.phases)),
        ("syncs", sum("sync" in f.kind or f.kind == "data-dependent" for f in report.findings)),
    ]
    drawn = "".join(
        f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles
    )
    verdict = "ok" if report.ok else "bad"
    return (
        f'<header><p class="kicker">nsa-flex audit</p><h1>{escape(report.target)} '
        f'<span class="verdict {verdict}">{text}</span></h1>'
        f'<p class="muted">{escape(environment)}</p><div class="tiles">{drawn}</div></header>'
    )


def _by_code(phases: tuple[Phase, ...]) -> int:
    return sum(each.cause == "code" for phase in phases for each in phase.recompiles)


def _phase(phase: Phase) -> str:
    numbers = phase.measured
    skips = {None: "not tried", 0: "taken"}.get(phase.cudagraphs, f"{phase.cudagraphs} skipped")
    facts = [
        ("graphs", str(len(phase.graphs))),
        ("compile, cold", seconds(numbers.get("compile_seconds_cold"))),
        ("compile, warm", seconds(numbers.get("compile_seconds_warm"))),
        ("step", seconds(numbers.get("step_seconds"))),
        ("peak memory, compiled", size(numbers.get("peak_bytes_compiled"))),
        ("peak memory, eager", size(numbers.get("peak_bytes_eager"))),
        ("CUDA graphs", skips),
    ]
    listed = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
        for name, value in facts
        if value not in ("-", "not tried")
    )
    kernels = kernel_bars(phase.kernels)
    details = (
        f"<details><summary>what ran in one compiled call</summary>{kernels}</details>"
        if kernels
        else ""
    )
    return (
        f'<section class="card"><h2>{escape(phase.name)}</h2><dl class="facts">{listed}</dl>'
        f'<div class="scroll">{sweep_drawing(phase)}</div>{_LEGEND}{_recompiles(phase)}{details}'
        "</section>"
    )


_LEGEND = (
    '<p class="muted legend">A dot is a graph that ran for a batch; a ring, that it was compiled '
    "for it, red if the code caused that; a dashed line joins what graph breaks cut apart.</p>"
)
_CAUSES = {
    "code": ("caused by the code", "bad"),
    "length": ("first change of a size", "note"),
    "number": ("first change of a number", "note"),
    "size-one": ("a size of 0 or 1", "note"),
    "same-size": ("two sizes were equal", "note"),
}


def _recompiles(phase: Phase) -> str:
    if not phase.recompiles:
        return ""
    alike: dict[tuple[str, str, str], list[Recompile]] = {}
    for each in phase.recompiles:
        key = each.cause, re.sub(r"\d+", "#", each.guard), each.location
        alike.setdefault(key, []).append(each)
    rows = ""
    for group in alike.values():
        text, kind = _CAUSES[group[0].cause]
        batches = dict.fromkeys(phase.batches[each.batch] for each in group)
        times = f" {len(group)} times" if len(group) > 1 else ""
        guards = dict.fromkeys(each.guard for each in group)
        rows += (
            f'<tr><td><span class="tag {kind}">{text}{times}</span></td>'
            f"<td>{'<br>'.join(map(escape, batches))}</td>"
            f"<td>{'<br>'.join(f'<code>{escape(guard)}</code>' for guard in list(guards)[:3])}"
            f"<br><small>{_code(group[0].mend)}</small></td></tr>"
        )
    head = "<tr><th>recompiled</th><th>for</th><th>failed guard, and what saves it</th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _branches(report: AuditReport) -> str:
    if not report.branches:
        return ""
    rows = "".join(
        f"<tr><td>{b.branch}</td><td><b>{b.backend}</b></td><td>{escape(b.reason)}</td>"
        f"<td>{'<br>'.join(f'<code>{escape(k[:80])}</code>' for k in b.kernels)}</td></tr>"
        for b in report.branches
    )
    head = "<tr><th>branch</th><th>backend</th><th>why</th><th>what ran, longest first</th></tr>"
    return (
        '<section class="card"><h2>Branches of nsa_attention</h2>'
        f'<div class="scroll"><table>{head}{rows}</table></div></section>'
    )


def _findings(title: str, findings: tuple[AuditFinding, ...], kind: str) -> str:
    if not findings:
        return ""
    cards = "".join(_finding(finding, kind) for finding in findings)
    return f'<section><h2>{title} <span class="count">{len(findings)}</span></h2>{cards}</section>'


def _finding(finding: AuditFinding, kind: str) -> str:
    file, line, function = place_of(finding.location)
    lines = "".join(
        f'<span class="{"hit" if number == line else "row"}">'
        f"<i>{number}</i>{escape(text)}\n</span>"
        for number, text in excerpt(finding.location)
    )
    code = f"<pre>{lines}</pre>" if lines else ""
    file = shortened(file)
    where = f"{escape(file)}<b>:{line}</b> in {escape(function)}" if line else escape(file)
    phases = "".join(f'<span class="tag">{escape(p)}</span>' for p in finding.phases)
    mend = f'<p class="mend"><b>Mend</b> {_code(finding.mend)}</p>' if finding.mend else ""
    return (
        f'<article class="card {kind}">'
        f'<p><span class="tag {kind}">{finding.kind}</span>{phases}</p>'
        f"<h3>{escape(finding.message)}</h3>"
        f'<p class="muted where">{where}</p>{code}{mend}</article>'
    )


def _code(text: str) -> str:
    """Escaped, with names and calls of torch set as code."""
    return re.sub(r"(torch\.[\w.]*\w(?:\([^)]*\))?)", r"<code>\1</code>", escape(text))
