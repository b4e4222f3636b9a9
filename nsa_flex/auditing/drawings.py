"""SVG of a sweep (which graph served which batch, where it broke) and bars of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from nsa_flex.auditing.phases import Phase

COLUMN, ROW = 92, 34  # of one batch, of one graph
LEFT, TOP, BOTTOM = 240, 28, 74
COLOURS = 8  # classes g0 … g7 of the style


def sweep_drawing(phase: Phase) -> str:
    """Batches run to the right, graphs downwards: a filled cell is a graph that ran.

    A ring marks the batch that compiled the graph, red where the code caused the recompilation. A
    batch that runs several graphs had its code cut by graph breaks: its cells are joined by a
    dashed line.
    """
    if not phase.graphs:
        return '<p class="muted">torch compiled nothing: the whole function was skipped.</p>'
    width = LEFT + COLUMN * len(phase.batches) + 20
    height = TOP + ROW * len(phase.graphs) + BOTTOM
    parts = [*_rows(phase, width), *_cells(phase), *_columns(phase)]
    label = f"{len(phase.graphs)} graphs over {len(phase.batches)} batches"
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg>'
    )


def _rows(phase: Phase, width: int) -> Iterator[str]:
    for graph in phase.graphs:
        y = TOP + ROW * graph.number + ROW // 2
        frame = f" · {graph.frame}" if graph.frame else ""
        yield f'<line class="lane" x1="{LEFT - 12}" y1="{y}" x2="{width - 8}" y2="{y}"/>'
        yield (
            f'<text class="name" x="{LEFT - 20}" y="{y + 4}" text-anchor="end">graph '
            f"{graph.number}<tspan> {graph.operations} ops{escape(frame[:24])}</tspan></text>"
        )


def _cells(phase: Phase) -> Iterator[str]:
    by_code = {r.batch for r in phase.recompiles if r.cause == "code"}
    reasons: dict[int, str] = {}
    for recompile in phase.recompiles:
        reasons[recompile.batch] = f"{reasons.get(recompile.batch, '')}{recompile.guard}\n"
    for batch, run in enumerate(phase.runs):
        x = LEFT + COLUMN * batch + COLUMN // 2
        if len(run) > 1:
            top, bottom = (TOP + ROW * n + ROW // 2 for n in (min(run), max(run)))
            yield f'<line class="cut" x1="{x}" y1="{top}" x2="{x}" y2="{bottom}"/>'
        for number in run:
            y = TOP + ROW * number + ROW // 2
            made = phase.graphs[number].batch == batch
            title = f"graph {number} ran for {phase.batches[batch]}"
            if made:
                title += f"\ncompiled here\n{reasons.get(batch, '')}"
            ring = f"ring{' bad' if batch in by_code else ''}" if made else "none"
            yield (
                f'<g><title>{escape(title)}</title><circle class="{ring}" cx="{x}" cy="{y}" '
                f'r="13"/><circle class="g{number % COLOURS}" cx="{x}" cy="{y}" r="8"/></g>'
            )


def _columns(phase: Phase) -> Iterator[str]:
    y = TOP + ROW * len(phase.graphs) + 14
    for batch, label in enumerate(phase.batches):
        x = LEFT + COLUMN * batch + COLUMN // 2
        yield (
            f'<text class="batch" transform="translate({x - 30},{y}) rotate(18)">'
            f"{escape(label[:24])}<title>{escape(label)}</title></text>"
        )


def kernel_bars(kernels: tuple[dict[str, Any], ...]) -> str:
    """A bar for each kernel, as long as its share of the time."""
    if not kernels:
        return ""
    total = sum(kernel["microseconds"] for kernel in kernels) or 1.0
    rows = "".join(
        f'<div class="bar"><span style="width:{100 * k["microseconds"] / total:.1f}%"></span>'
        f"<code>{escape(str(k['name'])[:110])}</code>"
        f"<small>{k['calls']} &times; {k['microseconds'] / max(1, k['calls']):.1f} µs"
        "</small></div>"
        for k in kernels
    )
    return f'<div class="bars">{rows}</div>'
