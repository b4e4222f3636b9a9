"""The typer application: one module a command, one line each to register it."""

from __future__ import annotations

from typing import Annotated

import typer

import nsa_flex
from nsa_flex.cli.audit import audit
from nsa_flex.cli.bench import bench
from nsa_flex.cli.check import check
from nsa_flex.cli.demo import demo
from nsa_flex.cli.explain import explain
from nsa_flex.cli.export import export
from nsa_flex.cli.generate import generate
from nsa_flex.cli.info import info
from nsa_flex.cli.report import report
from nsa_flex.cli.serve import serve
from nsa_flex.cli.train import train
from nsa_flex.cli.tune import tune

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_show_locals=False,
    epilog="Exit codes: 0 all well, 1 something was found wrong, 2 wrong usage.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nsa-flex {nsa_flex.__version__}")
        raise typer.Exit


@app.callback()
def nsa_flex_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Native Sparse Attention for torch.compile and FlexAttention.

    Example: `nsa-flex info --json`
    """


app.command()(info)
app.command()(explain)
app.command()(demo)
app.command()(audit)
app.command()(check)
app.command()(bench)
app.command()(train)
app.command()(report)
app.command()(export)
app.command()(tune)
app.command()(generate)
app.command()(serve)
