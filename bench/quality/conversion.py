"""A dense model trained here, converted to NSA, beside the same model trained on as it is.

    python -m nsa_flex.bench.quality.conversion --corpus corpus --out conversion.json --seed 0

Pieces run one after another, the most telling first; a row stands in --out after each stage. The
same command goes on with what --work holds: finished stages are not run again, and one whose time
was up goes on from its checkpoint. All pieces that follow the pretraining see the same text, which
it did not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor
from transformers import TrainerCallback

from nsa_flex.bench.cases.models import best_dense
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure import machine
from nsa_flex.bench.quality.build import digest, rows_of_corpus
from nsa_flex.bench.quality.conversion_report import conversion
from nsa_flex.bench.quality.cutting import cut
from nsa_flex.bench.quality.evaluation import losses_by_length
from nsa_flex.bench.quality.needles import KINDS, hide, needles
from nsa_flex.bench.quality.one_run import ROW, held_out_rows, write_row
from nsa_flex.bench.quality.variants import config_of
from nsa_flex.bench.report.cells import markdown
from nsa_flex.bench.report.rows import Row, is_of, merged, write_rows
from nsa_flex.training.config import ModelSection, TrainConfig
from nsa_flex.training.config_reading import from_mapping
from nsa_flex.training.convert import Stage, convert
from nsa_flex.training.models import build_model
from nsa_flex.training.run import train
from nsa_flex.training.saving import MODEL_FOLDER
from nsa_flex.training.tokenization import BYTES

DENSE = "dense"  # the piece that the others start from


@dataclass(frozen=True)
class Recipe:
    """Sizes of the study; steps are of `tokens_per_step` tokens at every length, as forwards are.

    Args:
        size: of the model, as of `variants`.
        steps: of the pretraining, in rows of `length` at `pretraining_rate` at most.
        align, sparse, lengthen: steps of the stages of a conversion, the last in rows of
            `long_length`; `align_rate` is that of the first, `rate` of the others.
        alignment: weight of the distance from dense attention in a sparse stage that has it.
        held_out_tokens: at most; the same ones in rows of both lengths.
        fact_rows: one row of training text in so many has facts to find (`needles`); 0 for none.
        compile_from: stages of as many steps are compiled.
    """

    size: str = "30m"
    tokens_per_step: int = 32768
    length: int = 4096
    long_length: int = 32768
    steps: int = 1600
    pretraining_rate: float = 1.5e-3
    align: int = 40
    sparse: int = 160
    lengthen: int = 120
    align_rate: float = 2e-3
    rate: float = 3e-4
    alignment: float = 0.5
    held_out_tokens: int = 1 << 20
    fact_rows: int = 4
    compile_from: int = 300

    def __post_init__(self) -> None:
        if self.tokens_per_step % self.long_length or self.long_length % self.length:
            raise ValueError(
                f"length={self.length} must divide long_length={self.long_length}, and that "
                f"tokens_per_step={self.tokens_per_step}"
            )


@dataclass(frozen=True)
class Piece:
    """A model, and how it is trained after the pretraining; `variant` as of `variants`.

    Args:
        keep_dense: layers that stay dense, those that lose most as NSA.
    """

    name: str
    variant: str
    stages: tuple[Stage, ...]
    keep_dense: int = 0


def pieces(recipe: Recipe) -> tuple[Piece, ...]:
    """All of them, in the order in which they run. After `dense` each has as many tokens."""
    short = recipe.align + recipe.sparse
    pretraining = Stage("pretraining", recipe.steps, recipe.length, recipe.pretraining_rate)
    align = Stage(
        "1-align", recipe.align, recipe.length, recipe.align_rate, frozen=True, alignment=1.0
    )
    sparse = Stage("2-sparse", recipe.sparse, recipe.length, recipe.rate)
    long = Stage("3-long", recipe.lengthen, recipe.long_length, recipe.rate)
    all_short = dataclasses.replace(sparse, steps=short)
    aligned = dataclasses.replace(sparse, alignment=recipe.alignment)
    never_long = dataclasses.replace(sparse, steps=recipe.sparse + recipe.lengthen)
    all_steps = dataclasses.replace(sparse, steps=short + recipe.lengthen)
    return (
        Piece(DENSE, "dense", (pretraining,)),
        Piece("continued", "dense", (all_short, long)),
        Piece("converted", "mean", (align, sparse, long)),
        Piece("no-align", "mean", (all_short, long)),
        Piece("converted-mlp", "mlp", (align, sparse, long)),
        Piece("aligned-sparse", "mean", (align, aligned, long)),
        Piece("no-long", "mean", (align, never_long)),
        Piece("max-pool", "max-pool", (all_short, long)),
        Piece("more-blocks", "blocks-32", (all_short, long)),
        Piece("small-blocks", "small-blocks", (all_short, long)),
        Piece("half-dense", "dense-nsa", (all_short, long)),
        Piece("small-fifth", "small-fifth", (all_short, long)),
        Piece("one-dense", "mean", (all_short, long), keep_dense=1),
        Piece("two-dense", "mean", (all_short, long), keep_dense=2),
        Piece("one-dense-align", "mean", (align, sparse, long), keep_dense=1),
        Piece("one-dense-aligned", "mean", (align, aligned, long), keep_dense=1),
        Piece("one-dense-short", "mean", (all_steps,), keep_dense=1),
    )


class Deadline(TrainerCallback):
    """Asks a run for its end, with a checkpoint, once `time.monotonic()` is past `until`."""

    def __init__(self, until: float) -> None:
        self.until = until

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A second signal would end the process."""
        if time.monotonic() > self.until:
            self.until = float("inf")
            signal.raise_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Study:
    """One seed of it.

    Args:
        work: folder of cut text and of runs.
        until: `time.monotonic()` at which no stage may run on.
    """

    corpus: Path
    work: Path
    seed: int
    until: float = float("inf")
    recipe: Recipe = Recipe()

    def folder(self, piece: Piece) -> Path:
        """Where its runs are."""
        return self.work / f"{piece.name}-{self.seed}"

    def held_out(self) -> Tensor:
        """int64 (rows, long_length)."""
        length = self.recipe.long_length
        paths = self.cut(length)
        own = (
            f"data.seq_len={length}",
            f"data.files=[{paths['train']}]",
            f"data.held_out_files=[{paths['held_out']}]",
        )
        config = config_of("dense", self.recipe.size, own)
        return held_out_rows(config, self.recipe.held_out_tokens)

    def text(self, length: int, first: int, count: int) -> Path:
        """A file of `count` training rows of a length from number `first` on, in their order.

        Some of them have facts to find, the same ones in each call.
        """
        whole = self.cut(length)["train"]
        part = whole.with_name(f"{whole.stem}-{first}-{count}.jsonl")
        if not part.exists():
            lines = whole.read_text().splitlines(keepends=True)
            draft = part.with_suffix(".new")
            rows = (
                self._with_facts(i, lines[i % len(lines)]) for i in range(first, first + count)
            )
            draft.write_text("".join(rows))
            draft.replace(part)
        return part

    def _with_facts(self, number: int, line: str) -> str:
        """Row `number` of the training text, as a line of its file."""
        every = self.recipe.fact_rows
        if not every or number % every:
            return line
        kind = list(KINDS.values())[number // every % len(KINDS)]
        text = json.loads(line)["text"].encode()
        hidden = hide(np.random.default_rng((len(text), number)), text, kind)
        return json.dumps({"text": hidden.text.decode()}) + "\n"

    def cut(self, length: int) -> dict[str, Path]:
        """Files of rows of a length, by split."""
        rows = max(1, self.recipe.held_out_tokens // length)
        return cut(self.corpus, length, self.work / "cut", rows)


def run_piece(study: Study, piece: Piece, held_out: Tensor, note: Callable[[Row], None]) -> Row:
    """Train it stage by stage; returns the row, whose status is "ok" if all are finished.

    Args:
        held_out: int64 (rows, S), S the longer length.
        note: called with the row as it is after each stage.

    Raises:
        ValueError: its folder holds another recipe's.
    """
    recipe, folder = study.recipe, study.folder(piece)
    row = _row_of(study, piece)
    pretraining = pieces(recipe)[0].stages[0]
    model: Path | None = None
    seen: dict[int, int] = {}  # rows by their length
    if piece.name != DENSE:
        dense = study.work / f"{DENSE}-{study.seed}"
        model = dense / pretraining.name / MODEL_FOLDER
        losses = json.loads((dense / ROW).read_text())["losses"]
        row["started_from"] = {length: found["loss"] for length, found in losses.items()}
        seen[pretraining.seq_len] = _rows_of(pretraining, recipe)
    first_of = {each.variant: each.name for each in reversed(pieces(recipe))}
    is_first = piece.variant != "dense" and first_of[piece.variant] == piece.name
    if is_first and "patched" not in row:
        before = _measured(recipe, piece.variant, model, held_out)
        row |= {"patched": before["losses"], "patched_needles": before["needles"]}
        folder.mkdir(parents=True, exist_ok=True)
        write_row(folder, row)
        note(row)
    done = {stage["name"] for stage in row["stages"]}
    for stage in piece.stages:
        first, count = seen.get(stage.seq_len, 0), _rows_of(stage, recipe)
        seen[stage.seq_len] = first + count
        if stage.name not in done:
            if time.monotonic() > study.until:
                return row
            text = study.text(stage.seq_len, first, count)
            result = _trained(study, piece, stage, text, model)
            if result["stopped"]:
                return row
            row |= _measured(recipe, piece.variant, Path(result["model"]), held_out)
            _add(row, stage, result)
            if stage == piece.stages[-1]:
                row["status"] = "ok"
            write_row(folder, row)
        note(row)
        model = folder / stage.name / MODEL_FOLDER
    return row


def _rows_of(stage: Stage, recipe: Recipe) -> int:
    """How many a stage sees."""
    return stage.steps * (recipe.tokens_per_step // stage.seq_len)


def _row_of(study: Study, piece: Piece) -> Row:
    """What an earlier call left of it, or a fresh one."""
    path = study.folder(piece) / ROW
    if path.exists():
        row: Row = json.loads(path.read_text())
        if not is_of(row["recipe"], study.recipe):
            raise ValueError(f"{path.parent} holds a run of another recipe; choose another --work")
        return row
    return {
        "case": f"conversion/{study.recipe.size} {piece.name} seed {study.seed}",
        "target": "conversion",
        "size": study.recipe.size,
        "piece": piece.name,
        "variant": piece.variant,
        "seed": study.seed,
        "recipe": dataclasses.asdict(study.recipe),
        "corpus": digest(study.corpus),
        **machine.describe(_device()),
        "status": "running",
        "steps": 0,
        "tokens": 0,
        "seconds": 0.0,
        "stages": [],
    }


def _add(row: Row, stage: Stage, result: dict[str, Any]) -> None:
    """A finished stage, with the held-out losses after it."""
    tokens = stage.steps * row["recipe"]["tokens_per_step"]
    told: dict[str, Any] = {
        **dataclasses.asdict(stage),
        "tokens": tokens,
        "seconds": result["seconds"],
        "training_loss": result["loss"],
        "losses": {length: found["loss"] for length, found in row["losses"].items()},
        **result.get("recall", {}).get(stage.name, {}),
    }
    row["stages"].append(told)
    if "dense_layers" in result:
        row["dense_layers"] = result["dense_layers"]
    row["steps"] += stage.steps
    row["tokens"] += tokens
    row["seconds"] = round(row["seconds"] + result["seconds"], 2)


def _trained(
    study: Study, piece: Piece, stage: Stage, text: Path, model: Path | None
) -> dict[str, Any]:
    """The result of `train`, or of `convert` with the stage alone."""
    gc.collect()  # the model of the stage before
    if stage.steps >= study.recipe.compile_from:
        torch.compiler.reset()  # lest the stages before count towards the limit of recompilations
    out = study.folder(piece)
    own = _settings(study, stage)
    deadline = Deadline(study.until)
    if piece.variant != "dense":
        model_of = config_of(piece.variant, study.recipe.size).to_dict()["model"]
        chosen = [f"model.{name}={json.dumps(model_of[name])}" for name in ("nsa", "dense_layers")]
        return convert(
            str(model),
            out,
            [str(text)],
            tokenizer="bytes",
            stages=[stage],
            keep_dense=piece.keep_dense if stage == piece.stages[0] else 0,
            overrides=[*own, *chosen],
            callbacks=lambda config: [deadline],
        )
    own += [
        f"out={out / stage.name}",
        f"data.files=[{text}]",
        f"data.seq_len={stage.seq_len}",
        f"training.steps={stage.steps}",
        f"training.learning_rate={stage.learning_rate}",
        f"model.config.max_position_embeddings={study.recipe.long_length}",
    ]
    config = config_of("dense", study.recipe.size, tuple(own))
    if model is not None:
        config = _from_checkpoint(config, model)
    with best_dense():
        return train(config, resume=True, callbacks=[deadline])


def _settings(study: Study, stage: Stage) -> list[str]:
    """What dense and converted models share."""
    recipe = study.recipe
    return [
        f"seed={study.seed}",
        f"data.held_out_files=[{study.cut(recipe.long_length)['held_out']}]",
        f"training.batch_size={recipe.tokens_per_step // stage.seq_len}",
        "training.accumulate=1",
        f"training.warmup_steps={min(100, stage.steps // 10)}",
        "training.schedule=linear",
        f"engine.compile={json.dumps(stage.steps >= recipe.compile_from)}",
        "engine.checkpointing=none",
        *(f"run.{name}=0" for name in ("gates_every", "eval_every", "save_every")),
        "run.log_every=20",
    ]


def _from_checkpoint(config: TrainConfig, path: Path) -> TrainConfig:
    model = dataclasses.replace(config.model, config=None, checkpoint=str(path))
    return dataclasses.replace(config, model=model)


def _measured(
    recipe: Recipe, variant: str, checkpoint: Path | None, held_out: Tensor
) -> dict[str, Any]:
    """Columns of a row, by the length of rows: `summary` of the same tokens, and `needles`.

    A dense checkpoint is patched.
    """
    config = config_of(variant, recipe.size)
    section = ModelSection(
        checkpoint=str(checkpoint),
        attention=config.model.attention,
        init="dense",
        nsa=config.model.nsa,
        dense_layers=config.model.dense_layers,
    )
    device = _device()
    model = build_model(section, config.data, BYTES).to(device)
    lengths, tokens = (recipe.length, recipe.long_length), recipe.tokens_per_step
    found: dict[str, Any] = {"needles": {}}
    with best_dense() if variant == "dense" else contextlib.nullcontext():
        found["losses"] = losses_by_length(model, held_out, lengths, tokens, device)
        if recipe.fact_rows:
            for length in lengths:
                found["needles"][str(length)] = needles(model, held_out, length, tokens, device)
    return found


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(study: Study, out: Path, names: Collection[str] = ()) -> list[Row]:
    """Every piece as far as the time goes; returns the rows of `out`, with those it held before.

    Args:
        names: of pieces, none for all; `dense` runs in any case.

    Raises:
        ValueError: `out` holds rows of another corpus or recipe.
    """
    rows = rows_of_corpus(out, study.corpus)
    if not all(is_of(row["recipe"], study.recipe) for row in rows):
        raise ValueError(f"{out} holds rows of another recipe; choose another --out")
    held_out = study.held_out()

    def note(row: Row) -> None:
        nonlocal rows
        rows = merged(rows, [row])
        write_rows(out, rows)
        print(_told(row), flush=True)

    for piece in pieces(study.recipe):
        if names and piece.name not in {DENSE, *names}:
            continue
        if run_piece(study, piece, held_out, note)["status"] != "ok":
            break
    return rows


def _told(row: Row) -> dict[str, Any]:
    losses = row["losses"] if "losses" in row else row["patched"]
    return {name: row[name] for name in ("case", "status", "tokens", "seconds")} | {
        length: found["loss"] for length, found in losses.items()
    }


def main() -> None:
    """Run, print the table."""
    begun = time.monotonic()
    names = [piece.name for piece in pieces(Recipe())]
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/conversion"))
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--closing-seconds", type=float, default=15.0, help="for what is stopped")
    parser.add_argument("--pieces", nargs="+", choices=names, default=[])
    parser.add_argument("--set", action="append", default=[], help="of the recipe, as steps=800")
    given = parser.parse_args()
    changes = dict(each.split("=", 1) for each in given.set)
    recipe = from_mapping(Recipe, {name: yaml.safe_load(x) for name, x in changes.items()})
    until = begun + given.seconds - given.closing_seconds
    study = Study(given.corpus, given.work, given.seed, until, recipe)
    print(markdown(conversion(run(study, given.out, given.pieces))))


if __name__ == "__main__":
    main()
