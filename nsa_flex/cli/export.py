"""`nsa-flex export`: a trained model as a folder in the layout of the hub, with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nsa_flex.cli.generate_model import be_quiet
from nsa_flex.cli.options import fail
from nsa_flex.cli.outputs import check_folder, print_json


def export(
    source: Annotated[Path, typer.Argument(help="The folder of a run, or a checkpoint.")],
    out: Annotated[Path, typer.Argument(help="The folder to write: a new or an empty one.")],
    average: Annotated[
        bool, typer.Option("--average", help="The average of the weights (training.ema).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="What was written, as JSON.")] = False,
) -> None:
    """Copy a model to a folder that others can load, with a card that says how it was made.

    Weights, config and tokenizer in the layout of the hub, the config of the training, and a card
    with losses, fingerprint of the data and a sample. Exits with 2 if there is no model.

    Example: `nsa-flex export runs/tiny exported`
    """
    check_folder(out, "OUT")
    try:
        be_quiet()
        from nsa_flex.training.exporting import export as copy

        told = copy(source, out, average=average)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("export", str(error), error)
    if as_json:
        print_json(told)
    else:
        typer.echo(f"wrote {out}: {', '.join(told['files'])}")
