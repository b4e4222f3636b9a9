"""What the models of the study of recall are trained on, and tested on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from nsa_flex import NSAConfig
from nsa_flex.bench.quality.recall_tasks import MATCHING, TASKS, Task

ASSOCIATIVE_WEIGHT = 4  # such rows are drawn so many times as often: other tasks build on them


@dataclass(frozen=True)
class Stage:
    """Rows of one length, of random tasks: `steps` of them with `rows` each."""

    length: int
    rows: int
    steps: int
    tasks: tuple[Task, ...] = TASKS

    @property
    def shares(self) -> np.ndarray:
        """Of each task in the rows."""
        weights = np.array(
            [ASSOCIATIVE_WEIGHT if task == "associative" else 1 for task in self.tasks]
        )
        return weights / weights.sum()


SHORT = Stage(48, 1536, 800, MATCHING)  # teaches matching of keys


@dataclass(frozen=True)
class Recipe:
    """Model, curriculum and tests.

    Args:
        tests: (length, rows of each task).
        rope_theta: so large that pairs of a key keep their angle over the longest row.
        of_checkpoint: the model is one that was trained before, and has its own sizes.
        choice_length: of rows on which the layer is chosen that stays dense, the one that loses
            most as NSA; 0 keeps none.
    """

    name: str = "scratch"
    stages: tuple[Stage, ...] = (
        SHORT,
        Stage(256, 128, 800),
        Stage(512, 64, 150),
        Stage(1024, 32, 200),
        Stage(2048, 16, 150),
        Stage(4096, 8, 200),
        Stage(8192, 8, 150),
        Stage(16384, 4, 200),
        Stage(32768, 4, 200),
        Stage(65536, 4, 250),
    )
    tests: tuple[tuple[int, int], ...] = (
        (8192, 64),
        (16384, 64),
        (32768, 48),
        (65536, 32),
        (131072, 8),
    )
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e7
    learning_rate: float = 2e-3
    warmup_steps: int = 100
    nsa: NSAConfig = dataclasses.field(default_factory=NSAConfig)
    of_checkpoint: bool = False
    choice_length: int = 0

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """That are tested: those that some stage trains, all if there is none."""
        trained = {task for stage in self.stages for task in stage.tasks} or {*TASKS}
        return tuple(task for task in TASKS if task in trained)

    def stage_at(self, step: int) -> Stage:
        """That of a step, counted from 0."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise ValueError(f"step={step} is past the last stage")

    def rate_at(self, step: int) -> float:
        """Warm-up; held up to the last stage, where it falls linearly to a tenth."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        last = self.stages[-1].steps
        into_last = max(0, step - (self.steps - last)) / last
        return self.learning_rate * warm * (1 - 0.9 * into_last)


# Of what is spread over the row, alone.
AGGREGATION = Recipe(
    name="aggregation",
    stages=tuple(
        Stage(length, rows, steps, ("frequent", "share"))
        for length, rows, steps in (
            (256, 128, 1500),
            (512, 64, 250),
            (1024, 32, 250),
            (2048, 16, 250),
            (4096, 8, 250),
            (8192, 8, 150),
            (16384, 4, 150),
            (32768, 4, 150),
            (65536, 4, 150),
        )
    ),
)
# Of a model that has learnt from text.
TEXT = Recipe(
    name="text",
    of_checkpoint=True,
    stages=(
        SHORT,
        Stage(256, 128, 1200),
        Stage(1024, 32, 400),
        Stage(4096, 8, 300),
        Stage(16384, 2, 150),
        Stage(65536, 1, 60),
    ),
    tests=((8192, 128), (32768, 32), (65536, 16)),
    learning_rate=3e-4,
)
# Of one that has learnt the tasks with dense attention, with less than a fifth of its tokens.
CONVERSION = dataclasses.replace(
    TEXT,
    name="conversion",
    stages=(Stage(4096, 8, 150), Stage(16384, 4, 150), Stage(65536, 4, 100)),
    tests=((8192, 128), (32768, 64), (65536, 32)),
    warmup_steps=20,
)
ONE_DENSE = dataclasses.replace(CONVERSION, name="one-dense", choice_length=65536)
PATCHED = dataclasses.replace(CONVERSION, name="patched", stages=())
RECIPES = {
    each.name: each for each in (Recipe(), AGGREGATION, TEXT, CONVERSION, ONE_DENSE, PATCHED)
}
