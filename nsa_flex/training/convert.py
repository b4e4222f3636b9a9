"""A dense checkpoint to NSA, in stages, each of which is a training run of its own folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from nsa_flex.training.alignment import ALIGNMENT_FILE, AlignmentCallback
from nsa_flex.training.arguments import world_size
from nsa_flex.training.config import TrainConfig, config_of, read_config
from nsa_flex.training.dense_choice import CHOICE_FILE, choose_dense_layers
from nsa_flex.training.models import build_model
from nsa_flex.training.record import marks
from nsa_flex.training.resuming import CONFIG_FILE, FREE, differences
from nsa_flex.training.run import summary, train
from nsa_flex.training.saving import MODEL_FOLDER
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.texts import find_texts
from nsa_flex.training.tokenization import load_tokenizer, plain_ids

# May be others than those of a finished stage: files and folders have several names, and a later
# stage may want smaller batches.
ASIDE = {
    *FREE,
    "data.files",
    "data.held_out_files",
    "data.tokenizer",
    "model.checkpoint",
    "run.eval_rows",
    "training.accumulate",
    "training.batch_size",
}


@dataclass(frozen=True)
class Stage:
    """One run of a conversion.

    Args:
        name: of its folder.
        frozen: train φ and gates alone, towards dense attention.
        alignment: weight of the distance from dense attention, beside the loss on the text.
    """

    name: str
    steps: int
    seq_len: int
    learning_rate: float
    frozen: bool = False
    alignment: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.alignment < math.inf:
            raise ValueError(f"alignment={self.alignment} must be at least 0, and finite")


# The first one is left out unless it is asked for: with φ "mean" it gained nothing.
STAGES = (
    Stage("1-align", 0, 4096, 1e-3, frozen=True, alignment=1.0),
    Stage("2-sparse", 1500, 4096, 3e-5),
    Stage("3-long", 300, 32768, 3e-5),
)


def convert(
    checkpoint: str,
    out: Path,
    files: Sequence[str],
    *,
    tokenizer: str | None = None,
    stages: Sequence[Stage] = STAGES,
    keep_dense: int = 0,
    choice_len: int | None = None,
    overrides: Collection[str] = (),
    note: Callable[[str], None] = lambda text: None,
    callbacks: Callable[[TrainConfig], Sequence[TrainerCallback]] = lambda config: (),
) -> dict[str, Any]:
    """Patch a dense checkpoint and train it stage by stage; goes on with what `out` holds.

    The first stage starts from the checkpoint with the selected branch alone (gates "dense"), so
    that rows up to n * l' tokens begin with the checkpoint's own logits.

    Args:
        checkpoint: directory that transformers' `save_pretrained` wrote.
        out: folder; each stage has its own in it.
        files: text, as `data.files` of a training config.
        tokenizer: "bytes" or a directory; the checkpoint's if None.
        stages: in their order; those without steps are left out.
        keep_dense: how many layers stay dense: those without whose attention the checkpoint loses
            most (`choose_dense_layers`).
        choice_len: tokens of the rows that this is measured on. Take as many as the checkpoint has
            learnt: short rows do not show which layer finds what stands far back. Those of the
            first stage if None.
        overrides: "section.key=value" for all stages.
        note: called with a line on each layer that is measured for that.
        callbacks: gives further ones for the Trainer of a stage.

    Returns:
        The last stage's summary (`nsa_flex.training.train`), with `keep_dense` the layers that are
        dense, and for each stage that ran to its end the block and score recall at its first and
        last step, means of the layers.

    Raises:
        ValueError: what `train` raises; or there are several processes, or rows of a frozen stage
            that are too short for scores to select anything, or a finished stage in `out` was
            run with other settings, or any with another alignment; or what `choose_dense_layers`
            raises; `choice_len` stands without `keep_dense`; or this is negative, stands beside
            dense layers in `overrides`; or one of the two is another than the first stage began
            with.
    """
    if world_size() > 1:
        raise ValueError("a conversion runs in one process for now: start it without torchrun")
    stages = [stage for stage in stages if stage.steps]
    if not stages:
        raise ValueError("no stage has steps")

    def configs(*more: str) -> list[TrainConfig]:
        given = (out, files, tokenizer or checkpoint, [*overrides, *more])
        trained = [str(out / stage.name / MODEL_FOLDER) for stage in stages[:-1]]
        sources = [checkpoint, *trained]
        return [
            _config(stage, source, *given) for stage, source in zip(stages, sources, strict=True)
        ]

    found = configs()
    for stage, config in zip(stages, found, strict=True):  # before any of them takes hours
        _check(stage, config)
    first = found[0]
    if choice_len is not None:
        if not keep_dense:
            raise ValueError(f"choice_len={choice_len} without keep_dense: no layer is chosen")
        data = dataclasses.replace(first.data, seq_len=choice_len, seq_len_warmup=())
        first = dataclasses.replace(first, data=data)
    longest = max((each.data for each in (first, *found)), key=lambda data: data.seq_len)
    build_model(found[0].model, longest, load_tokenizer(longest.tokenizer), values="none")
    if keep_dense:
        dense = _dense_layers(first, keep_dense, choice_len, out, note)
        found = configs(f"model.dense_layers={dense}")
    for stage, config in zip(stages, found, strict=True):
        _check_before(stage, config)
    result: dict[str, Any] = {}
    recall: dict[str, Any] = {}
    for stage, config in zip(stages, found, strict=True):
        run = Path(config.out)
        result = _run(stage, config, callbacks(config))
        if result["stopped"]:
            break
        recall[stage.name] = recall_of(run)
    chosen = {"dense_layers": list(found[0].model.dense_layers)} if keep_dense else {}
    return {**result, "recall": recall, **chosen}


def _dense_layers(
    first: TrainConfig,
    count: int,
    length: int | None,
    out: Path,
    note: Callable[[str], None],
) -> list[int]:
    """Those of the first stage, if it has begun; else they are measured."""
    if first.model.dense_layers or count < 0:
        raise ValueError(f"keep_dense={count} must be at least 0, and without model.dense_layers")
    begun = Path(first.out) / CONFIG_FILE
    if not begun.exists():
        return choose_dense_layers(first, count, out, note)
    chosen = list(read_config(str(begun)).model.dense_layers)
    if len(chosen) != count:
        raise ValueError(
            f"{first.out} was begun with dense layers {chosen}, and keep_dense={count}: repeat "
            "their number, or choose another out"
        )
    told = out / CHOICE_FILE
    measured = json.loads(told.read_text()).get("seq_len") if told.exists() else None
    if length not in (None, measured):
        raise ValueError(
            f"{first.out} was begun with dense layers {chosen}, chosen on rows of "
            f"{measured or 'other'} tokens, and choice_len={length}: leave it out, or choose "
            "another out"
        )
    return chosen


def _config(
    stage: Stage,
    checkpoint: str,
    out: Path,
    files: Sequence[str],
    tokenizer: str,
    overrides: Collection[str],
) -> TrainConfig:
    """One document a row or many joined; eager where hooks look on."""
    aligned = stage.alignment > 0
    values: dict[str, Any] = {
        "out": str(out / stage.name),
        "model": {"checkpoint": checkpoint, "init": "dense"},
        "data": {
            "files": list(files),
            "tokenizer": tokenizer,
            "seq_len": stage.seq_len,
            "documents": "joined",
        },
        "training": {
            "steps": stage.steps,
            "batch_size": 1,
            "accumulate": 8,
            "learning_rate": stage.learning_rate,
            "warmup_steps": min(100, stage.steps // 10),
        },
        "engine": {"checkpointing": "none" if aligned else "selective"},
        "run": {"log_every": 10, "gates_every": 100, "eval_every": 200, "save_every": 200},
    }
    own = ["engine.compile=false", "engine.checkpointing=none"] if aligned else []
    return config_of(values, [*overrides, *own])


def _check(stage: Stage, config: TrainConfig) -> None:
    sizes = config.model.nsa
    if stage.frozen and config.data.seq_len <= sizes.num_selected_tokens:
        raise ValueError(
            f"rows of stage {stage.name} have {config.data.seq_len} tokens, all of which are "
            f"selected: take more than n * l' = {sizes.num_selected_tokens}"
        )
    if stage.alignment > 0 and config.data.documents != "joined":
        raise ValueError(
            f'data.documents is "{config.data.documents}"; expected "joined" for stage '
            f"{stage.name}, which compares rows with dense attention"
        )


def _check_before(stage: Stage, config: TrainConfig) -> None:
    """What was trained to its end is not trained again: it must be what is asked for."""
    run = Path(config.out)
    before: dict[str, Any] = {}
    now: dict[str, Any] = {}
    if (run / ALIGNMENT_FILE).exists():
        before |= json.loads((run / ALIGNMENT_FILE).read_text())
        before.pop("source", None)  # compared once the stage before has ended
        now |= {"alignment": stage.alignment, "frozen": stage.frozen}
    if (run / MODEL_FOLDER).exists() and (run / CONFIG_FILE).exists():
        before |= read_config(str(run / CONFIG_FILE)).to_dict()
        now |= config.to_dict()
    other = [
        f"{each.key} was {each.before} and is {each.after}"
        for each in differences(before, now)
        if each.key not in ASIDE and not each.key.startswith("engine.")
    ]
    if other:
        raise ValueError(
            f"{run} was run with other settings: {'; '.join(other)}; repeat them, or choose "
            "another out"
        )


def _run(
    stage: Stage, config: TrainConfig, callbacks: Sequence[TrainerCallback]
) -> dict[str, Any]:
    run, noted = Path(config.out), Path(config.out) / ALIGNMENT_FILE
    source = _weights_of(str(config.model.checkpoint))
    if noted.exists() and json.loads(noted.read_text()).get("source", source) != source:
        raise ValueError(
            f"{run} began with other weights than those of {config.model.checkpoint}: choose "
            f"another out, or remove {run}"
        )
    if (run / MODEL_FOLDER).exists():
        return summary(run, stopped=False, seconds=0.0)
    row = find_texts(config).held_out_rows(1)[0]
    alignment = AlignmentCallback(
        run,
        weight=stage.alignment,
        frozen=stage.frozen,
        probe=torch.from_numpy(plain_ids(row.ids[: row.real]))[None],
        every=config.run.gates_every or config.training.steps,
        source=source,
    )
    return train(config, resume=run.exists(), callbacks=[alignment, *callbacks])


def _weights_of(checkpoint: str) -> str:
    """12 hexadecimal digits that tell a checkpoint's weights."""
    files = marks(sorted(Path(checkpoint).glob("*.safetensors")))
    return hashlib.sha256("".join(mark["hash"] for mark in files).encode()).hexdigest()[:12]


def recall_of(run: Path) -> dict[str, list[float | None]]:
    """Block and score recall at the first and at the last measurement, means of the layers."""
    rows = read_rows(run, "recall")
    ends = [[row for row in rows if row["step"] == rows[i]["step"]] for i in (0, -1)]
    return {
        column: [_mean([row[column] for row in part]) for part in ends]
        for column in ("block_recall", "score_recall")
    }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 4) if known else None
