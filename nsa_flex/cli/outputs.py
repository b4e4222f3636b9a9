"""Where commands write: files, looked at before the work, not after it, and JSON on stdout."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import typer

SEEDS = {"min": 0, "max": 2**63 - 1}  # what every generator takes


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
