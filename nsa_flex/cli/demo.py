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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nsa_flex.cli import demo_model
from nsa_flex.cli.demo_model import (
    Size,
    Trainee,
    as_text,
    build_models,
    frequency_loss,
    keys_read,
    read_text,
    train,
)
from nsa_flex.cli.info import collect, cxx_compiler
from nsa_flex.cli.options import SEEDS, check_device, fail
from nsa_flex.cli.outputs import check_folder, print_json

NEEDED_PACKAGES = {"transformers": "hf", "matplotlib": "bench"}
# The held-out loss of an untrained model falls by this share at least, or something is wrong.
VISIBLE_FALL = 0.1


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=64, help="Bytes of one row.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, losses.png and the model.")
    ] = Path("nsa_flex_demo"),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: CUDA if any.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of weights, batches and samples.", **SEEDS)] = 0,
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
    on_cuda = chosen.type == "cuda"
    size = demo_model.QUICK if quick else demo_model.GPU if on_cuda else demo_model.CPU
    asked: dict[str, Any] = {"steps": steps, "seq_len": seq_len}
    size = dataclasses.replace(size, **{k: v for k, v in asked.items() if v is not None})
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
        fail(
            "demo",
            f"needs {' and '.join(missing)}; install with: pip install 'nsa-flex[cli,{extras}]'",
        )
    if device.type == "cpu" and size.compiler == "inductor" and cxx_compiler() is None:
        fail("demo", "torch.compile needs a C++ compiler: install g++")


