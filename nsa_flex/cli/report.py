"""`nsa-flex report`: what training runs wrote, as one page of HTML with plots."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nsa_flex.cli.options import fail
from nsa_flex.cli.outputs import check_file


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="The folder of a run: its out. Several are compared.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The page; report.html in the first run's folder if not given."),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(min=1, help="Write the page anew every so many seconds, until all ended."),
    ] = None,
) -> None:
    """Draw losses, speed, gates and backends of training runs, while they run or afterwards.

    With `--watch` an open page loads itself anew as well. Exits with 2 if a folder holds no
    training.csv with a row.

    Example: `nsa-flex report runs/tiny`

    Example: `nsa-flex report runs/tiny --watch 30`

    Example: `nsa-flex report runs/nsa runs/dense --out compared.html`
    """
    check_file(out, "--out")
    file = runs[0] / "report.html" if out is None else out
    try:
        while not _write(runs, file, watch) and watch is not None:
            time.sleep(watch)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("report", str(error), error)


def _write(runs: list[Path], file: Path, watch: float | None) -> bool:
    """Write the page; whether all runs are over."""
    from nsa_flex.training.report import is_over
    from nsa_flex.training.report import report as page

    over = all(map(is_over, runs))
    text = page(*runs, refresh=None if over else watch)
    aside = file.with_name(f".{file.name}")
    aside.write_text(text, encoding="utf-8")
    aside.replace(file)  # at once: a browser may be reading
    typer.echo(f"wrote {file}")
    return over
