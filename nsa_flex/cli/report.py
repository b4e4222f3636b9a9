"""`nsa-flex report`: what a training run wrote, as one page of HTML with plots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_flex.cli.options import fail
from nsa_flex.cli.outputs import check_file


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a run: its out.")],
    out: Annotated[
        Path | None, typer.Option(help="The page; report.html in the run's folder if not given.")
    ] = None,
) -> None:
    """Draw losses, speed, gates and backends of a training run, while it runs or afterwards.

    Exits with 2 if the folder holds no training.csv with a row.

    Example: `nsa-flex report runs/tiny`
    """
    from nsa_flex.training.report import report as page

    check_file(out, "--out")
    try:
        text = page(run)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("report", str(error), error)
    file = run / "report.html" if out is None else out
    file.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {file}")
