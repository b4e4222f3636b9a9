"""Where a session of a run begins, its first step or a checkpoint, and with what changes."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nsa_flex.training.arguments import data_ranks, is_sharded, rank
from nsa_flex.training.config import TrainConfig, read_config
from nsa_flex.training.record import Record, read_record
from nsa_flex.training.saving import (
    check_free,
    check_whole,
    chosen_checkpoint,
    last_checkpoint,
    remove_unfinished,
    set_aside,
    set_models_aside,
    step_of,
)
from nsa_flex.training.telemetry.rows import RowFile, read_rows
from nsa_flex.training.trainer import SHARDED_WEIGHTS

# Say when something is written, and how it is read: nothing that a row tells depends on them.
FREE = {
    "out",
    "data.cache",
    "data.workers",
    "run.log_every",
    "run.gates_every",
    "run.eval_every",
    "run.save_every",
    "run.keep",
    "run.heartbeat_seconds",
    "run.strict",
    "run.report_to",
    "run.sample_tokens",
}
# Hold from the checkpoint on, and are taken when they are told as changes. Of files the content
# must be the same.
TOLD = {
    "data.files",
    "data.held_out_files",
    "data.leave_out",
    "data.tokenizer",
    "engine.checkpointing",
    "engine.compile",
    "engine.context_parallel",
    "run.eval_rows",
    "training.accumulate",
    "training.batch_size",
    "training.betas",
    "training.learning_rate",
    "training.max_grad_norm",
    "training.ema",
    "training.schedule",
    "training.schedule_options",
    "training.steps",
    "training.warmup_steps",
    "training.weight_decay",
}


@dataclass(frozen=True)
class Change:
    """A setting by its dotted key, and its value before and from here on."""

    key: str
    before: Any
    after: Any


def changes_between(
    before: Mapping[str, Any], now: Mapping[str, Any], told: Collection[str], run: str
) -> list[Change]:
    """What a config says otherwise than that of the run.

    Args:
        before, now: as `TrainConfig.to_dict` gives them.
        told: keys that the caller means to change.
        run: names the run in errors.

    Raises:
        ValueError: a change would falsify the run, or was not told; both values are named.

    >>> changes_between({"seed": 1}, {"seed": 2}, ["seed"], "runs/a")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: runs/a was started with another config: seed is 1 in the run and 2 here, ...
    """
    found = differences(before, now)
    refused = [
        _refusal(each)
        for each in found
        if each.key not in FREE and not (_under(each.key, TOLD) and _under(each.key, told))
    ]
    if refused:
        raise ValueError(f"{run} was started with another config: {'; '.join(refused)}")
    return [each for each in found if each.key != "out"]


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """All settings that differ between two configs, as `TrainConfig.to_dict` gives them."""
    old, new = _flat(before), _flat(now)
    return [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]


def _under(key: str, names: Collection[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _refusal(change: Change) -> str:
    text = f"{change.key} is {_shown(change.before)} in the run and {_shown(change.after)} here"
    if _under(change.key, TOLD):
        return (
            f"{text} (keep it with --set {change.key}={_shown(change.before)}, or change it with "
            f"--change {change.key}={_shown(change.after)})"
        )
    return f"{text}, and a run cannot change it (choose another out)"


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{where}{name}.")
        else:
            found[f"{where}{name}"] = value
    return found


def _shown(value: Any) -> str:
    """As --set and --change take it."""
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


CONFIG_FILE = "config.yaml"


@dataclass(frozen=True)
class Start:
    """checkpoint and its record: None at the first step. changes: since the session before."""

    checkpoint: Path | None
    record: Record | None
    changes: list[Change]

    @property
    def step(self) -> int:
        """Optimizer steps that are done."""
        return 0 if self.checkpoint is None else step_of(self.checkpoint)


@dataclass(frozen=True)
class Resume:
    """What the caller asked for.

    wanted: go on with a run that is there. checkpoint: by steps or path, None for the last one.
    told: keys of the config that are meant to change.
    """

    wanted: bool = False
    checkpoint: str | None = None
    told: Collection[str] = ()


def find_start(config: TrainConfig, resume: Resume) -> Start:
    """Nothing is written.

    Raises:
        ValueError: another process runs there; the folder holds a run that is not to be resumed; a
            change was not told, or would falsify it.
        TrainingError: the checkpoint is damaged.
    """
    run = Path(config.out)
    if rank() == 0:
        check_free(run)
    return _find(config, run, resume)


def open_run(config: TrainConfig, resume: Resume, start: Start) -> None:
    """The run's folder, locked by the caller, with its config and changes; of rank 0.

    What a killed process left half written is removed; models of an earlier end are renamed.

    Raises:
        ValueError: another process was there since `start` was found.
    """
    run = Path(config.out)
    if _find(config, run, resume) != start:
        raise ValueError(f"{run} has changed meanwhile: start again")
    remove_unfinished(run)
    trained = read_rows(run, "training")
    set_models_aside(run, trained[-1]["step"] if trained else 0)
    if start.checkpoint is not None and resume.checkpoint is not None:
        set_aside(run, start.checkpoint)
    if start.changes:
        file = RowFile(run, "changes")
        for change in start.changes:
            values = {"before": json.dumps(change.before), "after": json.dumps(change.after)}
            file.append({"time": time.time(), "step": start.step, "key": change.key, **values})
        file.close()
    aside = run / f".{CONFIG_FILE}"
    aside.write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
    aside.rename(run / CONFIG_FILE)


def _find(config: TrainConfig, run: Path, resume: Resume) -> Start:
    changes = _changes(config, run, resume)
    if resume.checkpoint is not None:
        checkpoint: Path | None = chosen_checkpoint(run, resume.checkpoint)
    else:
        checkpoint = last_checkpoint(run) if resume.wanted else None
    if checkpoint is None:
        return Start(None, None, changes)
    check_whole(checkpoint, run)
    _check_steps(config, checkpoint, changes)
    record = read_record(checkpoint)
    if record.ranks != data_ranks(config):
        changes.append(Change("ranks", record.ranks, data_ranks(config)))
    return Start(checkpoint, record, changes)


def _changes(config: TrainConfig, run: Path, resume: Resume) -> list[Change]:
    file = run / CONFIG_FILE
    if not (file.exists() and read_rows(run, "training")):  # nothing was trained
        if resume.told:
            raise ValueError(f"{run} holds no run to go on with: begin it without changes")
        return []
    if not (resume.wanted or resume.checkpoint):
        raise ValueError(f"{run} holds a run already: resume it (--resume), or choose another out")
    return changes_between(
        read_config(str(file)).to_dict(), config.to_dict(), resume.told, str(run)
    )


def _check_steps(config: TrainConfig, checkpoint: Path, changes: list[Change]) -> None:
    steps = config.training.steps
    if step_of(checkpoint) > steps and any(each.key == "training.steps" for each in changes):
        raise ValueError(
            f"training.steps is {steps}, and {checkpoint} has {step_of(checkpoint)} behind it: "
            "raise them, or go on from an earlier one (--resume-from)"
        )


def check_sharding(config: TrainConfig, checkpoint: Path) -> None:
    """Raise ValueError if `checkpoint` is one of FSDP2 and the session is not, or the reverse."""
    sharded = (checkpoint / SHARDED_WEIGHTS).is_dir()
    if sharded and not is_sharded(config):
        raise ValueError(f"{checkpoint} is one of FSDP2: start it with torchrun, on any processes")
    if is_sharded(config) and not sharded:
        raise ValueError(f"{checkpoint} is none of FSDP2: start it without torchrun")
