"""NSA against dense attention by what is learned: two runs of `nsa-flex train` on the same text.

    python -m nsa_flex.bench.tools.quality --corpus corpus --out quality

trains the 125m preset and its dense twin at 16k tokens (bytes) of context, from the same weights
on the same rows, each on a GPU of its own where there are two, and measures the held-out loss by
position on the way. The learning rate stays at its peak, so that any two points of the two curves
compare: at equal tokens and at equal seconds. Dense attention runs on cuDNN where it takes the
inputs. Writes quality.json and quality.png, and the blocks that the trained NSA model chooses on a
held-out row. What is measured is written at once: after a run that ended early, `--draw` compares
what is there. `bench/tools/text_corpus.py` makes a corpus of folders of sources and prose. Needs
transformers and accelerate, and for the sizes above CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import TrainerCallback

from nsa_flex.bench.cases.models import best_dense
from nsa_flex.bench.cases.patterns import neighbour_overlap
from nsa_flex.bench.measure import machine
from nsa_flex.bench.report.quality import draw, summarize
from nsa_flex.bench.tools.record_choices import KEPT_HEADS, choices
from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.flops import num_parameters
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.texts import find_texts

KINDS = ("nsa", "dense")
RESULT, CHOICES = "result.json", "choices.npz"
OVERRIDES = (
    "data.seq_len=16384",
    "training.batch_size=4",
    "training.warmup_steps=100",
    "training.schedule=constant",
    "run.log_every=10",
    "run.gates_every=100",
    "run.eval_every=0",
    "run.save_every=0",
)


@dataclass(frozen=True)
class Plan:
    """How long, and what is measured.

    Args:
        steps: at most.
        seconds: of training, at most; those of the first step, which compiles, and of the
            measurements do not count.
        eval_every: steps between held-out losses.
        rows: that these are measured on.
        buckets: of positions, of equal width.
        overrides: of the shipped config 125m.
    """

    steps: int = 1100
    seconds: float = 200.0
    eval_every: int = 100
    rows: int = 32
    buckets: int = 64
    overrides: tuple[str, ...] = OVERRIDES


def config_of(kind: str, corpus: Path, out: Path, plan: Plan) -> TrainConfig:
    """The run of one of `KINDS`."""
    told = (
        f"data.files=[{corpus / 'train.jsonl.xz'}]",
        f"data.held_out_files=[{corpus / 'held_out.jsonl.xz'}]",
        f"training.steps={plan.steps}",
        f"model.attention={kind}",
        f"out={out}",
    )
    return read_config("125m", (*plan.overrides, *told))


class Evaluation(TrainerCallback):
    """Held-out losses by position on the way, seconds without them, and an end in time.

    Args:
        held_out: int64 (rows, S).
        batch_size: rows of a forward.
        tokens_per_step: of an optimizer step.
        write: called after each measurement.
    """

    def __init__(
        self,
        plan: Plan,
        held_out: Tensor,
        batch_size: int,
        tokens_per_step: int,
        write: Callable[[Evaluation], object],
    ) -> None:
        self.plan, self.held_out, self.batch_size = plan, held_out, batch_size
        self.tokens_per_step, self.write = tokens_per_step, write
        self.found: list[dict[str, Any]] = []
        self.seconds = 0.0
        self.first_step_s = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is there."""
        self.model, self.device, self.since = kwargs["model"], args.device, time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if it is time; stop if time is over."""
        step = state.global_step
        if step == 1:
            self._clock()
            self.first_step_s, self.seconds = self.seconds, 0.0
        evaluates = step % self.plan.eval_every == 0 or step == state.max_steps
        if not (evaluates or step % args.logging_steps == 0):
            return
        self._clock()
        over = self.seconds > self.plan.seconds
        if evaluates or over:
            self._evaluate(step)
        control.should_training_stop = control.should_training_stop or over
        self.since = time.perf_counter()

    def run(self, ids: Tensor) -> Tensor:
        """Logits (B, S, V) of int64 (B, S), eagerly, in the precision of the training."""
        cuda = self.device.type == "cuda"
        with (
            torch.compiler.set_stance("force_eager"),
            torch.autocast(self.device.type, torch.bfloat16, enabled=cuda),
        ):
            return self.model(input_ids=ids.to(self.device), use_cache=False).logits

    def _clock(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds += now - self.since
        self.since = now

    @torch.no_grad()
    def _evaluate(self, step: int) -> None:
        self.model.eval()
        losses = [self._losses(ids) for ids in self.held_out.split(self.batch_size)]
        self.model.train()
        by_place = torch.cat(losses).mean(0)  # [S - 1]
        buckets = torch.tensor_split(by_place, self.plan.buckets)
        self.found.append(
            {
                "step": step,
                "tokens": step * self.tokens_per_step,
                "seconds": round(self.seconds, 2),
                "loss": round(by_place.mean().item(), 5),
                "by_position": [
                    round(x, 4) for x in torch.stack([b.mean() for b in buckets]).tolist()
                ],
            }
        )
        print(f"step {step}: {self.seconds:.0f} s, held-out {self.found[-1]['loss']}", flush=True)
        self.write(self)

    def _losses(self, ids: Tensor) -> Tensor:
        """Float32 (B, S - 1): nats of each token but the first, given those before it."""
        logits = self.run(ids)[:, :-1].float()
        return F.cross_entropy(
            logits.transpose(1, 2), ids[:, 1:].to(logits.device), reduction="none"
        )


def run_one(kind: str, corpus: Path, out: Path, plan: Plan) -> dict[str, Any]:
    """Train one model in `out`; what is found is written there too."""
    config = config_of(kind, corpus, out, plan)
    held_out = torch.stack(
        [torch.from_numpy(row.ids) for row in find_texts(config).held_out_rows(plan.rows)]
    )
    batch_size = config.training.batch_size

    def write(evaluation: Evaluation, **more: Any) -> dict[str, Any]:
        found = result_of(kind, config, out, evaluation) | more
        aside = out / f"{RESULT}.new"
        aside.write_text(json.dumps(found) + "\n")
        aside.replace(out / RESULT)
        return found

    evaluation = Evaluation(plan, held_out, batch_size, batch_size * config.data.seq_len, write)
    with best_dense():
        train(config, callbacks=[evaluation])
        chosen = {} if kind == "dense" else record(evaluation, out / CHOICES)
    return write(evaluation, **chosen)


def result_of(kind: str, config: TrainConfig, out: Path, evaluation: Evaluation) -> dict[str, Any]:
    """What a run found so far."""
    rows = [row for row in read_rows(out, "training") if row["loss"] is not None]
    return {
        "attention": kind,
        "parameters": num_parameters(evaluation.model),
        "evaluations": evaluation.found,
        "losses": [[row["step"], round(row["loss"], 4)] for row in rows],
        "gates": [rounded(row) for row in read_rows(out, "gates")],
        "first_step_s": round(evaluation.first_step_s, 1),
        "config": config.to_dict(),
        **machine.describe(evaluation.device),
    }


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    """Four digits of each number are enough to draw.

    >>> rounded({"step": 3, "share_sliding": 0.123456})
    {'step': 3, 'share_sliding': 0.1235}
    """
    return {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in row.items()}


def record(evaluation: Evaluation, path: Path) -> dict[str, Any]:
    """What the trained model chooses on the first held-out row; a middle layer's is kept."""
    model, row = evaluation.model, evaluation.held_out[:1]
    tables = choices(model, lambda: evaluation.run(row))
    middle = len(tables) // 2
    kept = tables[middle][0, :KEPT_HEADS].to(torch.int16).cpu().numpy()
    size = model.model.layers[0].self_attn.nsa.config.select_block_size
    np.savez_compressed(path, blocks=kept, block_size=size)
    return {
        "choices_layer": middle,
        "overlap_by_layer": [round(neighbour_overlap(table), 4) for table in tables],
    }


