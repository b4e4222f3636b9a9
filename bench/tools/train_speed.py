"""`nsa-flex train` against the benchmark's bare training step, with telemetry and without.

    python -m nsa_flex.bench.tools.train_speed --out train_speed.json

trains the shipped config 125m on the sources of Python's standard library, 16 rows of 2048 tokens
a step, and times whole steps once all is compiled. Beside it the step of `model/nsa 125m` in
`bench/cases/models.py` (no trainer, no clipping, no schedule) on random tokens. Both with the
vocabulary of bytes, which the config has, and with the benchmark's 32,000 ids. "silent" runs
write no artefact; those with telemetry measure gates once among the timed steps. Before all of
them a run that is not timed compiles the layers and reads the texts: the first run of a process
would have the disk to wait for, and the others not.

A row says of each window what the host did (`host`, see `HostCosts`), and how far it was ahead of
the device at its end (`ahead_ms`). Near 0 the host is what limits the step; then the columns of
`host` say whether telemetry did, or the machine.
Needs transformers and accelerate.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import dataclasses
import gc
import itertools
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import TrainerCallback

from nsa_flex.bench.cases.models import MODELS, ModelCase, Trainee, best_dense
from nsa_flex.bench.measure import machine
from nsa_flex.bench.report.rows import Notebook, Row
from nsa_flex.bench.tools.host_costs import HostCosts
from nsa_flex.training import run as training_run
from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.models import PRESETS
from nsa_flex.training.telemetry import read_rows, session
from nsa_flex.training.telemetry.callback import TelemetryCallback
from nsa_flex.training.telemetry.observe import observe
from nsa_flex.training.texts import find_texts
from nsa_flex.training.trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """What is trained, and how long.

    Args:
        preset: of `nsa_flex.training.models`, and the name of its sizes in `MODELS`.
        overrides: of the preset's shipped config.
        warm_up: steps before the timed ones; compilation is in the first.
        windows, window: steps are timed in windows of so many; each ends with a wait for the
            device, as the trainer's logging steps do. Gates are measured once in all windows.
        few_windows: of the bare step and of the larger vocabulary, which have no repeats.
        compiler: of the bare step.
    """

    preset: str = "125m"
    overrides: tuple[str, ...] = ("data.files=[stdlib]",)
    warm_up: int = 10
    windows: int = 10
    window: int = 20
    few_windows: int = 4
    compiler: str = "inductor"

    @property
    def steps(self) -> int:
        """All of them."""
        return self.warm_up + self.windows * self.window


# Which run, on which vocabulary; the last two repeat the first ones if there is time, in the other
# order, so that what slows down with time alone does so for both.
ORDER = (
    ("silent", "bytes"),
    ("train", "bytes"),
    ("bare", "bytes"),
    ("train", "32000"),
    ("bare", "32000"),
    ("train", "bytes"),
    ("silent", "bytes"),
)
SIZES = {"bytes": "{}, bytes", "32000": "{}"}  # names in MODELS


class Stamps(TrainerCallback):
    """When each window of steps ended, the device included; what the host did meanwhile."""

    def __init__(self, plan: Plan, device: torch.device, costs: HostCosts) -> None:
        self.plan, self.device, self.costs = plan, device, costs
        self.seconds: list[float] = []
        self.ahead: list[float] = []
        self.host: list[Row] = []
        self.first_step_s = 0.0
        self.peak_bytes: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step_ended(state.global_step)

    def start(self) -> None:
        """The first step begins."""
        self._begun = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def step_ended(self, step: int) -> None:
        """Note the time if a window ends here."""
        if step == 1:
            _wait(self.device)
            self.first_step_s = time.perf_counter() - self._begun
        after = step - self.plan.warm_up
        if after >= 0 and after % self.plan.window == 0:
            ended = time.perf_counter()
            _wait(self.device)
            self.seconds.append(time.perf_counter())
            self.ahead.append(self.seconds[-1] - ended)
            self.host.append(self.costs.since_last())
            if self.device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self.device)

    def columns(self, tokens_per_step: int) -> Row:
        """Tokens a second over all windows, and of each."""
        lengths = [b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False)]
        tokens = tokens_per_step * self.plan.window
        rates = [round(tokens / length) for length in lengths]
        return {
            "tokens_per_s": round(tokens * len(lengths) / sum(lengths)),
            "windows": rates,
            "median": round(statistics.median(rates)),
            "median_ms": round(1e3 * statistics.median(lengths) / self.plan.window, 3),
            "steps": self.plan.window * len(lengths),
            "ahead_ms": [round(1e3 * seconds, 1) for seconds in self.ahead[1:]],
            "host": {name: [row[name] for row in self.host[1:]] for name in self.host[0]},
            "first_step_s": round(self.first_step_s, 2),
            "peak_bytes": self.peak_bytes,
        }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Silent(TelemetryCallback):
    """Telemetry that writes and measures nothing."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Open nothing."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count nothing."""


def train_config(plan: Plan, vocabulary: str, out: Path) -> TrainConfig:
    """The shipped config, without checkpoints and held-out losses."""
    told = (
        f"out={out}",
        f"training.steps={plan.steps}",
        f"run.log_every={plan.window}",
        f"run.gates_every={plan.windows * plan.window}",
        "run.eval_every=0",
        "run.save_every=0",
    )
    config = read_config(plan.preset, (*plan.overrides, *told))
    if vocabulary == "bytes":
        return config
    larger = {"model_type": "llama", **PRESETS[plan.preset], "vocab_size": int(vocabulary)}
    model = dataclasses.replace(config.model, preset=None, config=larger)
    return dataclasses.replace(config, model=model)


def case_of(plan: Plan, vocabulary: str) -> ModelCase:
    """The benchmark's case with the sizes of the config."""
    config = train_config(plan, vocabulary, Path())
    model = SIZES[vocabulary].format(plan.preset)
    assert MODELS[model].config == config.model.nsa, "the two have other sizes of NSA"
    return ModelCase(model, "nsa", config.training.batch_size, config.data.seq_len)


