"""A small model trained for recall on rows of growing length, and tested past the longest.

    python -m nsa_flex.bench.quality.recall mean --out runs/recall/mean-0 --seconds 540

With --checkpoint the model is one that was trained on text, or (--recipe conversion, one-dense or
patched) one that learnt the tasks with dense attention: model in the folder of its run. Goes on
with what the folder holds; stopped in time, it saves its state and is tested all the same.
Its row, recall.json there, has the share of right answers by task, length and depth, and for the
wrong ones whether the blocks that the answer stands in were selected and how the gates stood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from nsa_flex.bench.cases.models import best_dense
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure import machine
from nsa_flex.bench.quality.recall_causes import causes_of
from nsa_flex.bench.quality.recall_recipes import RECIPES, Recipe, Stage
from nsa_flex.bench.quality.recall_tasks import (
    DEPTHS,
    TASKS,
    VOCABULARY,
    Batch,
    Task,
    make_batch,
)
from nsa_flex.bench.quality.variants import variants
from nsa_flex.bench.report.rows import Row, is_of, write_rows
from nsa_flex.training.config import DataSection, ModelSection
from nsa_flex.training.dense_choice import CHOICE_FILE, lost_by_layer, most_lossy
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

ROW = "recall.json"
STATE = "state.pt"
MODEL = "model"  # what a conversion starts from
WORKERS = 4  # processes that make rows
CLOSING = 0.2  # of the seconds, for the tests
TEST_TOKENS = 65536  # of a forward
CHOICE_ROWS = 8  # on which layers are told apart


def build(
    recipe: Recipe,
    variant: str,
    seed: int,
    checkpoint: Path | None = None,
    dense_layers: Collection[int] = (),
) -> Any:
    """A model of a variant of the study: one of its attentions.

    Args:
        checkpoint: a dense or patched one of transformers; a dense one is patched, and bytes make
            room for the tokens of the tasks. Fresh weights if None.
        dense_layers: numbers of those that stay dense; the variant's if there are none.
    """
    torch.manual_seed(seed)
    section = _section(recipe, variant, checkpoint)
    if dense_layers:
        section = dataclasses.replace(section, dense_layers=tuple(dense_layers))
    model = build_model(section, DataSection(files=()), BYTES)
    if checkpoint is not None:
        model.resize_token_embeddings(VOCABULARY)
    return model


def _section(recipe: Recipe, variant: str, checkpoint: Path | None) -> ModelSection:
    found = variants()[variant]
    if "window" in found.layers:
        raise ValueError(f"variant is {variant!r}; expected one without layers of windows alone")
    sizes = dataclasses.replace(
        recipe.nsa, compression=found.compression, branches=found.branches, **found.nsa
    )
    if checkpoint is not None:
        layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
        return ModelSection(
            checkpoint=str(checkpoint),
            attention=found.attention,
            init="dense",
            nsa=sizes,
            dense_layers=found.dense_layers(layers),
        )
    config = {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": 3 * recipe.hidden_size,
        "num_hidden_layers": recipe.num_layers,
        "num_attention_heads": recipe.num_heads,
        "num_key_value_heads": recipe.num_kv_heads,
        "head_dim": recipe.head_dim,
        "rope_theta": recipe.rope_theta,
        "max_position_embeddings": 2 * max(length for length, _ in recipe.tests),
    }
    return ModelSection(
        config=config,
        attention=found.attention,
        nsa=sizes,
        dense_layers=found.dense_layers(recipe.num_layers),
    )


def lost_as_nsa(
    recipe: Recipe, variant: str, checkpoint: Path, device: torch.device
) -> dict[int, float]:
    """What each layer of a dense checkpoint loses as NSA, in nats, by its number.

    Raises:
        ValueError: the variant has dense layers of its own.
    """
    found = variants()[variant]
    if found.attention == "dense" or found.layers:
        raise ValueError(f"variant is {variant!r}; expected one whose layers are all NSA")
    model = build(recipe, "dense", 0, checkpoint).to(device).eval()
    stage = dataclasses.replace(recipe.stages[-1], length=recipe.choice_length, rows=CHOICE_ROWS)
    batch = batch_of(stage, np.random.default_rng(2))

    @torch.no_grad()
    def measure() -> float:
        return loss_of(model, batch).item()

    return lost_by_layer(model, _section(recipe, variant, checkpoint), measure, print)


class Steps(Dataset):
    """What the steps from `first` on are trained on; the same in every piece."""

    def __init__(self, recipe: Recipe, seed: int, first: int = 0) -> None:
        self.recipe, self.seed, self.first = recipe, seed, first

    def __len__(self) -> int:
        return self.recipe.steps - self.first

    def __getitem__(self, index: int) -> Batch:
        step = self.first + index
        stage = self.recipe.stage_at(step)
        return batch_of(stage, np.random.default_rng((self.seed, step)))


def batch_of(stage: Stage, rng: np.random.Generator) -> Batch:
    """What one step is trained on."""
    tasks = [stage.tasks[i] for i in rng.choice(len(stage.tasks), stage.rows, p=stage.shares)]
    return make_batch(rng, tasks, stage.length)


def logits_of(model: Any, batch: Batch, rows: np.ndarray, number: np.ndarray) -> Tensor:
    """Float32 (N, V) at questions `number` of `rows`, int (N,)."""
    device = model.device
    ids = torch.from_numpy(batch.ids).to(device)
    places = torch.from_numpy(batch.places[rows, number]).to(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=ids.is_cuda):
        hidden = model.model(input_ids=ids).last_hidden_state
        found = hidden[torch.from_numpy(rows).to(device), places]
        return model.lm_head(found).float()


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Of all answers, nats."""
    rows, number = np.nonzero(batch.places >= 0)
    answers = torch.from_numpy(batch.answers[rows, number]).to(model.device)
    return F.cross_entropy(logits_of(model, batch, rows, number), answers)


