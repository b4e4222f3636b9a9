"""Options that commands share, checked before the work: --device, --dtype, pairs of numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
import typer
from rich.console import Console

SEEDS = {"min": 0, "max": 2**63 - 1}  # what every generator takes
LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def check_device(name: str, what_runs: str | None = None) -> torch.device:
    """A device of this machine; "auto" is CUDA if there is one.

    Args:
        what_runs: begins the sentence that refuses other devices than CPU and CUDA, as "the demo
            runs"; None takes any.

    Raises:
        typer.BadParameter: torch knows no such device, it is refused, or there is none here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    if what_runs is not None and device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"got {name}; {what_runs} on cpu and cuda", param_hint="--device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise typer.BadParameter(f"got {name}; torch sees {count} such", param_hint="--device")
    return device


def named_device(name: str) -> torch.device:
    """Any that torch knows, there or not."""
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device", param_hint="--device") from error


def dtype_name(text: str, known: Collection[str]) -> str:
    """The one of `known` that `text` names, in either form.

    Raises:
        typer.BadParameter: it names none of them.
    """
    for name in known:
        if text in (name, LONG.get(name)) or LONG.get(text) == name:
            return name
    raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}", param_hint="--dtype")


def pair_of(text: str, option: str) -> tuple[int, int]:
    """ "32/8" as (32, 8); "128" as (128, 128)."""
    parts = text.split("/") if "/" in text else [text, text]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(parts) != 2 or len(numbers) != 2 or 0 in numbers:
        raise typer.BadParameter(
            f"got {text!r}; expected one number or two, such as 32/8", param_hint=option
        )
    return numbers[0], numbers[1]


def heads_of(text: str) -> tuple[int, int]:
    """ "32/8" as (32, 8): query and key-value heads."""
    query_heads, kv_heads = pair_of(text, "--heads")
    if query_heads % kv_heads:
        raise typer.BadParameter(
            f"{kv_heads} key-value heads must divide {query_heads} query heads",
            param_hint="--heads",
        )
    return query_heads, kv_heads


def fail(command: str, text: str, cause: Exception | None = None, code: int = 2) -> NoReturn:
    """End a command with one line on stderr."""
    typer.echo(f"nsa-flex {command}: {text}", err=True)
    raise typer.Exit(code) from cause


def teller(name: str, console: Console, status: Any) -> Callable[[str], None]:
    """What a long command tells its progress to: a line that changes, or a log of lines."""
    start = time.perf_counter()

    def tell(line: str) -> None:
        status.update(f"{name}: {line}")
        if not console.is_terminal:
            text = f"{time.perf_counter() - start:6.1f} s  {name}: {line}"
            console.print(text, markup=False, emoji=False, soft_wrap=True)

    return tell
