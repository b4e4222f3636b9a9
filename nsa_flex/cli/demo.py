"""`nsa-flex demo`: patch, compile, train, audit and sample a small Llama on real text."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from nsa_flex.cli.demo_model import (
    Size,
    build_models,
    choose_size,
    keys_read,
    num_parameters,
)
from nsa_flex.cli.demo_report import draw_losses, verdict
from nsa_flex.cli.demo_text import (
    Corpus,
    as_text,
    even_windows,
    frequency_loss,
    random_windows,
    read_corpus,
)
from nsa_flex.cli.demo_training import Trainee, train
from nsa_flex.cli.device import check_device
from nsa_flex.cli.generate_model import be_quiet
from nsa_flex.cli.info import collect, cxx_compiler
from nsa_flex.cli.outputs import SEEDS, check_folder, print_json

NEEDED_PACKAGES = {"transformers": "hf", "matplotlib": "bench"}
TIMED_REPEATS = 5


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=64, help="Bytes of one row.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, losses.png and the model.")
    ] = Path("nsa_flex_demo"),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: CUDA if any.")] = "auto",
    seed: Annotated[
        int, typer.Option(help="Of the split, weights, batches and samples.", **SEEDS)
    ] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny, no code generation.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Report on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Train a small Llama with NSA, and its unpatched twin, on Python's standard library.

    In three to five minutes on two CPU cores; larger on a GPU. Exits with 1 if the held-out loss
    did not fall or the audit found something, with 2 if something that it needs is missing.

    Example: `nsa-flex demo`

    Example: `nsa-flex demo --steps 1000 --json > report.json`
    """
    chosen = check_device(device, "the demo runs")
    size = choose_size(chosen, quick=quick, steps=steps, seq_len=seq_len)
    _check_installed(chosen, size)
    check_folder(out, "--out")
    report = _Demo(Console(stderr=as_json, highlight=False), size, chosen, seed, out).run()
    if as_json:
        print_json(report)
    raise typer.Exit(1 if report["wrong"] else 0)


