"""`nsa-flex audit`: graph breaks, recompilations, syncs and costs of a model, NSA or not."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch.utils._pytree import tree_leaves

from nsa_flex.cli.options import check_device, teller
from nsa_flex.cli.outputs import check_file, json_alone, print_json

if TYPE_CHECKING:
    from nsa_flex.auditing import AuditFinding, AuditReport

Lengths = Annotated[str, typer.Option(help="Sequence lengths to sweep, the first one first.")]


def audit(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="A model type of transformers (llama, qwen3, …: a tiny random one is audited), "
            "module:factory (it returns a model or function, and its inputs), nsa_attention, "
            "NSAAttention, or self (these two and a patched llama)."
        ),
    ],
    lengths: Lengths = "48,100,64,17",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to sweep.")] = "2,3",
    patched: Annotated[bool, typer.Option("--patch", help="Patch the model with NSA.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, …; auto: CUDA if any.")] = "auto",
    train: Annotated[bool, typer.Option(help="Run the backward as well.")] = True,
    dynamic: Annotated[
        str, typer.Option(help="As in torch.compile: none, true or false.")
    ] = "none",
    max_graphs: Annotated[
        int | None, typer.Option(min=1, help="More graphs in a phase are a finding.")
    ] = None,
    lint: Annotated[str, typer.Option(help="Sources to read: own, all or none.")] = "own",
    measure: Annotated[
        bool, typer.Option(help="Compile with Inductor too: times, memory, kernels.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Report on stdout as JSON.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Known findings; only new ones count.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Save the findings as a baseline, exit with 0.")
    ] = None,
) -> None:
    """Find graph breaks, recompilations and host syncs; measure what compiling costs.

    Exits with 1 on any finding (that the baseline does not list), with 2 on wrong usage. Under
    torchrun ranks share the tokens of each row, and one that attends its own alone is a finding;
    rank 0 tells what all of them found, and all exit alike.

    Example: `nsa-flex audit llama --html audit.html`

    Example: `nsa-flex audit llama --patch --lengths 1,64,100,257 --max-graphs 3 --json`

    Example: `nsa-flex audit my_package.models:small_model --baseline audit-baseline.json`

    Example: `torchrun --nproc-per-node 2 -m nsa_flex.cli audit my_package.models:sharded_model`
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # Else the profiler writes to the terminal.
    from nsa_flex.auditing import targets
    from nsa_flex.auditing import write_baseline as save

    if html is not None:
        _check_page()
    check_file(html, "--html")
    check_file(write_baseline, "--write-baseline")
    _check_target(target, context, patched)
    progress = Console(stderr=True, highlight=False)
    place = check_device(device)
    ranks = _ranks(place)
    options = {
        "dynamic": _choice(dynamic, {"none": None, "true": True, "false": False}, "--dynamic"),
        "lint_scope": _choice(lint, {name: name for name in ("own", "all", "none")}, "--lint"),
        "train": None if train else False,
        "baseline": _known(baseline),
        "measured": measure,
        "mesh": ranks,
    }
    try:
        with json_alone(as_json):
            every = targets.targets_of(
                target,
                lengths=_numbers(lengths, "--lengths"),
                batch_sizes=_numbers(batch_sizes, "--batch-sizes"),
                patched=patched,
                device=place,
                ranks=ranks,
            )
    except (ValueError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error), param_hint="TARGET") from error
    if ":" in target and device != "auto":
        _check_place(every[0], place)
    with json_alone(as_json):
        reports = [_run(each, max_graphs, options, progress) for each in every]
    if ranks is not None:
        reports = _of_all_ranks(reports)
    code = 0 if write_baseline is not None or all(report.ok for report in reports) else 1
    if ranks is None or dist.get_rank() == 0:
        _show(reports, as_json, html)
        if write_baseline is not None:
            save(_joined(reports), write_baseline)
            progress.print(f"wrote {write_baseline}", markup=False)
    raise typer.Exit(code)


def _ranks(device: torch.device) -> dist.ProcessGroup | None:
    """Those of torchrun; None where this process is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(dist.destroy_process_group)
    return dist.group.WORLD


def _of_all_ranks(own: list[AuditReport]) -> list[AuditReport]:
    """Of each target, the same on every rank."""
    from nsa_flex.auditing.ranks import of_all_ranks

    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    return [of_all_ranks(reports) for reports in zip(*everywhere, strict=True)]


def _check_target(target: str, context: typer.Context, patched: bool) -> None:
    """That no option was given which this kind of target has no use for."""
    is_made, is_own = ":" in target, target in ("self", "nsa_attention", "NSAAttention")
    if patched and (is_made or is_own):
        why = "call nsa_flex.patch in the factory" if is_made else "it runs NSA as it is"
        raise typer.BadParameter(f"{target} is not patched here: {why}", param_hint="--patch")
    for name in ("lengths", "batch_sizes"):
        source = context.get_parameter_source(name)
        if is_made and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise typer.BadParameter(f"the inputs of {target} say that", param_hint=option)


def _check_place(target: Any, place: torch.device) -> None:
    """That the inputs of a user's factory are on the device that was asked for."""
    found = {x.device.type for x in tree_leaves(target.inputs) if isinstance(x, torch.Tensor)}
    if found and place.type not in found:
        where = " and ".join(sorted(found))
        raise typer.BadParameter(
            f"the inputs of {target.name} are on {where}", param_hint=f"--device {place}"
        )


def _run(target: Any, max_graphs: int | None, options: Any, progress: Console) -> AuditReport:
    from nsa_flex.auditing import audit as run

    with progress.status(f"{target.name} …") as status:
        return run(
            target.fn,
            target.inputs,
            decode=target.decode,
            max_graphs=max_graphs,
            name=target.name,
            tell=teller(target.name, progress, status),
            **options,
        )


def _show(reports: list[AuditReport], as_json: bool, html: Path | None) -> None:
    if html is not None:
        from nsa_flex.auditing.html import page

        html.write_text(page(*reports))
    if as_json:
        every = [report.to_dict() for report in reports]
        print_json(every[0] if len(every) == 1 else every)
        return
    for report in reports:
        typer.echo(f"{report}\n")
    if html is not None:
        typer.echo(f"wrote {html}")


def _check_page() -> None:
    """Say what the page lacks before the audit, not after it."""
    from nsa_flex.auditing.html import environment

    try:
        environment()
    except ModuleNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--html") from error


def _joined(reports: list[AuditReport]) -> AuditReport:
    from nsa_flex.auditing import AuditReport

    found: list[AuditFinding] = []
    most: Counter[str] = Counter()  # in one report, as each is compared by itself
    for report in reports:
        seen: Counter[str] = Counter()
        for each in (*report.known, *report.findings):
            seen[each.fingerprint] += 1
            if seen[each.fingerprint] > most[each.fingerprint]:
                most[each.fingerprint] += 1
                found.append(each)
    return AuditReport("all", findings=tuple(found))


def _known(file: Path | None) -> Counter[str] | None:
    from nsa_flex.auditing import read_baseline

    if file is None:
        return None
    try:
        return read_baseline(file)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error), param_hint="--baseline") from error


def _choice(text: str, known: dict[str, Any], option: str) -> Any:
    if text not in known:
        raise typer.BadParameter(f"{text!r} is none of {', '.join(known)}", param_hint=option)
    return known[text]


def _numbers(text: str, option: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(
            f"got {text!r}; expected positive numbers, such as 64,100", param_hint=option
        )
    return [int(part) for part in parts]
