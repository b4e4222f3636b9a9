"""`nsa_flex.telemetry`: the artefacts of one run, for any training loop."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from nsa_flex.installed import version_of
from nsa_flex.sharded import is_sharded
from nsa_flex.training.errors import TrainingError
from nsa_flex.training.telemetry.observe import (
    STATISTICS,
    Probe,
    backends_of,
    check_strict,
    counted,
    nsa_layers,
    observe,
    probe_call,
    statistics,
)
from nsa_flex.training.telemetry.rows import Heartbeat, RowFile, read_rows
from nsa_flex.version import __version__

LOG_2 = math.log(2)


@dataclass(frozen=True)
class Measured:
    """What the probe found, its numbers still on the device.

    counters: rows of fallback_counters.csv, but for session and step.
    backends: branch to backend.
    layers: their names.
    numbers: float32 (layers, len(STATISTICS)).
    """

    step: int
    counters: list[dict[str, Any]]
    backends: dict[str, str]
    layers: list[str]
    numbers: Tensor


class Telemetry:
    """Writes training.csv, gates.csv, fallback_counters.csv, heartbeat.jsonl and sessions.csv.

    Losses stay on the device until a logging step; gates and blocks are measured on the probe, in
    an extra forward outside the training step, at the first logging step from each multiple of
    `gates_every` on. No graph breaks and nothing is read in between. In a distributed job every
    rank opens one; rank 0 writes. It is a context manager; call its `step(loss, tokens=…)` after
    each optimizer step.

    Args:
        model: patched, or with `NSAAttention` layers.
        folder: of the run; made if need be. Rows are appended to those of earlier sessions.
        probe: what gates and blocks are measured on: keyword arguments of the model, its one
            tensor, or a function that calls it (under autocast, for instance; on tensors that are
            on the device, since a copy from the host waits for it). Best some held-out text of
            the training's length, the same throughout. None leaves gates.csv and
            fallback_counters.csv empty.
        every: steps between rows.
        gates_every: steps between measurements on the probe.
        heartbeat_seconds: between lines of heartbeat.jsonl.
        strict: raise where a branch would run on another backend than the table's first.
        first_step: steps done before.
        mesh: axis to ranks, for heartbeat.jsonl; by default those that the layers were told of:
            context, heads (`sequence_parallel`) and tensor.
        sent_bytes: that a rank sends in a step for attention, likewise.
        tokens_per_byte: of the held-out text as UTF-8, for bits per byte.

    Raises:
        ValueError: a count is not positive; `strict` without a probe; a probe with padding; or, on
            entry, `strict` and a branch that would fall back.

    >>> model = nn.Linear(2, 2)
    >>> with telemetry(model, "a-run", every=1) as run:  # doctest: +SKIP
    ...     run.step(model(torch.ones(2)).sum(), tokens=2)
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        *,
        probe: Probe | None = None,
        every: int = 10,
        gates_every: int = 100,
        heartbeat_seconds: float = 10.0,
        strict: bool = False,
        first_step: int = 0,
        mesh: dict[str, int] | None = None,
        sent_bytes: int | None = None,
        tokens_per_byte: float | None = None,
    ) -> None:
        counts = {
            "every": every,
            "gates_every": gates_every,
            "heartbeat_seconds": heartbeat_seconds,
            "tokens_per_byte": 1.0 if tokens_per_byte is None else tokens_per_byte,
        }
        for name, value in counts.items():
            if not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")
        for name, count in (("first_step", first_step), ("sent_bytes", sent_bytes)):
            if count is not None and count < 0:
                raise ValueError(f"{name}={count} must be at least 0")
        if strict and probe is None:
            raise ValueError("strict=True needs a probe: pass a batch to ask the layers with")
        self.model, self.folder = model, Path(folder)
        self.every, self.gates_every, self.strict = every, gates_every, strict
        self.step_count, self.tokens = first_step, 0
        self.tokens_per_byte = tokens_per_byte
        self._probe: Callable[[], Any] | None = None
        if probe is not None:
            self._probe = probe_call(model, probe)
        self._heartbeat_seconds = heartbeat_seconds
        self._mesh, self._sent_bytes = mesh or mesh_of(model), sent_bytes
        self._losses: list[Tensor] = []
        self._calls = 0
        self._measured_at: int | None = None
        self._measured: Measured | None = None
        self._rate_from = (0.0, 0)
        self._writes = _rank() == 0
        self.heartbeat: Heartbeat | None = None

    def __enter__(self) -> Telemetry:
        self._started = time.perf_counter()
        self._rate_from = (self._started, self.tokens)
        self.measure()  # before a file is touched: strict may refuse
        if self._writes:
            self._open()
        self._write_measured()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.heartbeat is None:
            return
        if kind is None:
            self._write_measured()
        self.heartbeat.stop("done" if kind is None else "failed")
        for file in self._files.values():
            file.close()
        self.heartbeat = None

    def step(
        self,
        loss: Tensor,
        *,
        tokens: int | None = None,
        learning_rate: float | None = None,
        grad_norm: Tensor | float | None = None,
        calls: int = 1,
    ) -> None:
        """Tell that an optimizer step ended; every `every` steps a row is written.

        Args:
            loss: (), of this step, on the device; it is read at the next logging step.
            tokens: that this step trained on, on all ranks.
            learning_rate: of this step.
            grad_norm: of this step; a tensor is read at logging steps alone.
            calls: forward calls of the model (micro-batches).

        Raises:
            TrainingError: a loss since the last row is not finite.
        """
        if loss.numel() != 1:
            raise ValueError(f"loss has shape {tuple(loss.shape)}; expected one number, a mean")
        if tokens is not None and tokens < 0:
            raise ValueError(f"tokens={tokens} must be at least 0")
        self._losses.append(loss.detach().reshape(()))
        self.step_ended(self.step_count + 1, tokens=tokens, calls=calls)
        if self.step_count % self.every == 0:
            self.measure()
            read = torch.stack(self._losses).float().mean()
            self._losses.clear()
            norm = grad_norm.item() if isinstance(grad_norm, Tensor) else grad_norm
            self.record(loss=read.item(), learning_rate=learning_rate, grad_norm=norm)

    def step_ended(self, step: int, *, tokens: int | None = None, calls: int = 1) -> None:
        """Count a step, without a row: for trainers that average losses themselves.

        Where a row follows they call `measure`, read the loss, and give it to `record`.
        """
        self.step_count = step
        self.tokens += tokens or 0
        self._calls += calls
        if self.heartbeat is not None:
            self.heartbeat.stepped(step)

    def record(
        self,
        *,
        loss: float | None,
        learning_rate: float | None = None,
        grad_norm: float | None = None,
        held_out_loss: float | None = None,
    ) -> dict[str, float]:
        """Write a row of training.csv, and what `measure` found, which it calls if nobody did.

        Returns:
            for dashboards: perplexity and bits per byte of a held-out loss, and the columns of
            gates.csv if they were measured, of each layer ("nsa/layer_0/entropy") and their means.

        Raises:
            TrainingError: the loss or the norm of the gradients is not finite; the row is written.
        """
        self.measure()
        told = self._write_measured()
        held_out = _held_out(held_out_loss, self.tokens_per_byte)
        told |= {f"eval_{name}": x for name, x in held_out.items() if x is not None}
        if self.heartbeat is not None:
            self._write_row(loss, learning_rate, grad_norm, held_out_loss, held_out)
        for name, value in (("loss", loss), ("norm of the gradients", grad_norm)):
            if value is not None and not math.isfinite(value):
                raise TrainingError(
                    f"the {name} is {value} at step {self.step_count}: resume from the last "
                    "checkpoint with a lower learning rate or a longer warm-up, or look for a bad "
                    "row in the data after it"
                )
        return told

    def sample(self, prompt: str, text: str) -> None:
        """Write a row of samples.jsonl: what the model writes after `prompt` at this step."""
        if self.heartbeat is not None:
            file = RowFile(self.folder, "samples")
            place = {"session": self.session, "step": self.step_count}
            file.append({**place, "prompt": prompt, "text": text})
            file.close()

    def measure(self) -> None:
        """Run the probe if a multiple of `gates_every` went by; nothing is read.

        `record` writes what it gives.
        Called before a step's loss is read, the probe is launched while the device still computes
        that step.
        """
        if not self._is_due():
            return
        self._measured_at = self.step_count
        assert self._probe is not None
        seen = observe(self.model, self._probe)
        if self.strict:
            check_strict(seen)
        calls, self._calls = self._calls, 0
        if self._writes and seen:
            self._measured = Measured(
                self.step_count,
                counted(seen, calls),
                backends_of(seen),
                [each.name for each in seen],
                torch.stack([statistics(each) for each in seen]),
            )

    def phase(self, name: str) -> None:
        """Tell the heartbeat what goes on: training or evaluating."""
        if self.heartbeat is not None:
            self.heartbeat.phase = name

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        beats = read_rows(self.folder, "heartbeat")
        self.session = 1 + (beats[-1]["session"] if beats else 0)
        self._files = {
            name: RowFile(self.folder, name)
            for name in ("training", "fallback_counters", "gates", "heartbeat", "sessions")
        }
        self._files["sessions"].append(
            {"time": time.time(), "session": self.session, "step": self.step_count}
            | _surroundings(self.model)
        )
        self.heartbeat = Heartbeat(
            self._files["heartbeat"],
            self.session,
            self._heartbeat_seconds,
            mesh=self._mesh,
            sent_bytes=self._sent_bytes,
        )
        self.heartbeat.step = self.step_count
        self.heartbeat.start()

    def _write_row(
        self,
        loss: float | None,
        learning_rate: float | None,
        grad_norm: float | None,
        held_out_loss: float | None,
        held_out: dict[str, float | None],
    ) -> None:
        assert self.heartbeat is not None
        now = time.perf_counter()
        self._files["training"].append(
            {
                "session": self.session,
                "step": self.step_count,
                "loss": loss,
                "learning_rate": learning_rate,
                "grad_norm": grad_norm,
                "tokens": self.tokens or None,
                "seconds": round(now - self._started, 3),
                "held_out_loss": held_out_loss,
                **held_out,
            }
        )
        if loss is None:
            return
        since, tokens = self._rate_from
        if self.tokens > tokens:
            self.heartbeat.tokens_per_second = round((self.tokens - tokens) / (now - since), 1)
        self._rate_from = (now, self.tokens)
        self.heartbeat.loss = loss if math.isfinite(loss) else None

    def _is_due(self) -> bool:
        """Of sharded models and sequences every rank must take part; of DDP too.

        A function that is the probe may call DDP, whose forward broadcasts buffers.
        """
        last = self._measured_at
        if last is not None and self.step_count // self.gates_every == last // self.gates_every:
            return False
        return self._probe is not None and (self._writes or _is_parallel(self.model))

    def _write_measured(self) -> dict[str, float]:
        """The numbers are also returned, by name, and their means over the layers."""
        found, self._measured = self._measured, None
        if self.heartbeat is None or found is None:
            return {}
        place = {"session": self.session, "step": found.step}
        self._files["fallback_counters"].append(*(place | row for row in found.counters))
        self.heartbeat.backends = found.backends
        told: dict[str, list[float]] = {}
        rows = []
        for number, numbers in enumerate(found.numbers.tolist()):
            known = {
                column: None if math.isnan(x) else x
                for column, x in zip(STATISTICS, numbers, strict=True)
            }
            rows.append(place | {"layer": found.layers[number]} | known)
            for column, x in known.items():
                if x is not None:
                    told.setdefault(f"nsa/{column}", []).append(x)
                    told[f"nsa/layer_{number}/{column}"] = [x]
        self._files["gates"].append(*rows)
        return {name: sum(values) / len(values) for name, values in told.items()}