def _check_installed(device: torch.device, size: Size) -> None:
    """Said before the work, not after it."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(NEEDED_PACKAGES[name] for name in missing)
        typer.echo(
            f"nsa-flex demo: needs {' and '.join(missing)}; install with: "
            f"pip install 'nsa-flex[cli,{extras}]'",
            err=True,
        )
        raise typer.Exit(2)
    if device.type == "cpu" and size.compiler == "inductor" and cxx_compiler() is None:
        typer.echo("nsa-flex demo: torch.compile needs a C++ compiler: install g++", err=True)
        raise typer.Exit(2)


class _Demo:
    """The steps of the demo in their order; each prints what it did and notes it in `report`."""

    def __init__(
        self, console: Console, size: Size, device: torch.device, seed: int, out: Path
    ) -> None:
        self.console = console
        self.size = size
        self.device = device
        self.seed = seed
        self.out = out
        self.report: dict[str, Any] = {}
        self.started = time.perf_counter()

    def run(self) -> dict[str, Any]:
        self.report["environment"] = collect()
        self.report["device"] = str(self.device)
        self.report["seed"] = self.seed
        self.report["seconds"] = {}
        self.out.mkdir(parents=True, exist_ok=True)
        corpus, batches, held_out = self.read_text()
        trainees = self.build()
        self.audit(trainees[0], batches[0])
        self.compile(trainees, batches[0])
        self.train(trainees, batches, held_out, corpus)
        self.time_steps(trainees, batches[0])
        self.generate(trainees[0], held_out)
        self.finish()
        return self.report

    def read_text(self) -> tuple[Corpus, Tensor, Tensor]:
        self._heading("Text")
        size = self.size
        generator = torch.Generator().manual_seed(self.seed)
        count = size.steps * size.batch_size
        try:
            corpus = read_corpus(self.seed)
            batches = random_windows(corpus.training, count, size.seq_len, generator)
            held_out = even_windows(corpus.held_out, size.held_out_rows, size.seq_len)
        except (FileNotFoundError, ValueError) as error:  # No sources, or too long a row.
            typer.echo(f"nsa-flex demo: {error}", err=True)
            raise typer.Exit(2) from error
        self.report["text"] = {
            "training_files": len(corpus.training_files),
            "training_bytes": len(corpus.training),
            "held_out_files": len(corpus.held_out_files),
            "held_out_bytes": len(corpus.held_out),
            "held_out_bytes_measured": held_out.numel(),
        }
        self._say(
            f"Python's standard library: {len(corpus.training_files)} files to train on "
            f"({len(corpus.training) / 1e6:.1f} MB), {len(corpus.held_out_files)} other files "
            f"held out ({len(corpus.held_out) / 1e6:.1f} MB)."
        )
        batches = batches.unflatten(0, (size.steps, size.batch_size))
        return corpus, batches.to(self.device), held_out.to(self.device)

    def build(self) -> list[Trainee]:
        self._heading("Model")
        size, config = self.size, self.size.config
        patched, twin = build_models(size, self.seed, self.device)
        read = keys_read(config, size.seq_len)
        self.report["sizes"] = _plain(size)
        self.report["parameters"] = {"nsa": num_parameters(patched), "twin": num_parameters(twin)}
        self.report["keys_read"] = dataclasses.asdict(read)
        added = num_parameters(patched) - num_parameters(twin)
        self._say(
            f"Llama with {size.num_layers} layer{'s' if size.num_layers > 1 else ''}, "
            f"{size.num_query_heads} query heads on {size.num_kv_heads} key-value heads, "
            f"{num_parameters(twin):,} parameters; nsa_flex.patch adds {added:,}. "
            "Its twin stays unpatched."
        )
        self._say(
            f"Of {size.seq_len} keys the last query reads {read.compressed} compressed + "
            f"{read.selected} selected + {read.sliding} sliding: {read.fraction_last:.0%} "
            f"({read.fraction_mean:.0%} over all queries)."
        )
        return [Trainee("NSA", patched, size), Trainee("twin", twin, size)]

    def audit(self, trainee: Trainee, tokens: Tensor) -> None:
        self._heading("Audit")
        start = time.perf_counter()
        found = trainee.audit(tokens)
        self.report["seconds"]["audit"] = time.perf_counter() - start
        self.report["audit"] = {
            "findings": [dataclasses.asdict(finding) for finding in found.findings],
            "graphs": found.graphs,
        }
        if found.ok:
            self._say(
                "Forward and backward: no host sync, no value read, no graph break. "
                f"{found.graphs} graphs serve four lengths of text: one for the first, one for "
                "any other."
            )
        for finding in found.findings:
            self._say(str(finding), style="red")

    def compile(self, trainees: list[Trainee], tokens: Tensor) -> None:
        self._heading("Compile")
        with self.console.status("torch.compile, fullgraph=True …"):
            for trainee in trainees:
                seconds = trainee.compile(tokens)
                self.report["seconds"][f"compile_{trainee.name.lower()}"] = seconds
                self._say(f"{trainee.name:<4} forward and backward in {seconds:.1f} s")

    def train(
        self, trainees: list[Trainee], batches: Tensor, held_out: Tensor, corpus: Corpus
    ) -> None:
        self._heading("Train")
        start = time.perf_counter()
        with _progress(self.console) as progress:
            task = progress.add_task("", total=len(batches))

            def tell(trainees: list[Trainee]) -> None:
                done = len(trainees[0].losses)
                if self.device.type == "cpu" or done % 10 == 0:  # Reading a loss waits for it.
                    text = ", ".join(f"{t.name} {t.losses[-1].item():.2f}" for t in trainees)
                    progress.update(task, completed=done, description=f"loss {text}")

            train(trainees, batches, held_out, tell)
        seconds = time.perf_counter() - start
        self.report["seconds"]["train"] = seconds
        self.report["losses"] = {t.name.lower(): _losses(t) for t in trainees}
        by_frequency = frequency_loss(corpus.training, held_out.cpu())
        self.report["losses_of_byte_frequencies"] = by_frequency
        self._say(
            f"{len(batches)} steps of {batches[0].numel()} bytes each, the same for both, in "
            f"{seconds:.1f} s without a recompilation. Held-out loss in nats a byte "
            f"({by_frequency:.2f} for one who knows only how frequent each byte is):"
        )
        self.console.print(_held_out_table(trainees))

    def time_steps(self, trainees: list[Trainee], tokens: Tensor) -> None:
        self._heading("Compiled against eager")
        times = self.report["step_milliseconds"] = {}
        for trainee in trainees:
            with trainee.compiled_layers():
                compiled = 1e3 * trainee.seconds(tokens, TIMED_REPEATS)
            eager = 1e3 * trainee.seconds(tokens, TIMED_REPEATS)
            times[trainee.name.lower()] = {"compiled": compiled, "eager": eager}
            self._say(
                f"{trainee.name:<4} forward and backward: {compiled:.0f} ms compiled, "
                f"{eager:.0f} ms eager ({eager / compiled:.1f} times)"
            )
        if self.size.compiler != "inductor":
            self._say("(--quick: compiled, but run operator by operator.)")
        elif self.device.type == "cpu":
            self._say(
                "(On a CPU NSA computes all scores and masks them: it is no faster than the twin.)"
            )

    def generate(self, trainee: Trainee, held_out: Tensor) -> None:
        self._heading("Generate")
        prompt = held_out[len(held_out) // 2, : self.size.seq_len // 2]
        written, seconds = trainee.generate(prompt, self.seed)
        self.report["seconds"]["generate"] = seconds
        self.report["generated"] = {"prompt": as_text(prompt), "text": as_text(written)}
        shown = Text(as_text(prompt)[-160:], style="dim")
        shown.append(as_text(written), style="bold not dim")
        title = f"a held-out file, continued by NSA: {len(written) / seconds:.0f} bytes a second"
        self.console.print(Panel(shown, title=title, title_align="left"))
        be_quiet()
        trainee.model.save_pretrained(self.out / "model")
        self._say(f"It is saved; for more: nsa-flex generate {self.out / 'model'} 'import '")

    def finish(self) -> None:
        report = self.report
        report["seconds"]["total"] = time.perf_counter() - self.started
        report["wrong"] = verdict(report)
        picture, file = self.out / "losses.png", self.out / "report.json"
        draw_losses(report["losses"], picture)
        file.write_text(json.dumps(report, indent=2) + "\n")
        self._heading("Done")
        self._say(f"Wrote {picture} and {file} after {report['seconds']['total']:.0f} s.")
        for sentence in report["wrong"]:
            self._say(f"Wrong: {sentence}.", style="bold red")

    def _heading(self, title: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{title}", align="left")

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
    )


def _losses(trainee: Trainee) -> dict[str, Any]:
    held_out = list(trainee.held_out.values())
    return {
        "training": torch.stack(trainee.losses).tolist(),
        "held_out": {str(step): loss for step, loss in trainee.held_out.items()},
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
    }


def _held_out_table(trainees: list[Trainee]) -> Table:
    table = Table("after step", *(trainee.name for trainee in trainees))
    for step in trainees[0].held_out:
        table.add_row(str(step), *(f"{trainee.held_out[step]:.3f}" for trainee in trainees))
    return table


def _plain(size: Size) -> dict[str, Any]:
    """Plain JSON types."""
    return {**dataclasses.asdict(size), "dtype": str(size.dtype).removeprefix("torch.")}
