"""Tables of numbers on a terminal."""

from __future__ import annotations

from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDEST = 1000


def show_table(cells: list[list[str]]) -> None:
    """Print cells, of which the first row heads the columns, with nothing cut off.

    What all lines have in common stands once above them. A table that is wider than the terminal
    stays so, and the terminal breaks its lines.
    """
    columns = [(head, body) for head, *body in zip(*cells, strict=True)]
    common = [(head, body[0]) for head, body in columns if _is_common(body)]
    console = Console()
    if said := ", ".join(f"{head} {value}" for head, value in common if value != "-"):
        console.print(said, highlight=False)
    table = Table(box=SIMPLE_HEAD, collapse_padding=True)
    kept = [(head, body) for head, body in columns if not _is_common(body)]
    for head, body in kept:
        width = max(len(cell) for cell in body)
        table.add_column(fill(head, width, break_long_words=False), no_wrap=True)
    for line in zip(*(body for _, body in kept), strict=True):
        table.add_row(*line)
    needed = Measurement.get(console, console.options.update(max_width=WIDEST), table).maximum
    Console(width=max(console.width, needed)).print(table)


def _is_common(body: list[str]) -> bool:
    return len(body) > 1 and len(set(body)) == 1