telemetry = Telemetry


def _surroundings(model: nn.Module) -> dict[str, Any]:
    """Versions, machine and model, as sessions.csv holds them."""
    parameters = list(model.parameters())
    on_cuda = any(parameter.is_cuda for parameter in parameters)
    grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
    return {
        "nsa_flex": __version__,
        "torch": torch.__version__,
        "transformers": version_of("transformers") or "",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if on_cuda else platform.machine(),
        "ranks": torch.distributed.get_world_size() if grouped else 1,
        "parameters": sum(parameter.numel() for parameter in parameters),
    }


def _held_out(loss: float | None, tokens_per_byte: float | None) -> dict[str, float | None]:
    """The columns that follow from a held-out loss in nats a token."""
    perplexity = None if loss is None else math.exp(min(loss, 700.0))  # fits a float
    bits = None
    if loss is not None and tokens_per_byte is not None:
        bits = loss * tokens_per_byte / LOG_2
    return {"perplexity": perplexity, "bits_per_byte": bits}


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _is_parallel(model: nn.Module) -> bool:
    kind = nn.parallel.DistributedDataParallel
    return (
        any(isinstance(module, kind) for module in model.modules())
        or any(is_sharded(parameter) for parameter in model.parameters())
        or any(map(_exchanges, nsa_layers(model).values()))
    )


def mesh_of(model: nn.Module) -> dict[str, int] | None:
    """Axis to ranks, of those that share tokens or heads of the layers; None if there are none."""
    found = {}
    layers: Any = nsa_layers(model).values()
    for layer in layers:
        if layer.shards is not None:
            found["context"] = layer.shards.size
        if getattr(layer, "head_shards", None) is not None:
            found["heads"] = layer.head_shards.size
        if layer.compress_key.is_split:
            gates = layer.gates
            own = gates.num_query_heads * len(gates.rows)
            found["tensor"] = gates.linear.weight.shape[0] // own
    return found or None


def _exchanges(layer: Any) -> bool:
    """Whether calls of a layer, in eval mode at least, are collectives."""
    heads = getattr(layer, "head_shards", None)
    return layer.shards is not None or (heads is not None and heads.in_eval)
