"""`nsa-flex check`: whether a model, once patched, computes what it must."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from nsa_flex.cli.options import SEEDS, check_device, dtype_name, teller
from nsa_flex.cli.outputs import print_json

DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def check(
    model: Annotated[
        str,
        typer.Argument(
            help="A model type of transformers (llama, qwen3, …: a tiny random one is checked), a "
            "checkpoint directory, or module:function (it returns a model). One that is patched, "
            "or trained with NSA by others, is checked as it is."
        ),
    ],
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: CUDA if any.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="fp64 or fp32.")] = "fp64",
    seed: Annotated[int, typer.Option(help="Of the token ids, gates and φ.", **SEEDS)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Report on stdout as JSON.")] = False,
) -> None:
    """Patch a model and try what must hold: causality, padding, packing, caches, saving, …

    A check is ok, refused (a clear error of nsa_flex), inherited (the model fails without NSA
    too), wrong or crashed. Exits with 1 if one is wrong or crashed, with 2 on wrong usage.

    Example: `nsa-flex check llama`

    Example: `nsa-flex check my_package.models:small_model --json`

    Example: `nsa-flex check ./my-checkpoint --dtype fp32 --device cuda`
    """
    from nsa_flex.cli.generate_model import be_quiet
    from nsa_flex.testing import check_model
    from nsa_flex.testing.models import model_named

    be_quiet()
    progress, place = Console(stderr=True, highlight=False), check_device(device)
    kind = DTYPES[dtype_name(dtype, DTYPES)]
    torch.manual_seed(seed)
    with progress.status(f"{model}: building") as status:
        try:
            subject: Any = model_named(model, kind).to(place)
            tell = teller(model, progress, status)
            report = check_model(subject, name=model, seed=seed, tell=tell)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="MODEL") from error
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(str(report))
    raise typer.Exit(0 if report.ok else 1)
