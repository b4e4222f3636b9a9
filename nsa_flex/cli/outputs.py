"""Where commands write: files, looked at before the work, and JSON and tables on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table


def check_file(path: Path | None, option: str) -> None:
    """That a file can be written there, into a folder that exists.

    Raises:
        typer.BadParameter: it cannot.
    """
    if path is None:
        return
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder", param_hint=option)
    if not path.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {path.parent}", param_hint=option)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written", param_hint=option)


def check_folder(path: Path, option: str) -> None:
    """That `path` is a folder to write to, or can become one.

    Raises:
        typer.BadParameter: it cannot.
    """
    nearest = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not nearest.is_dir():
        raise typer.BadParameter(f"{nearest} is no folder", param_hint=option)
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{nearest} cannot be written to", param_hint=option)


def json_alone(as_json: bool) -> AbstractContextManager[Any]:
    """Within, what others print goes to stderr, where stdout is for JSON."""
    return redirect_stdout(sys.stderr) if as_json else nullcontext()


def print_json(value: Any) -> None:
    """`value` as JSON on stdout; NaN and infinities, which JSON has not, as null."""
    typer.echo(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
