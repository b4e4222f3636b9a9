"""`nsa-flex tune`: measures which backend is fastest here, and lets dispatch know."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from nsa_flex.bench.cases.case import DTYPES, Case
from nsa_flex.bench.measure import machine, tuner
from nsa_flex.bench.measure.runner import Options, run
from nsa_flex.bench.report.rows import Notebook, Row
from nsa_flex.cli.bench import dims_of, log_case, progress_bar
from nsa_flex.cli.options import check_device, dtype_name, fail, heads_of
from nsa_flex.cli.outputs import print_json
from nsa_flex.tuning import VERSIONS, Entry, parse, tuned_entries, tuned_file


def tune(
    heads: Annotated[
        list[str] | None, typer.Option(help="Hq/Hkv; repeatable. Default 64/4, 32/8, 16/16.")
    ] = None,
    head_dim: Annotated[
        list[str] | None, typer.Option(help="D or D/Dv; repeatable. Default 128.")
    ] = None,
    seq_len: Annotated[
        list[int] | None, typer.Option(min=1, help="S; repeatable. Default 4096, 16384, 65536.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bfloat16 or float16; repeatable. Default bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, cuda:1, …")] = "auto",
    milliseconds: Annotated[
        float, typer.Option(min=1, help="About how long each measurement repeats.")
    ] = 100.0,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Measure again what an earlier run measured.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Say what is cached and stop.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Remove what is cached and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Result on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Find the fastest backend of each branch on this GPU, and use it from now on.

    Measures the branches on every backend that offers them, forward and with its backward, and
    where others win than `auto` takes, the whole core both ways. What is faster is written to the
    user's cache folder (NSA_FLEX_CACHE_DIR to move it), for this device and these versions of
    torch, triton and nsa_flex; NSA_FLEX_TUNED=0 ignores it. Takes some minutes; an interrupted
    run goes on where it stopped. Exits with 1 if a backend gave a wrong result, with 2 without a
    CUDA device.

    Example: `nsa-flex tune`

    Example: `nsa-flex tune --heads 32/8 --head-dim 128 --seq-len 8192 --seq-len 131072`

    Example: `nsa-flex tune --show --json`
    """
    where = _cuda(device)
    path = tuned_file(torch.cuda.get_device_name(where))
    if clear:
        path.unlink(missing_ok=True)
        _measured_file(path).unlink(missing_ok=True)
        typer.echo(f"removed {path}")
        return
    if show:
        _show(path, as_json=as_json)
        return
    cases = tuner.branch_cases(
        heads=[heads_of(text) for text in heads] if heads else tuner.HEADS,
        lengths=seq_len or tuner.LENGTHS,
        dims=dims_of(head_dim) if head_dim else tuner.DIMS,
        dtypes=_half(dtype or ["bfloat16"]),
    )
    console = Console(stderr=as_json, highlight=False)
    shared = machine.describe(where)
    notebook = Notebook(_measured_file(path), shared, fresh=fresh)
    rows = _measure(cases, notebook, Options(where, milliseconds), console)
    tuner.write_tuned(path, tuner.entries_of(rows.orders), shared)
    _show(path, as_json=as_json)
    wrong = [row for row in rows.all if row["status"] == "failed"]
    for row in wrong:
        typer.echo(f"nsa-flex tune: {row['case']}: {row['reason']}", err=True)
    raise typer.Exit(1 if wrong else 0)


def _cuda(name: str) -> torch.device:
    if not torch.cuda.is_available():
        fail("tune", "there is no CUDA device; backends compete on CUDA only")
    device = check_device(name)
    if device.type != "cuda":
        raise typer.BadParameter(
            f"got {name}; backends compete on CUDA only", param_hint="--device"
        )
    return device


def _half(names: list[str]) -> list[str]:
    known = [name for name in DTYPES if DTYPES[name].itemsize == 2]
    return [dtype_name(name, known) for name in names]


def _measured_file(path: Path) -> Path:
    """Rows beside the file that dispatch reads."""
    return path.with_name(path.stem + "-rows.json")


class _Measured:
    """All rows, and the orders that follow from them."""

    def __init__(self, rows: list[Row], orders: tuner.Orders) -> None:
        self.all, self.orders = rows, orders


def _measure(
    cases: Sequence[Case], notebook: Notebook, options: Options, console: Console
) -> _Measured:
    """Branches first, then the cores that their winners suggest."""
    before = os.environ.get("NSA_FLEX_TUNED")
    os.environ["NSA_FLEX_TUNED"] = "0"  # what an earlier run found must not compete with itself
    tuned_entries.cache_clear()
    try:
        with progress_bar(console) as progress:
            task = progress.add_task("", total=len(cases))
            start = time.perf_counter()

            def tell(case: Any, rows: list[Row]) -> None:
                log_case(progress.console, start, rows)
                progress.update(task, advance=1, description=case.key)

            ceilings = machine.ceilings(options.device, torch.bfloat16)
            rows = run(cases, notebook, ceilings, options, tell)
            orders = tuner.orders_of(rows)
            core = tuner.core_cases(orders)
            progress.update(task, total=len(cases) + len(core))
            core_rows = run(core, notebook, ceilings, options, tell)
        return _Measured([*rows, *core_rows], tuner.confirmed(orders, core_rows))
    finally:
        if before is None:
            del os.environ["NSA_FLEX_TUNED"]
        else:
            os.environ["NSA_FLEX_TUNED"] = before
        tuned_entries.cache_clear()


def _show(path: Path, *, as_json: bool) -> None:
    """The file's entries, and whether they count."""
    if not path.exists():
        fail("tune", f"nothing is cached in {path}", code=1)
    text = path.read_text()
    try:
        entries = parse(text)
    except ValueError as error:
        fail("tune", f"{path}: {error}", error, code=1)
    if as_json:
        found = {"file": str(path), "counts": bool(entries), **json.loads(text)}
        print_json(found)
        return
    console = Console(highlight=False)
    console.print(_table(entries))
    if not entries:
        names = " and ".join(VERSIONS)
        console.print(f"Measured with another version of {names}: it does not count.")
    console.print(str(path), markup=False)


def _table(entries: Sequence[Entry]) -> Table:
    table = Table("branch", "dtype", "pass", "G", "D", "up to tokens", "fastest first")
    for entry in entries:
        for up_to, backends in entry.bands:
            table.add_row(
                entry.branch,
                entry.dtype,
                "forward + backward" if entry.train else "forward",
                str(entry.group_size),
                f"{entry.head_dim}/{entry.value_head_dim}",
                str(up_to) if up_to else "any",
                ", ".join(backends),
            )
    return table
