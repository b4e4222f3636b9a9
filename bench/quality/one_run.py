"""One training and its evaluation, in a process of its own; `run` starts it.

Goes on with what the folder holds. Stopped by SIGTERM, it saves a checkpoint and says how far it
came. Its row is in row.json: after each held-out loss on the way, and at the end.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback

from nsa_flex.bench.cases.models import best_dense
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure import machine
from nsa_flex.bench.quality.build import digest
from nsa_flex.bench.quality.cutting import cut
from nsa_flex.bench.quality.evaluation import summary, token_losses
from nsa_flex.bench.quality.variants import Variant, config_of, variants
from nsa_flex.bench.quality.windows import windows_by_chunks
from nsa_flex.bench.report.rows import Row
from nsa_flex.config import BRANCHES
from nsa_flex.training.arguments import tokens_per_step
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.flops import num_parameters
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.texts import find_texts

ROW = "row.json"
HELD_OUT_TOKENS = 1 << 22
POINTS = 8  # of a curve
FEW_TOKENS = 1 << 19  # of a loss on the way


class Evaluation(TrainerCallback):
    """Losses on the way and at the end, and the seconds of training without them.

    Args:
        started: columns of the row that are known before.
        held_out: int64 (rows, S).
    """

    def __init__(self, folder: Path, config: TrainConfig, started: Row, held_out: Tensor) -> None:
        self.folder, self.config = folder, config
        self.row: Row = {**started, "curve": [], "seconds": 0.0, "first_step_s": 0.0}
        self.held_out = held_out
        self.every = -(-config.training.steps // POINTS)
        self.few = max(1, FEW_TOKENS // held_out.shape[1])
        self.begins = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is there; what an earlier piece measured up to this step counts."""
        self.model, self.device = kwargs["model"], args.device
        self.begins = state.global_step
        if self.begins:
            before = json.loads((self.folder / ROW).read_text())
            self.row |= {name: before[name] for name in ("seconds", "first_step_s")}
            reached = self.begins * self.row["tokens_per_step"]
            self.row["curve"] = [point for point in before["curve"] if point[0] <= reached]
        self.row["parameters"] = num_parameters(self.model)
        self.since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A first step compiles, and is counted apart."""
        step = state.global_step
        if step == self.begins + 1:
            self._clock("first_step_s")
        if step % self.every == 0 and step < state.max_steps:
            self._clock("seconds")
            self._add_point(step, self._losses(self.held_out[: self.few]))
            self._write(step, "running")
            self.since = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Finished, or stopped: the losses on all rows."""
        self._clock("seconds")
        self._write(state.global_step, "running")  # a process killed in the evaluation goes on
        losses = self._losses(self.held_out)
        self._add_point(state.global_step, losses[: self.few])
        self.row |= summary(losses.numpy(), self.held_out.numpy().astype(np.uint8))
        done = state.global_step >= state.max_steps
        self._write(state.global_step, "ok" if done else "stopped")

    def _add_point(self, step: int, losses: Tensor) -> None:
        """Tokens, seconds and loss, once a step; the last column of `losses` is none."""
        tokens = step * self.row["tokens_per_step"]
        loss = round(float(losses[:, :-1].mean()), 4)
        curve = [point for point in self.row["curve"] if point[0] < tokens]
        self.row["curve"] = [*curve, [tokens, self.row["seconds"], loss]]

    def _losses(self, rows: Tensor) -> Tensor:
        return token_losses(self.model, rows, self.config.training.batch_size, self.device)

    def _clock(self, column: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.row[column] = round(self.row[column] + now - self.since, 2)
        self.since = now

    def _write(self, step: int, status: str) -> None:
        """The row as it is; at once or not at all."""
        losses = [row for row in read_rows(self.folder, "training") if row["loss"] is not None]
        self.row |= {
            "status": status,
            "steps": step,
            "tokens": step * self.row["tokens_per_step"],
            "training_losses": [[row["step"], round(row["loss"], 3)] for row in losses[::4]],
            "shares": _shares(read_rows(self.folder, "gates")),
        }
        write_row(self.folder, self.row)


def write_row(folder: Path, row: Row) -> None:
    """What `ROW` in the folder of a run holds from now on."""
    draft = folder / f"{ROW}.new"
    draft.write_text(json.dumps(row) + "\n")
    draft.replace(folder / ROW)


def _shares(gates: list[dict[str, Any]]) -> dict[str, float]:
    """Of each branch in the gates' weight at the last measurement, mean of the layers."""
    if not gates:
        return {}
    last = [row for row in gates if row["step"] == gates[-1]["step"]]
    return {
        name: round(float(np.mean([row[f"share_{name}"] for row in last])), 4) for name in BRANCHES
    }


def one_run(
    name: str, size: str, seed: int, corpus: Path, folder: Path, overrides: tuple[str, ...] = ()
) -> Row:
    """Train and evaluate; returns the row.

    Args:
        folder: of the run; rows of the length of the run are cut beside it.
    """
    variant = variants()[name]
    config = config_of(name, size, overrides)
    length = config.data.seq_len
    paths = cut(corpus, length, folder.parent / "cut", HELD_OUT_TOKENS // length)
    own = (
        f"out={folder}",
        f"seed={seed}",
        f"data.files=[{paths['train']}]",
        f"data.held_out_files=[{paths['held_out']}]",
    )
    config = config_of(name, size, (*overrides, *own))
    held_out = held_out_rows(config, HELD_OUT_TOKENS)
    started = {
        "case": f"quality/{size} {name} {length} seed {seed}",
        "target": "quality",
        "size": size,
        "variant": name,
        "seq_len": length,
        "seed": seed,
        "planned_steps": config.training.steps,
        "tokens_per_step": tokens_per_step(config),
        "corpus": digest(corpus),
        "settings": settings_of(config),
        **machine.describe(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
    }
    evaluation = Evaluation(folder, config, started, held_out)
    with _kernels(variant):
        train(config, resume=True, callbacks=[evaluation])
    return json.loads((folder / ROW).read_text())


def held_out_rows(config: TrainConfig, tokens: int) -> Tensor:
    """int64 (rows, S): whole held-out rows of at most so many tokens."""
    length = config.data.seq_len
    rows = find_texts(config).held_out_rows(tokens // length)
    return torch.stack([torch.from_numpy(row.ids) for row in rows if row.real == length])


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """What tells runs apart, without paths, as a row has it."""
    told = json.loads(json.dumps(config.to_dict()))
    names = ("attention", "config", "nsa", "dense_layers")
    return {
        "model": {name: told["model"][name] for name in names},
        "training": told["training"],
    }


@contextlib.contextmanager
def _kernels(variant: Variant) -> Iterator[None]:
    """Dense attention on cuDNN, which takes no mask; windows by chunks."""
    with contextlib.ExitStack() as stack:
        if "window" in variant.layers:
            stack.enter_context(windows_by_chunks())
        elif variant.attention == "dense" or "dense" in variant.layers:
            stack.enter_context(best_dense())
        yield


def main() -> None:
    """Train, evaluate."""
    parser = parser_of(__doc__)
    parser.add_argument("variant")
    parser.add_argument("--size", default="30m")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], help="as of nsa-flex train")
    given = parser.parse_args()
    row = one_run(given.variant, given.size, given.seed, given.corpus, given.out, tuple(given.set))
    print({name: row.get(name) for name in ("case", "status", "tokens", "seconds", "loss")})


if __name__ == "__main__":
    main()
