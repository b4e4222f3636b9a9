"""`nsa-flex train`: a config to a trained, resumable, observable model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from nsa_flex.cli.options import fail
from nsa_flex.training.errors import TrainingError, in_one_line

if TYPE_CHECKING:
    from nsa_flex.training.config import TrainConfig

INTERRUPTED = 130
# What torch raises where processes do not find one another.
_NO_GROUP = (dist.DistError,) if dist.is_available() else ()


def train(
    config: Annotated[
        str | None,
        typer.Argument(help="A YAML file, or tiny, 125m, 350m or llama-8b-layers."),
    ] = None,
    named: Annotated[str | None, typer.Option("--config", help="The same, as an option.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="section.key=value, over the config's; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in out.")
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option("--resume-from", help="Go on from this checkpoint: its steps, or its path."),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            help="section.key=value that the run goes on with otherwise than before; repeatable.",
        ),
    ] = None,
    dry: Annotated[
        bool,
        typer.Option("--dry-run", help="Say parameters, memory, tokens and graphs, and stop."),
    ] = False,
    data: Annotated[
        bool,
        typer.Option(
            "--data-report",
            help="Read the data, say documents, tokens, epochs, padding and skipped files, stop.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Result on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Train a model on text, from a config; several GPUs with torchrun.

    Checkpoints are whole or not there: a run that was killed goes on with `--resume` as if
    nothing had happened. Ctrl-C ends it after the step, with a checkpoint. Exits with 1 if the run
    could not go on, with 2 on wrong usage, with 130 after Ctrl-C. Of several processes the first
    one prints the result.

    Example: `nsa-flex train tiny`

    Example: `nsa-flex train 125m --set data.files=[books,code] --set out=runs/first --dry-run`

    Example: `nsa-flex train my.yaml --data-report --json`

    Example: `nsa-flex train my.yaml --resume --change training.learning_rate=1e-4`

    Example: `torchrun --nproc-per-node 8 -m nsa_flex.cli train my.yaml --resume`
    """
    if (config is None) == (named is None):
        raise typer.BadParameter("give one config: a file or a shipped one's name")
    if changes and not (resume or resume_from):
        raise typer.BadParameter("--change needs --resume; a run begins with --set")
    console = Console(stderr=as_json, highlight=False)
    try:
        chosen = _config(config or named or "", [*(overrides or ()), *(changes or ())])
        if dry or data:
            result = (_dry_run(chosen) if dry else {}) | (_data_report(chosen) if data else {})
        else:
            told = [each.partition("=")[0] for each in changes or ()]
            if resume and not told and not Path(chosen.out).exists() and _is_first():
                typer.echo(f"there is no {chosen.out} yet: from the first step", err=True)
            result = _run(chosen, console, resume=resume, resume_from=resume_from, changes=told)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        fail("train", in_one_line(error), error)
    except (TrainingError, MemoryError, *_NO_GROUP) as error:
        fail("train", in_one_line(error), error, code=1)
    if _is_first():
        _print(result, console, as_json=as_json)
    if result.get("stopped"):
        raise typer.Exit(INTERRUPTED)


def _is_first() -> bool:
    """Whether this is rank 0 of its job."""
    return os.environ.get("RANK", "0") == "0"


def _print(result: dict[str, Any], console: Console, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        console.print(result_table(result))
    if result.get("stopped"):
        typer.echo(
            f"nsa-flex train: stopped; {result['checkpoint']} goes on with --resume", err=True
        )


def _config(name: str, overrides: list[str]) -> TrainConfig:
    from nsa_flex.cli.generate_model import be_quiet
    from nsa_flex.training.config import read_config

    chosen = read_config(name, tuple(overrides))
    be_quiet()
    return chosen


def _dry_run(chosen: TrainConfig) -> dict[str, Any]:
    from nsa_flex.training.dry_run import dry_run

    return dry_run(chosen)


def _data_report(chosen: TrainConfig) -> dict[str, Any]:
    from nsa_flex.training.data_report import data_report
    from nsa_flex.training.texts import find_texts, with_cache

    return data_report(with_cache(find_texts(chosen)))


def _run(chosen: TrainConfig, console: Console, **options: Any) -> dict[str, Any]:
    from nsa_flex.cli.train_progress import ProgressCallback
    from nsa_flex.training.arguments import tokens_per_step
    from nsa_flex.training.run import leave_process_group
    from nsa_flex.training.run import train as train_model

    progress = ProgressCallback(console, tokens_per_step(chosen), chosen.data.seq_len)
    try:
        result = train_model(chosen, callbacks=[progress], **options)
    finally:
        progress.close()
    leave_process_group()
    return result


def result_table(result: dict[str, Any]) -> Table:
    """Two columns: name and value of what is known."""
    table = Table(show_header=False, box=None)
    for name, value in _flat(result):
        if value is not None:
            table.add_row(name.replace("_", " "), value)
    return table


def _flat(result: dict[str, Any]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in result.items():
        if isinstance(value, dict):
            found += [(f"{name} {part}", _shown(name, size)) for part, size in value.items()]
        elif isinstance(value, list):
            found.append((name, ", ".join(map(str, value)) or "nothing"))
        else:
            found.append((name, _shown(name, value)))
    return found


def _shown(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