def trained(
    plan: Plan,
    vocabulary: str,
    device: torch.device,
    *,
    silent: bool,
    callbacks: Sequence[TrainerCallback] = (),
) -> Row:
    """Columns of a run of `nsa-flex train`; `probe_ms` of the host in each probe.

    The first is before step 1. The device may compute a step meanwhile.
    """
    probes = list[float]()
    with (
        tempfile.TemporaryDirectory() as folder,
        _unsaved(silent),
        _timed_probes(probes),
        HostCosts() as costs,
        costs.timed("telemetry_ms", TelemetryCallback, "on_step_end", "on_log"),
        costs.timed("batches_ms", Trainer, "get_batch_samples"),
    ):
        stamps = Stamps(plan, device, costs)
        out = Path(folder) / "run"
        config = train_config(plan, vocabulary, out)
        training_run.train(config, callbacks=[stamps, *callbacks])
        rows = [] if silent else read_rows(out, "training")
    tokens = config.training.batch_size * config.data.seq_len
    found = stamps.columns(tokens)
    if probes:
        found["probe_ms"] = [round(1e3 * seconds, 1) for seconds in probes]
    timed = [row for row in rows if row["step"] >= plan.warm_up]
    if len(timed) > 1:
        count = timed[-1]["tokens"] - timed[0]["tokens"]
        found["tokens_per_s_of_rows"] = round(count / (timed[-1]["seconds"] - timed[0]["seconds"]))
        found["loss"] = rows[-1]["loss"]
    return found


@contextmanager
def _unsaved(silent: bool) -> Iterator[None]:
    """Within, runs end without the weights of the model; silent ones without artefacts."""
    telemetry = Silent if silent else TelemetryCallback
    with (
        mock.patch.object(training_run, "save_model"),
        mock.patch.object(training_run, "TelemetryCallback", telemetry),
    ):
        yield


@contextmanager
def _timed_probes(seconds: list[float]) -> Iterator[None]:
    """Within, notes how long the host launches each probe."""

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        seen = observe(*args)
        seconds.append(time.perf_counter() - start)
        return seen

    with mock.patch.object(session, "observe", timed):
        yield


def bare(plan: Plan, vocabulary: str, device: torch.device) -> Row:
    """Columns of the benchmark's step, called as often."""
    case = case_of(plan, vocabulary)
    with best_dense(), HostCosts() as costs:
        stamps = Stamps(plan, device, costs)
        trainee = Trainee(case, device, plan.compiler)
        stamps.start()
        for step in range(1, plan.steps + 1):
            loss = trainee.step()
            stamps.step_ended(step)
    return {**stamps.columns(case.batch * case.seq_len), "loss": loss.item()}


