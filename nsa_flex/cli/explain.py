"""`nsa-flex explain`: which backends and kernels a given attention would run, and why."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

import nsa_flex
from nsa_flex.cli.options import dtype_name, fail, heads_of, named_device, pair_of
from nsa_flex.cli.outputs import print_json
from nsa_flex.config import CompressionKind
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
        typer.Option(min=1, help="Only the last so many tokens ask."),
    ] = None,
    cached: Annotated[
        bool, typer.Option(help="The tokens before them are in a static cache of NSA's.")
    ] = False,
    compression: Annotated[
        CompressionKind, typer.Option(help="φ, where it stores into the cache.")
    ] = "mean",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "bf16",
    device: Annotated[str, typer.Option(help="cpu, cuda, …; need not be there.")] = "cuda",
    train: Annotated[bool, typer.Option(help="Whether a backward follows.")] = False,
    backend: Annotated[
        str, typer.Option(help="auto, a backend, or branch=backend,branch=backend.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say which backend takes each branch, which kernels run and why, without running anything.

    Exits with 1 if the backend that was asked for cannot do it; the message says why.

    Example: `nsa-flex explain --heads 32/8 --head-dim 128 --seq-len 65536 --dtype bf16 --train`

    Example: `nsa-flex explain --device cpu --dtype fp32 --backend selected=flex --json`

    Example: `nsa-flex explain --seq-len 65536 --queries 1 --cached --compression mlp`
    """
    query_heads, kv_heads = heads_of(heads)
    dim, value_dim = pair_of(head_dim, "--head-dim")
    if queries is not None and queries > seq_len:
        raise typer.BadParameter(f"{queries} of {seq_len} tokens", param_hint="--queries")
    if cached and train:
        raise typer.BadParameter("a cache carries no gradients", param_hint="--cached --train")

    kind = DTYPES[dtype_name(dtype, DTYPES)]

    def tensor(num_heads: int, length: int, width: int) -> torch.Tensor:
        return torch.empty(1, num_heads, length, width, device="meta", dtype=kind)

    query = tensor(query_heads, seq_len if queries is None else queries, dim)
    key, value = (tensor(kv_heads, seq_len, width) for width in (dim, value_dim))
    options: dict[str, Any] = {"backend": _backend(backend), "device": named_device(device)}
    try:
        if cached:
            cache = _cache(key, value, query.shape[2], compression)
            explanation = nsa_flex.explain(query, cache=cache, **options)
        else:
            explanation = nsa_flex.explain(query, key, value, needs_grad=train, **options)
    except ValueError as error:
        fail("explain", str(error), error, code=1)
    if as_json:
        print_json(explanation.to_dict())
    else:
        table = Table("branch", "backend", "why")
        for branch in BRANCHES:
            choice = explanation[branch]
            table.add_row(branch, choice.backend, choice.reason)
        Console().print(table)
        typer.echo(str(explanation.kernels))


def _cache(
    key: torch.Tensor, value: torch.Tensor, new: int, kind: CompressionKind
) -> nsa_flex.LayerCache:
    """A static cache of meta tensors, full but for `new` tokens."""
    config, (_, heads, length, _) = nsa_flex.NSAConfig(), key.shape
    phi = (
        nsa_flex.Compression(config, heads, x.shape[3], kind, device="meta", dtype=x.dtype)
        for x in (key, value)
    )
    cache = nsa_flex.LayerCache(*phi, max_length=length)
    if new < length:
        with torch.no_grad():
            cache.update(key[:, :, new:], value[:, :, new:])
    return cache


def _backend(text: str) -> Any:
    """One name, or what "selected=flex,sliding=fa2" says; `nsa_flex.explain` checks the names."""
    if "=" not in text:
        return text
    pairs = (entry.partition("=") for entry in text.split(","))
    return {branch.strip(): name.strip() for branch, _, name in pairs}
