"""`nsa-flex explain`: which backend would take each branch of a given attention, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import nsa_flex
from nsa_flex.cli.dtypes import dtype_name
from nsa_flex.dispatch import BRANCHES

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}


def explain(
    heads: Annotated[str, typer.Option(help="Query heads / key-value heads.")] = "32/8",
    head_dim: Annotated[
        str, typer.Option(help="Of queries and keys; 192/128 where values differ.")
    ] = "128",
    seq_len: Annotated[int, typer.Option(min=1, help="Tokens, S.")] = 65536,
    queries: Annotated[
        int | None,
        typer.Option(min=1, help="Only the last so many tokens ask, without a cache of NSA's."),
    ] = None,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; need not be there.")] = "cuda",
    train: Annotated[bool, typer.Option(help="Whether a backward follows.")] = False,
    backend: Annotated[
        str, typer.Option(help="auto, a backend, or branch=backend,branch=backend.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say which backend takes each branch and why, without running anything.

    Exits with 1 if the backend that was asked for cannot do it; the message says why.

    Example: `nsa-flex explain --heads 32/8 --head-dim 128 --seq-len 65536 --dtype bf16 --train`

    Example: `nsa-flex explain --device cpu --dtype fp32 --backend selected=flex --json`
    """
    query_heads, kv_heads = pair_of(heads, "--heads")
    dim, value_dim = pair_of(head_dim, "--head-dim")
    if query_heads % kv_heads:
        raise typer.BadParameter(
            f"{kv_heads} key-value heads must divide {query_heads} query heads",
            param_hint="--heads",
        )
    if queries is not None and queries > seq_len:
        raise typer.BadParameter(f"{queries} of {seq_len} tokens", param_hint="--queries")

    kind = DTYPES[dtype_name(dtype, DTYPES)]

    def tensor(num_heads: int, length: int, width: int) -> torch.Tensor:
        return torch.empty(1, num_heads, length, width, device="meta", dtype=kind)

    try:
        explanation = nsa_flex.explain(
            tensor(query_heads, seq_len if queries is None else queries, dim),
            tensor(kv_heads, seq_len, dim),
            tensor(kv_heads, seq_len, value_dim),
            backend=_backend(backend),
            device=_device(device),
            needs_grad=train,
        )
    except ValueError as error:
        typer.echo(f"nsa-flex explain: {error}", err=True)
        raise typer.Exit(1) from error
    if as_json:
        typer.echo(json.dumps(explanation.to_dict(), indent=2))
    else:
        table = Table("branch", "backend", "why")
        for branch in BRANCHES:
            choice = explanation[branch]
            table.add_row(branch, choice.backend, choice.reason)
        Console().print(table)


def pair_of(text: str, option: str) -> tuple[int, int]:
    """ "32/8" as (32, 8); "128" as (128, 128)."""
    parts = text.split("/") if "/" in text else [text, text]
    numbers = [int(part) for part in parts if part.isdecimal()]
    if len(parts) != 2 or len(numbers) != 2 or 0 in numbers:
        raise typer.BadParameter(
            f"got {text!r}; expected one number or two, such as 32/8", param_hint=option
        )
    return numbers[0], numbers[1]


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"{name!r} is no device", param_hint="--device") from error


def _backend(text: str) -> Any:
    """One name, or what "selected=flex,sliding=fa2" says; `nsa_flex.explain` checks the names."""
    if "=" not in text:
        return text
    pairs = (entry.partition("=") for entry in text.split(","))
    return {branch.strip(): name.strip() for branch, _, name in pairs}
