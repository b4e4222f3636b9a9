"""What a run that goes on may do otherwise than before, and what would falsify it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

# Say when something is written, and how it is read: nothing that a row tells depends on them.
FREE = {
    "out",
    "data.workers",
    "run.log_every",
    "run.gates_every",
    "run.eval_every",
    "run.save_every",
    "run.keep",
    "run.heartbeat_seconds",
    "run.strict",
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
    "run.eval_rows",
    "training.accumulate",
    "training.batch_size",
    "training.betas",
    "training.learning_rate",
    "training.max_grad_norm",
    "training.schedule",
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
    old, new = _flat(before), _flat(now)
    found = [
        Change(key, old.get(key), new.get(key))
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key)
    ]
    refused = [_refusal(each) for each in found if each.key not in FREE | (TOLD & set(told))]
    if refused:
        raise ValueError(f"{run} was started with another config: {'; '.join(refused)}")
    return [each for each in found if each.key != "out"]


def _refusal(change: Change) -> str:
    text = f"{change.key} is {_shown(change.before)} in the run and {_shown(change.after)} here"
    if change.key in TOLD:
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