class Run:
    """Training of one model; `state` is what a later piece goes on with."""

    def __init__(
        self,
        recipe: Recipe,
        variant: str,
        seed: int,
        device: torch.device,
        checkpoint: Path | None = None,
        dense_layers: Collection[int] = (),
    ) -> None:
        self.recipe, self.seed, self.device = recipe, seed, device
        self.about = json.dumps([variant, seed, dataclasses.asdict(recipe)])
        self.model = build(recipe, variant, seed, checkpoint, dense_layers).to(device)
        if device.type == "cuda":  # the host bounds short rows: half as long a step
            # A graph for each length and kind of layer.
            torch._dynamo.config.recompile_limit = max(8, 2 * len(recipe.stages))
            for layer in self.model.model.layers:
                layer.compile(dynamic=False)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=recipe.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            fused=device.type == "cuda",
        )
        self.step = 0
        self.losses: list[list[float]] = []

    def train(self, until: float) -> None:
        """To the end, or as long as `time.monotonic()` is before `until`."""
        self.model.train()
        steps = Steps(self.recipe, self.seed, self.step)
        workers = WORKERS if self.device.type == "cuda" else 0
        for batch in DataLoader(steps, batch_size=None, num_workers=workers):
            if time.monotonic() > until:
                return
            loss = self._step(batch)
            if self.step % 50 == 0:
                self.losses.append([self.step, round(loss.item(), 4)])
                print(*self.losses[-1], flush=True)

    def _step(self, batch: Batch) -> Tensor:
        loss = loss_of(self.model, batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.rate_at(self.step)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    def save(self, path: Path) -> None:
        """At once or not at all."""
        draft = path.with_suffix(".new")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "losses": self.losses, "about": self.about}
        torch.save(state, draft)
        draft.replace(path)

    def load(self, path: Path) -> None:
        """Go on with what `save` wrote.

        Raises:
            ValueError: for a run of another variant, seed or recipe.
        """
        state = torch.load(path, map_location=self.device, weights_only=True)
        *names, recipe = json.loads(state["about"])
        if names != json.loads(self.about)[:-1] or not is_of(recipe, self.recipe):
            raise ValueError(
                f"{path.parent} holds a run of another variant, seed or recipe: choose another"
            )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.losses = state["step"], state["losses"]


def test(run: Run, until: float) -> list[dict[str, Any]]:
    """One entry a task and length, the shortest length first, as far as the time goes."""
    run.model.eval()
    found: list[dict[str, Any]] = []
    for length, rows in run.recipe.tests:
        for task in run.recipe.tasks:
            if time.monotonic() > until:
                return found
            found.append(_tested(run, task, length, rows))
            print({name: found[-1][name] for name in ("task", "length", "right")}, flush=True)
    return found


