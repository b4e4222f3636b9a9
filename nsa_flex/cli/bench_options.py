"""What `nsa-flex bench` and `nsa-flex tune` share: shapes, a progress bar."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsa_flex.bench.cases.case import DTYPES
from nsa_flex.bench.report.rows import Row
from nsa_flex.cli.options import dtype_name, heads_of, pair_of


def dims_of(head_dim: list[str]) -> list[tuple[int, int]]:
    """ "192/128" as (192, 128), "64" as (64, 64): D and Dv."""
    return [pair_of(text, "--head-dim") for text in head_dim]


def shapes_of(
    heads: list[str] | None,
    seq_len: list[int] | None,
    head_dim: list[str] | None,
    batch: int | None,
    dtype: str | None,
) -> list[dict[str, Any]]:
    """Fields of `Case` to replace, one entry a shape; one empty entry if nothing was asked."""
    dtype = None if dtype is None else dtype_name(dtype, DTYPES)
    shapes: list[dict[str, Any]] = [{}]
    if heads:
        pairs = [heads_of(text) for text in heads]
        shapes = [{**s, "query_heads": a, "kv_heads": b} for s in shapes for a, b in pairs]
    if seq_len:
        shapes = [{**s, "seq_len": length} for s in shapes for length in seq_len]
    if head_dim:
        pairs = dims_of(head_dim)
        shapes = [{**s, "head_dim": a, "value_dim": b} for s in shapes for a, b in pairs]
    others = {"batch": batch, "dtype": dtype}
    given = {name: value for name, value in others.items() if value is not None}
    return [{**shape, **given} for shape in shapes]


def progress_bar(console: Console) -> Progress:
    """Cases done, time gone, and the case at hand; with `log_case`, for terminals and logs."""
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
    )


def log_case(console: Console, start: float, rows: Sequence[Row]) -> None:
    """Where there is no terminal for a bar: a line a case, with the seconds since `start`."""
    if console.is_terminal:
        return
    times = ", ".join(
        f"{row['pass']} {row['median_ms']:.4g} ms" if row["status"] == "ok" else row["status"]
        for row in rows
    )
    seconds = time.perf_counter() - start
    console.print(f"{seconds:6.1f} s  {rows[0]['case']}: {times}", markup=False, soft_wrap=True)