def run_all(corpus: Path, out: Path, plan: Plan, start: Callable[..., Any]) -> dict[str, Any]:
    """Both models, at the same time where each has a GPU; their results as one.

    Args:
        start: (kind, number of a GPU or None) to something with `wait`, which returns 0 on
            success.
    """
    if torch.cuda.device_count() >= len(KINDS):
        jobs = [start(kind, number) for number, kind in enumerate(KINDS)]
        codes = [job.wait() for job in jobs]
    else:
        codes = [start(kind, None).wait() for kind in KINDS]
    if any(codes):
        raise RuntimeError(f"the runs of {KINDS} ended with {codes}: see the logs in {out}")
    return compare(out)


def compare(out: Path) -> dict[str, Any]:
    """What both runs in `out` have measured, as one; writes the file and the plot."""
    found = summarize([json.loads((out / kind / RESULT).read_text()) for kind in KINDS])
    (out / "quality.json").write_text(json.dumps(found) + "\n")
    draw(found, out / "quality.png")
    return found


def main() -> None:
    """Train, compare, draw; with --attention one model alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("quality"))
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--seconds", type=float, default=Plan.seconds)
    parser.add_argument("--set", action="append", default=[], help="as of nsa-flex train")
    parser.add_argument("--attention", choices=KINDS, help="one run, without a comparison")
    parser.add_argument("--draw", action="store_true", help="compare two runs that are there")
    given = parser.parse_args()
    plan = Plan(given.steps, given.seconds, overrides=(*OVERRIDES, *given.set))
    if given.attention is not None:
        run_one(given.attention, given.corpus, given.out / given.attention, plan)
        return
    given.out.mkdir(parents=True, exist_ok=True)

    def start(kind: str, gpu: int | None) -> subprocess.Popen:
        command = [sys.executable, "-m", "nsa_flex.bench.tools.quality", "--attention", kind]
        command += [f"--{name}={getattr(given, name)}" for name in ("corpus", "out", "steps")]
        command += [f"--seconds={given.seconds}", *(f"--set={each}" for each in given.set)]
        environment = dict(os.environ)
        if gpu is not None:
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            environment["CUDA_VISIBLE_DEVICES"] = (
                visible[gpu] if gpu < len(visible) > 1 else str(gpu)
            )
        with (given.out / f"{kind}.log").open("w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    found = compare(given.out) if given.draw else run_all(given.corpus, given.out, plan, start)
    for name in ("equal_tokens", "equal_seconds"):
        print(name, found[name])


if __name__ == "__main__":
    main()