def _tested(run: Run, task: Task, length: int, rows: int) -> dict[str, Any]:
    rng = np.random.default_rng((1, length, TASKS.index(task)))
    at_once = max(1, TEST_TOKENS // length)
    right, depth, hops, causes = [], [], [], []
    for first in range(0, rows, at_once):
        batch = make_batch(rng, [task] * min(at_once, rows - first), length)
        row, number = np.nonzero(batch.places >= 0)
        predicted, cause = _predicted(run, batch, row, number)
        right.append((predicted[:, None] == batch.right[row, number]).any(1))
        depth.append(np.minimum(batch.needles[row, number, 0] * DEPTHS // length, DEPTHS - 1))
        hops.append(batch.hops[row, number])
        causes += cause
    is_right = np.concatenate(right)
    entry: dict[str, Any] = {
        "task": task,
        "length": length,
        "questions": len(is_right),
        "right": _share(is_right),
        "by_depth": _by(is_right, np.concatenate(depth), DEPTHS),
        "by_hops": _by(is_right, np.concatenate(hops), 3),
    }
    if causes:
        entry["causes"] = _told(causes, is_right)
    return entry


def _predicted(
    run: Run, batch: Batch, row: np.ndarray, number: np.ndarray
) -> tuple[np.ndarray, list[dict[str, float]]]:
    """The model's answers, int (N,), and the causes of each; one forward gives both."""
    found: list[Tensor] = []
    causes = causes_of(
        run.model, lambda: found.append(logits_of(run.model, batch, row, number).argmax(-1)), batch
    )
    return found[0].cpu().numpy(), causes


def _told(causes: list[dict[str, float]], is_right: np.ndarray) -> dict[str, Any]:
    """Means over the right answers and over the wrong ones."""
    return {
        name: {column: _share(np.array([each[column] for each in part])) for column in causes[0]}
        for name, chosen in (("right", is_right), ("wrong", ~is_right))
        if (part := [each for each, is_one in zip(causes, chosen, strict=True) if is_one])
    }


def _by(is_right: np.ndarray, kind: np.ndarray, count: int) -> list[float | None]:
    """Share of the right ones of each kind; None where there is none."""
    return [_share(is_right[kind == i]) if (kind == i).any() else None for i in range(count)]


def _share(values: np.ndarray) -> float:
    return round(float(np.mean(values)), 4)


def recall(
    variant: str,
    seed: int,
    folder: Path,
    seconds: float,
    recipe: Recipe,
    checkpoint: Path | None = None,
) -> Row:
    """Train and test within `seconds`; returns the row.

    Raises:
        ValueError: the folder holds another run; or the recipe chooses a layer, and there is no
            checkpoint, or the variant has dense layers of its own.
    """
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    with _kernels(variant, recipe):
        lost = _lost(recipe, variant, folder, checkpoint, device) if recipe.choice_length else {}
        chosen = most_lossy(lost, 1)
        run = Run(recipe, variant, seed, device, checkpoint, chosen)
        if (folder / STATE).exists():
            run.load(folder / STATE)
        run.train(begun + seconds * (1 - CLOSING))
        run.save(folder / STATE)
        if variant == "dense" and run.step == recipe.steps:
            run.model.save_pretrained(folder / MODEL)
        with torch.compiler.set_stance("force_eager"):  # so that hooks look on
            tests = test(run, begun + seconds)
    is_tested = len(tests) == len(recipe.tests) * len(recipe.tasks)
    row = {
        "case": f"recall/{variant} {recipe.name} {recipe.steps} seed {seed}",
        "target": "recall",
        "variant": variant,
        "seed": seed,
        "recipe": dataclasses.asdict(recipe),
        **machine.describe(device),
        "status": "ok" if run.step == recipe.steps and is_tested else "stopped",
        "steps": run.step,
        "trained_length": recipe.stage_at(run.step - 1).length if recipe.stages else 0,
        "dense_layers": [
            number
            for number, layer in enumerate(run.model.model.layers)
            if not hasattr(layer.self_attn, "nsa")
        ],
        **({"lost": lost, "lost_length": recipe.choice_length} if lost else {}),
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "seconds": round(time.monotonic() - begun, 1),
        "losses": run.losses,
        "tests": tests,
    }
    write_rows(folder / ROW, [row])
    return row


def _lost(
    recipe: Recipe, variant: str, folder: Path, checkpoint: Path | None, device: torch.device
) -> dict[int, float]:
    """`lost_as_nsa`, measured once a folder."""
    if checkpoint is None:
        raise ValueError(f"recipe {recipe.name} chooses a layer of a checkpoint; expected one")
    path = folder / CHOICE_FILE
    if not path.exists():
        path.write_text(json.dumps(lost_as_nsa(recipe, variant, checkpoint, device)))
    return {int(layer): nats for layer, nats in json.loads(path.read_text()).items()}


@contextlib.contextmanager
def _kernels(variant: str, recipe: Recipe) -> Iterator[None]:
    found = variants()[variant]
    has_dense = found.attention == "dense" or "dense" in found.layers or recipe.choice_length
    with best_dense() if has_dense else contextlib.nullcontext():
        yield


def main() -> None:
    """Train, test."""
    parser = parser_of(__doc__)
    parser.add_argument("variant", choices=variants())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--recipe", choices=RECIPES, help="text with --checkpoint, else scratch")
    parser.add_argument("--checkpoint", type=Path, help="dense, or of that variant")
    given = parser.parse_args()
    recipe = RECIPES[given.recipe or ("text" if given.checkpoint else "scratch")]
    if recipe.of_checkpoint != (given.checkpoint is not None):
        expected = "expected" if recipe.of_checkpoint else "expected no"
        parser.error(f"--recipe {recipe.name}: {expected} --checkpoint")
    row = recall(given.variant, given.seed, given.out, given.seconds, recipe, given.checkpoint)
    print({name: row[name] for name in ("case", "status", "steps", "seconds")})


if __name__ == "__main__":
    main()
