"""`--dtype` of the commands: torch's names of dtypes, or their short forms."""

from __future__ import annotations

from collections.abc import Collection

import typer

LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def dtype_name(text: str, known: Collection[str]) -> str:
    """The one of `known` that `text` names, in either form.

    Raises:
        typer.BadParameter: it names none of them.
    """
    for name in known:
        if text in (name, LONG.get(name)) or LONG.get(text) == name:
            return name
    raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}", param_hint="--dtype")