def compare(plan: Plan, device: torch.device, out: Path, limit_s: float) -> list[Row]:
    """Measure all of `ORDER`; repeats that would begin after `limit_s` are left out.

    Each row is on the disk once it is measured.
    """
    notebook = Notebook(out, machine.describe(device), fresh=True)
    _warm_up(plan, device)
    begun = time.perf_counter()
    done: dict[str, list[Row]] = {}
    for kind, vocabulary in ORDER:
        key = f"{kind}/{plan.preset} {vocabulary}"
        if key in done and time.perf_counter() - begun > limit_s:
            continue
        fewer = dataclasses.replace(plan, windows=min(plan.windows, plan.few_windows))
        chosen = fewer if kind == "bare" or vocabulary != "bytes" else plan
        if kind == "bare":
            columns = bare(chosen, vocabulary, device)
        else:
            columns = trained(chosen, vocabulary, device, silent=kind == "silent")
        _forget(device)
        of_case = done.setdefault(key, [])
        fields = {"case": key, "kind": kind, "vocabulary": vocabulary, "status": "ok"}
        of_case.append({**fields, "repeat": len(of_case), **columns})
        notebook.add(of_case)
        print(f"{key}: {columns['tokens_per_s']:,} tokens/s", file=sys.stderr)
    return notebook.rows


def _warm_up(plan: Plan, device: torch.device) -> None:
    """Compile the layers and read the text of the runs, so that the first has neither to do."""
    config = train_config(plan, "bytes", Path())
    rows = find_texts(config).training_rows()
    collections.deque(itertools.islice(rows, plan.steps * config.training.batch_size), maxlen=0)
    trained(dataclasses.replace(plan, windows=1), "bytes", device, silent=True)
    _forget(device)


def ratios(rows: list[Row]) -> dict[str, float]:
    """What telemetry and the trainer leave of the speed; means of repeats.

    >>> ratios([{"kind": "train", "vocabulary": "bytes", "tokens_per_s": 99.0},
    ...         {"kind": "bare", "vocabulary": "bytes", "tokens_per_s": 100.0}])
    {'train/bare, bytes': 0.99}
    """
    speeds: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        speeds.setdefault((row["kind"], row["vocabulary"]), []).append(row["tokens_per_s"])
    mean = {key: statistics.mean(values) for key, values in speeds.items()}
    return {
        f"{kind}/{other}, {vocabulary}": round(mean[kind, vocabulary] / speed, 4)
        for kind, other in (("train", "silent"), ("train", "bare"), ("silent", "bare"))
        for (which, vocabulary), speed in mean.items()
        if which == other and (kind, vocabulary) in mean
    }


class Profile(TrainerCallback):
    """Python's profile of one window of steps and of the probe in it, on stdout at the end."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.profiler = plan, cProfile.Profile()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """On after the warm-up, off a window later."""
        if state.global_step == self.plan.warm_up:
            self.profiler.enable()
        elif state.global_step == self.plan.warm_up + self.plan.window:
            self.profiler.disable()

    def tell(self, rows: int = 30) -> None:
        """What took the host longest, in itself and with what it calls."""
        for order in ("tottime", "cumtime"):
            pstats.Stats(self.profiler).sort_stats(order).print_stats(rows)


def _forget(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("train_speed.json"))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds before repeats")
    parser.add_argument("--profile", action="store_true", help="of the host, in one more run")
    arguments = parser.parse_args()
    rows = compare(Plan(), torch.device("cuda"), arguments.out, arguments.limit)
    for row in rows:
        names = ("case", "repeat", "tokens_per_s", "windows", "median_ms", "ahead_ms", "probe_ms")
        print({name: row[name] for name in names if name in row}, row["host"])
    print(ratios(rows))
    if arguments.profile:
        plan = dataclasses.replace(Plan(), windows=1)
        profile = Profile(plan)
        print(trained(plan, "bytes", torch.device("cuda"), silent=False, callbacks=[profile]))
        profile.tell()


if __name__ == "__main__":
    main()
