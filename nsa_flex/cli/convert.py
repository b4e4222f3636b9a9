"""`nsa-flex convert`: a dense checkpoint to NSA, in stages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from nsa_flex.cli.options import fail
from nsa_flex.cli.train import INTERRUPTED, result_table
from nsa_flex.training.errors import TrainingError, in_one_line

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from nsa_flex.training.config import TrainConfig
    from nsa_flex.training.convert import Stage


def convert(
    checkpoint: Annotated[
        str, typer.Argument(help="Directory of a dense checkpoint; a patched one is trained on.")
    ],
    text: Annotated[
        list[str], typer.Option(help="Files, folders or globs to train on; repeatable.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the runs, one for each stage.")],
    tokenizer: Annotated[
        str | None, typer.Option(help='"bytes" or a directory; the checkpoint\'s if not given.')
    ] = None,
    steps: Annotated[str, typer.Option(help="Of the stages; 0 leaves one out.")] = "0,1500,300",
    lengths: Annotated[
        str, typer.Option(help="Tokens of a row in each stage.")
    ] = "4096,4096,32768",
    rates: Annotated[str, typer.Option(help="Learning rates of the stages.")] = "1e-3,3e-5,3e-5",
    alignment: Annotated[
        float,
        typer.Option(help="Weight of the distance from dense attention in the second stage."),
    ] = 0.0,
    keep_dense: Annotated[
        int,
        typer.Option(min=0, help="Layers to leave dense: those that lose most as NSA."),
    ] = 0,
    choice_len: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Tokens of the rows on which --keep-dense chooses: as many as the checkpoint has "
            "learnt. The first stage's if not given.",
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value of nsa-flex train, for all stages."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Result on stdout.")] = False,
) -> None:
    """Give a dense model NSA: φ and gates alone if asked for, then all of it, then longer rows.

    Each stage is a run as of `nsa-flex train`, with recall.csv beside its telemetry: how many of
    the blocks that dense attention would look at are selected. The same command goes on with what
    is there. Exits with 1 if a run could not go on, with 2 on wrong usage, with 130 after Ctrl-C.

    Example: `nsa-flex convert my/checkpoint --text my/text --out runs/mine --keep-dense 1
    --choice-len 32768`

    Example: `nsa-flex convert my/checkpoint --text code --out runs/mine --lengths 4096,4096,8192`
    """
    console = Console(stderr=as_json, highlight=False)
    try:
        from nsa_flex.cli.generate_model import be_quiet
        from nsa_flex.training.convert import convert as run

        be_quiet()
        stages = _stages(steps, lengths, rates, alignment)
        with contextlib.ExitStack() as bars:
            result = run(
                checkpoint,
                out,
                text,
                tokenizer=tokenizer,
                stages=stages,
                keep_dense=keep_dense,
                choice_len=choice_len,
                overrides=overrides or (),
                note=lambda text: console.print(text, markup=False),
                callbacks=lambda config: [_progress(config, console, bars)],
            )
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("convert", in_one_line(error), error)
    except (TrainingError, MemoryError) as error:
        fail("convert", in_one_line(error), error, code=1)
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        console.print(result_table(result))
    if result["stopped"]:
        raise typer.Exit(INTERRUPTED)


def _progress(
    config: TrainConfig, console: Console, bars: contextlib.ExitStack
) -> TrainerCallback:
    from nsa_flex.cli.train_progress import ProgressCallback
    from nsa_flex.training.arguments import tokens_per_step

    console.print(f"stage {Path(config.out).name}", markup=False)
    progress = ProgressCallback(console, tokens_per_step(config), config.data.seq_len)
    bars.callback(progress.close)
    return progress


def _stages(steps: str, lengths: str, rates: str, alignment: float) -> list[Stage]:
    from nsa_flex.training.convert import STAGES

    given = zip(
        STAGES,
        _numbers(steps, "--steps", int),
        _numbers(lengths, "--lengths", int),
        _numbers(rates, "--rates", float),
        strict=True,
    )
    stages = [
        dataclasses.replace(stage, steps=count, seq_len=length, learning_rate=rate)
        for stage, count, length, rate in given
    ]
    stages[1] = dataclasses.replace(stages[1], alignment=alignment)
    return stages


def _numbers(text: str, option: str, kind: type) -> list[Any]:
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3:
        raise typer.BadParameter(
            f"got {text!r}; expected three numbers with commas between them", param_hint=option
        )
    return found