@dataclasses.dataclass
class _Demo:
    """The steps of the demo in their order; each prints what it did and notes it in `report`."""

    console: Console
    size: Size
    device: torch.device
    seed: int
    out: Path

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.report: dict[str, Any] = {
            "environment": collect(),
            "device": str(self.device),
            "seed": self.seed,
            "seconds": self.seconds,
        }
        self.out.mkdir(parents=True, exist_ok=True)
        self.read_text()
        self.build()
        self.audit()
        self.compile()
        self.train()
        self.time_steps()
        self.generate()
        self.seconds["total"] = time.perf_counter() - started
        self.finish()
        return self.report

    def read_text(self) -> None:
        self._heading("Text")
        try:
            text = read_text(self.size, self.seed)
        except ValueError as error:  # No sources, or too long a row.
            fail("demo", str(error), error)
        facts = self.report["text"] = text.facts
        self._say(
            f"Python's standard library: {facts['training_files']} files to train on "
            f"({facts['training_bytes'] / 1e6:.1f} MB), {facts['held_out_files']} other files "
            f"held out ({facts['held_out_bytes'] / 1e6:.1f} MB)."
        )
        self.by_frequency = frequency_loss(text.batches.flatten(), text.held_out)
        self.batches, self.held_out = text.batches.to(self.device), text.held_out.to(self.device)

    def build(self) -> None:
        self._heading("Model")
        size = self.size
        models = dict(
            zip(("NSA", "twin"), build_models(size, self.seed, self.device), strict=True)
        )
        self.trainees = [Trainee(name, model, size) for name, model in models.items()]
        patched, twin = (model.num_parameters() for model in models.values())
        read = keys_read(size.config, size.seq_len)
        dtype = str(size.dtype).removeprefix("torch.")
        self.report["sizes"] = {**dataclasses.asdict(size), "dtype": dtype}
        self.report["parameters"] = {"nsa": patched, "twin": twin}
        self.report["keys_read"] = read._asdict()
        self._say(
            f"Llama with {size.num_layers} layer{'s' if size.num_layers > 1 else ''}, "
            f"{size.num_query_heads} query heads on {size.num_kv_heads} key-value heads, "
            f"{twin:,} parameters; nsa_flex.patch adds {patched - twin:,}. Its twin stays "
            f"unpatched. Of {size.seq_len} keys the last query reads {read.compressed} compressed "
            f"+ {read.selected} selected + {read.sliding} sliding: {read.fraction_last:.0%} "
            f"({read.fraction_mean:.0%} over all queries)."
        )

    def audit(self) -> None:
        self._heading("Audit")
        start = time.perf_counter()
        found = self.trainees[0].audit(self.batches[0])
        self.seconds["audit"] = time.perf_counter() - start
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

    def compile(self) -> None:
        self._heading("Compile")
        with self.console.status("torch.compile, fullgraph=True …"):
            for trainee in self.trainees:
                seconds = trainee.compile(self.batches[0])
                self.seconds[f"compile_{trainee.name.lower()}"] = seconds
                self._say(f"{trainee.name:<4} forward and backward in {seconds:.1f} s")

    def train(self) -> None:
        self._heading("Train")
        start = time.perf_counter()
        bar = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
        with Progress(*bar, TimeElapsedColumn(), console=self.console) as progress:
            task = progress.add_task("", total=len(self.batches))

            def tell(trainees: list[Trainee]) -> None:
                done = len(trainees[0].losses)
                if self.device.type == "cpu" or done % 10 == 0:  # Reading a loss waits for it.
                    text = ", ".join(f"{t.name} {t.losses[-1].item():.2f}" for t in trainees)
                    progress.update(task, completed=done, description=f"loss {text}")

            train(self.trainees, self.batches, self.held_out, tell)
        seconds = self.seconds["train"] = time.perf_counter() - start
        self.report["losses"] = {t.name.lower(): _losses(t) for t in self.trainees}
        self.report["losses_of_byte_frequencies"] = self.by_frequency
        self._say(
            f"{len(self.batches)} steps of {self.batches[0].numel()} bytes each, the same for "
            f"both, in {seconds:.1f} s without a recompilation. Held-out loss in nats a byte "
            f"({self.by_frequency:.2f} for one who knows only how frequent each byte is):"
        )
        table = Table("after step", *(trainee.name for trainee in self.trainees))
        for step in self.trainees[0].held_out:
            table.add_row(str(step), *(f"{t.held_out[step]:.3f}" for t in self.trainees))
        self.console.print(table)

    def time_steps(self) -> None:
        self._heading("Compiled against eager")
        times = self.report["step_milliseconds"] = {}
        for trainee in self.trainees:
            compiled = 1e3 * trainee.seconds(self.batches[0])
            with demo_model.eager():
                alone = 1e3 * trainee.seconds(self.batches[0])
            times[trainee.name.lower()] = {"compiled": compiled, "eager": alone}
            self._say(
                f"{trainee.name:<4} forward and backward: {compiled:.0f} ms compiled, "
                f"{alone:.0f} ms eager ({alone / compiled:.1f} times)"
            )
        if self.size.compiler != "inductor":
            self._say("(--quick: compiled, but run operator by operator.)")
        elif self.device.type == "cpu":
            self._say(
                "(On a CPU NSA computes all scores and masks them: it is no faster than the twin.)"
            )

    def generate(self) -> None:
        self._heading("Generate")
        prompt = self.held_out[len(self.held_out) // 2, : self.size.seq_len // 2]
        written, seconds = self.trainees[0].generate(prompt, self.seed)
        self.seconds["generate"] = seconds
        begun, text = as_text(prompt), as_text(written)
        self.report["generated"] = {"prompt": begun, "text": text}
        self._say(
            f"A held-out file, continued by NSA, {len(written) / seconds:.0f} bytes a second:"
        )
        self._say(begun[-160:], style="dim", end="")
        self._say(text, style="bold")
        self.trainees[0].model.save_pretrained(self.out / "model")
        self._say(f"It is saved; for more: nsa-flex generate {self.out / 'model'} 'import '")

    def finish(self) -> None:
        report, picture, file = self.report, self.out / "losses.png", self.out / "report.json"
        report["wrong"] = verdict(report)
        _draw_losses(report["losses"], picture)
        file.write_text(json.dumps(report, indent=2) + "\n")
        self._heading("Done")
        self._say(f"Wrote {picture} and {file} after {self.seconds['total']:.0f} s.")
        for sentence in report["wrong"]:
            self._say(f"Wrong: {sentence}.", style="bold red")

    def _heading(self, title: str) -> None:
        self.console.print()
        self.console.rule(f"[bold]{title}", align="left")

    def _say(self, text: str, style: str | None = None, end: str = "\n") -> None:
        self.console.print(text, style=style, end=end, markup=False)


def _losses(trainee: Trainee) -> dict[str, Any]:
    held_out = list(trainee.held_out.values())
    return {
        "training": torch.stack(trainee.losses).tolist(),
        "held_out": {str(step): loss for step, loss in trainee.held_out.items()},
        "held_out_before": held_out[0],
        "held_out_after": held_out[-1],
    }


def verdict(report: dict[str, Any]) -> list[str]:
    """What is wrong, in sentences; empty if the demo shows what it promises."""
    wrong = []
    for name, losses in report["losses"].items():
        before, after = losses["held_out_before"], losses["held_out_after"]
        if not after <= (1 - VISIBLE_FALL) * before:  # NaN counts as wrong
            wrong.append(
                f"the held-out loss of {name} did not fall visibly ({before:.3f} before, "
                f"{after:.3f} after {report['sizes']['steps']} steps; raise --steps)"
            )
    count = len(report["audit"]["findings"])
    if count:
        wrong.append(f"the audit found {count} thing{'s' if count > 1 else ''} (listed above)")
    return wrong


def _draw_losses(losses: dict[str, dict[str, Any]], path: Path) -> None:
    """PNG of training and held-out loss of each model against the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, each) in zip(("tab:blue", "tab:orange"), losses.items(), strict=True):
        steps = range(1, len(each["training"]) + 1)
        axes.plot(steps, each["training"], color=color, alpha=0.3, linewidth=0.8)
        measured = [int(step) for step in each["held_out"]]
        label = f"{name}, held out"
        axes.plot(measured, each["held_out"].values(), "o-", color=color, label=label)
    axes.set(xlabel="training step", ylabel="loss, nats a byte")
    axes.set_title("Python's standard library, byte by byte (thin: training loss)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
