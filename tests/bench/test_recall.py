"""The study of recall at a tiny size: rows, a run in two pieces, causes, table and heat map."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa_flex import NSAConfig
from nsa_flex.bench.quality import recall as module
from nsa_flex.bench.quality.recall import (
    MODEL,
    ROW,
    STATE,
    Run,
    Steps,
    build,
    lost_as_nsa,
    recall,
)
from nsa_flex.bench.quality.recall_causes import causes_of
from nsa_flex.bench.quality.recall_recipes import (
    ONE_DENSE,
    PATCHED,
    RECIPES,
    Recipe,
    Stage,
)
from nsa_flex.bench.quality.recall_report import by_task, draw
from nsa_flex.bench.quality.recall_report import recall as table_of
from nsa_flex.bench.quality.recall_tasks import (
    ASK,
    KEYS,
    NUMBERS,
    REFERENCES,
    SET,
    TASKS,
    VALUES,
    VOCABULARY,
    WORDS,
    Batch,
    Task,
    make_batch,
)
from nsa_flex.bench.quality.variants import config_of
from nsa_flex.bench.report.rows import is_of, read_rows
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

TINY = Recipe(
    stages=(Stage(240, 2, 2), Stage(256, 1, 2)),
    tests=((240, 1), (320, 1)),
    hidden_size=32,
    num_layers=2,
    head_dim=8,
    warmup_steps=1,
    nsa=NSAConfig(8, 4, 8, 4, window_size=12),
)


def rows_of(task: Task, count: int = 4, length: int = 1024) -> Batch:
    return make_batch(np.random.default_rng(0), [task] * count, length)


def facts_of(row: np.ndarray) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place in np.flatnonzero(row == SET):
        found.setdefault(int(row[place + 1]), []).append(int(row[place + 2]))
    return found


@pytest.mark.parametrize("task", TASKS)
def test_an_answer_follows_its_question_and_needles_come_before(task: Task) -> None:
    batch = rows_of(task)
    for row in range(len(batch.ids)):
        asked = batch.places[row] >= 0
        places = batch.places[row][asked]
        assert (batch.ids[row, places + 1] == batch.answers[row][asked]).all()
        assert places[-1] == batch.ids.shape[1] - 2
        assert (batch.right[row][asked] == batch.answers[row][asked][:, None]).any(1).all()
        needles = batch.needles[row][asked]
        assert (needles.max(1) < places[0]).all()
        assert (needles.max(1) > 0).all()


@pytest.mark.parametrize(("task", "before"), [("pairs", False), ("previous", True)])
def test_rows_that_teach_matching(task: Task, before: bool) -> None:
    """Such rows stand beside each other in a step; no token of a pair is twice in the body."""
    batch = make_batch(np.random.default_rng(0), [task, "previous", task], 48)
    for row in (0, 2):
        asked = batch.places[row] >= 0
        assert asked.sum() == (46 if before else 10)
        for place, answer in zip(batch.places[row][asked], batch.answers[row][asked], strict=True):
            if before:
                assert answer == batch.ids[row, place - 1]
            else:
                body = batch.ids[row, : batch.places[row, 0]]
                first, *more = np.flatnonzero(body == batch.ids[row, place])
                assert not more
                assert answer == batch.ids[row, first + 1] == batch.ids[row, place + 1]
    for length, message in ((31, "at least 32"), (385, "at most 384 for pairs")):
        with pytest.raises(ValueError, match=message):
            make_batch(np.random.default_rng(0), ["pairs"], length)


@pytest.mark.parametrize("task", ["associative", "single", "multi_key", "multi_value"])
def test_answers_are_those_of_the_facts(task: Task) -> None:
    batch = rows_of(task)
    for row, number in np.argwhere(batch.places >= 0):
        facts = facts_of(batch.ids[row])
        values = facts[int(batch.ids[row, batch.places[row, number]])]
        answer = int(batch.answers[row, number])
        needle = batch.needles[row, number, 0]
        assert batch.ids[row, needle] == answer
        assert answer in VALUES
        assert answer in values
        if task != "multi_value":
            assert values == [answer]
    counts = {"associative": 32, "single": 1, "multi_key": 8, "multi_value": 4}
    assert ((batch.places >= 0).sum(1) == counts[task]).all()


def test_values_that_were_given_are_not_right_again() -> None:
    batch = rows_of("multi_value", 1)
    values = [int(batch.answers[0, i]) for i in range(4)]
    assert [[x for x in right if x >= 0] for right in batch.right[0, :4].tolist()] == [
        values[i:] for i in range(4)
    ]


def test_chains_of_names_end_in_their_value() -> None:
    batch = rows_of("tracking")
    for row, number in np.argwhere(batch.places >= 0):
        facts = facts_of(batch.ids[row])
        token, hops = int(batch.ids[row, batch.places[row, number]]), 0
        while token not in VALUES:
            token = facts[token][0]
            if token in REFERENCES:
                token, hops = token - REFERENCES.start + KEYS.start, hops + 1
        assert (token, hops) == (batch.answers[row, number], batch.hops[row, number])
        assert (batch.needles[row, number] >= 0).sum() == hops + 1


def test_words_are_as_frequent_as_their_answers_say() -> None:
    for task, length in ((task, n) for task in ("frequent", "share") for n in (197, 256, 1024)):
        batch = rows_of(task, 4, length)
        for row, number in np.argwhere(batch.places >= 0):
            body = batch.ids[row, : batch.places[row, 0]]
            words, counts = np.unique(body[np.isin(body, np.array(WORDS))], return_counts=True)
            asked, answer = batch.ids[row, batch.places[row, number]], batch.answers[row, number]
            if task == "frequent":
                assert asked == ASK
                assert words[counts.argmax()] == answer
                assert counts.max() == 4 * (counts.sum() // 32) >= 4 * sorted(counts)[-2]
            else:
                share = counts[words == asked] / counts.sum()
                assert share == 2.0 ** (answer - NUMBERS.start) / 32


def test_rows_too_short_for_the_facts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"length=64 must be at least 197"):
        make_batch(np.random.default_rng(0), ["single"], 64)


def test_layers_are_those_of_the_variant() -> None:
    layers = build(TINY, "dense-nsa", 0).model.layers
    assert [hasattr(layer.self_attn, "nsa") for layer in layers] == [False, True]
    with pytest.raises(ValueError, match="variant is 'window'; expected one without layers of"):
        build(TINY, "window", 0)


def test_a_cause_is_what_a_layer_selected_and_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rows_of("single", 2, 320)
    model = build(TINY, "mean", 0)
    for layer, bias in zip(model.model.layers, (20.0, -20.0), strict=True):
        with torch.no_grad():
            layer.self_attn.nsa.gates.linear.bias.view(-1, 3)[:, 1] = bias

    def needle_at(place: int) -> list[dict[str, float]]:
        batch.needles[:, 0, 0] = place
        return causes_of(model, lambda: model(torch.from_numpy(batch.ids)), batch)

    # The first block is always selected; the last one, which lies after the question, never.
    seen, unseen = needle_at(3), needle_at(327)
    for each in seen:
        assert each["selected"] == 1.0
        assert each["gate"] == pytest.approx(0.5, abs=1e-3)  # 1 of 1 + ½ + ½, in the open layer
    for each in unseen:
        assert (each["selected"], each["gate"]) == (0.0, 0.0)
        assert each["gate_anywhere"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("variant", ["dense", "mean"])
def test_a_run_goes_on_and_becomes_a_table(variant: str, tmp_path: Path) -> None:
    whole = Run(TINY, variant, 0, torch.device("cpu"))
    whole.train(float("inf"))
    first = Run(TINY, variant, 0, torch.device("cpu"))
    for i in range(3):
        first._step(Steps(TINY, 0)[i])
    folder = tmp_path / "run"
    folder.mkdir()
    first.save(folder / STATE)
    row = recall(variant, 0, folder, 1e6, TINY)
    assert read_rows(folder / ROW) == [json.loads(json.dumps(row))]
    assert (row["status"], row["steps"], row["trained_length"]) == ("ok", 4, 256)
    state = torch.load(folder / STATE, weights_only=True)["model"]
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(state[name], value)
    tests = {(test["task"], test["length"]): test for test in row["tests"]}
    assert len(tests) == 2 * len(TASKS)
    assert tests["single", 240]["questions"] == 1
    assert all(("causes" in test) == (variant == "mean") for test in row["tests"])
    table = table_of([row])
    assert list(table.task)[2] == "multi key"
    assert list(table.columns)[2:7] == ["steps", "task", "seeds", "240", "320"]
    if variant == "mean":  # of 240, which is trained on; 320 is not
        for test in row["tests"]:
            test["causes"]["wrong"] = {"selected": test["length"] / 1000, "gate": 0.0}
        assert set(table_of([row])["missed: selected"]) == {"24"}
    longer = copy.deepcopy(row)
    longer["recipe"]["stages"][0]["steps"] += 1
    longer["tests"][0]["task"] = "of earlier days"
    table = table_of([row, longer])  # a recipe that has changed is not of the same line
    assert list(table.steps) == ["4"] * len(TASKS) + ["5"] * len(TASKS)
    assert "of earlier days" not in {*table.task}
    other = copy.deepcopy(row)
    for test in other["tests"]:
        test["right"] = {240: 1.0, 320: 0.5}[test["length"]]
    right = {test["length"]: test["right"] for test in row["tests"] if test["task"] == "share"}
    (line,) = by_task([row, other]).to_dict("records")
    means = [50 * (right[240] + 1.0), 50 * (right[320] + 0.5)]
    assert line["share"] == " / ".join(f"{mean:.0f}" for mean in means)
    assert (line["seeds"], line["multi key"].count("/")) == ("2", 1)
    other["tests"] = [test for test in other["tests"] if test["length"] == 240]
    (line,) = by_task([row, other]).to_dict("records")  # a length that all have
    assert (line["lengths"], line["share"]) == ("240", f"{means[0]:.0f}")
    assert by_task([{**row, "status": "stopped"}]).empty
    longer["tests"] = [each for each in longer["tests"] if each["task"] == "share"]
    draw([longer], tmp_path / "no.png")  # nothing that has a depth
    assert not (tmp_path / "no.png").exists()
    draw([row, longer], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5_000
    for other in (1, TINY), (0, dataclasses.replace(TINY, learning_rate=1e-3)):
        with pytest.raises(ValueError, match="holds a run of another variant, seed or recipe"):
            recall(variant, other[0], folder, 1e6, other[1])


def test_a_run_from_a_model_of_text(tmp_path: Path) -> None:
    """Its layers, patched or not, and places for the tokens of the tasks."""
    for variant, patched in (("dense", False), ("mean", True)):
        config = config_of(variant, "tiny")
        before = build_model(config.model, config.data, BYTES)
        before.save_pretrained(tmp_path / variant)
        model = build(TINY, variant, 0, tmp_path / variant)
        assert model.get_output_embeddings().weight.shape[0] == VOCABULARY
        assert hasattr(model.model.layers[0].self_attn, "nsa") == patched
        for name, value in before.model.layers.state_dict().items():
            assert torch.equal(model.model.layers.state_dict()[name], value), name
    row = recall("mean", 0, tmp_path / "run", 1e6, TINY, tmp_path / "mean")
    assert row["status"] == "ok"


def test_what_learnt_the_tasks_with_dense_attention_is_patched_and_goes_on(tmp_path: Path) -> None:
    recall("dense", 0, tmp_path / "dense", 1e6, TINY)
    learnt = tmp_path / "dense" / MODEL
    untrained = dataclasses.replace(PATCHED, tests=TINY.tests, nsa=TINY.nsa)
    for variant, patched in (("dense", (False, False)), ("dense-nsa", (False, True))):
        row = recall(variant, 0, tmp_path / f"{variant}-patched", 1e6, untrained, learnt)
        assert (row["status"], row["steps"], row["trained_length"]) == ("ok", 0, 0)
        assert row["case"] == f"recall/{variant} patched 0 seed 0"
        assert len(row["tests"]) == 2 * len(TASKS)
        layers = build(untrained, variant, 0, learnt).model.layers
        assert tuple(hasattr(layer.self_attn, "nsa") for layer in layers) == patched
    state = torch.load(tmp_path / "dense" / STATE, weights_only=True)["model"]
    for name, value in build(untrained, "dense", 0, learnt).state_dict().items():
        assert torch.equal(state[name], value), name


def test_the_layer_that_loses_most_stays_dense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recall("dense", 0, tmp_path / "dense", 1e6, TINY)
    checkpoint = tmp_path / "dense" / MODEL
    recipe = dataclasses.replace(
        ONE_DENSE, stages=TINY.stages, tests=TINY.tests, nsa=TINY.nsa, choice_length=300
    )
    losses = {(): 1.0, (0,): 1.5, (1,): 1.2}
    seen = []

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        seen.append(batch.ids)
        layers = model.model.layers
        patched = [i for i, each in enumerate(layers) if hasattr(each.self_attn, "nsa")]
        return torch.tensor(losses[tuple(patched)])

    with monkeypatch.context() as measured:
        measured.setattr("nsa_flex.bench.quality.recall.loss_of", loss_of)
        cpu = torch.device("cpu")
        for _ in range(2):  # on the same rows each time
            assert lost_as_nsa(recipe, "mean", checkpoint, cpu) == pytest.approx({0: 0.5, 1: 0.2})
    assert len(seen) == 6
    assert all(np.array_equal(ids, seen[0]) for ids in seen)
    assert seen[0].shape == (8, 300)
    with monkeypatch.context() as measured:
        measured.setattr(module, "lost_as_nsa", lambda *given: {0: 0.2, 1: 0.5})
        row = recall("mean", 0, tmp_path / "one", 0.0, recipe, checkpoint)
        measured.setattr(module, "lost_as_nsa", lambda *given: {0: 0.5, 1: 0.2})
        assert row["status"] == "stopped"
        row = recall("mean", 0, tmp_path / "one", 1e6, recipe, checkpoint)  # not measured again
    assert (row["status"], row["dense_layers"], row["lost_length"]) == ("ok", [1], 300)
    for variant, given, text in (
        ("dense-nsa", checkpoint, "variant is 'dense-nsa'; expected one whose layers are all"),
        ("dense", checkpoint, "variant is 'dense'; expected one whose layers are all NSA"),
        ("mean", None, "recipe one-dense chooses a layer of a checkpoint; expected one"),
    ):
        with pytest.raises(ValueError, match=text):
            recall(variant, 0, tmp_path / variant, 1e6, recipe, given)
    assert row["case"] == "recall/mean one-dense 4 seed 0"


def test_a_run_from_before_a_setting_goes_on(tmp_path: Path) -> None:
    """Its state and its row name no setting that came later."""
    run = Run(TINY, "dense", 0, torch.device("cpu"))
    *names, recipe = json.loads(run.about)
    del recipe["choice_length"]
    run.about = json.dumps([*names, recipe])
    run.save(tmp_path / STATE)
    assert recall("dense", 0, tmp_path, 1e6, TINY)["status"] == "ok"
    assert is_of(recipe, TINY)
    assert is_of({**recipe, "choice_length": 0}, TINY)
    assert not is_of({**recipe, "choice_length": 1}, TINY)


def test_a_conversion_takes_few_of_the_tokens_of_what_it_starts_from() -> None:
    tokens = {
        name: sum(stage.length * stage.rows * stage.steps for stage in recipe.stages)
        for name, recipe in RECIPES.items()
    }
    assert 0 < tokens["conversion"] < tokens["scratch"] / 5
    assert tokens["one-dense"] == tokens["conversion"]
    assert tokens["patched"] == 0


def test_a_recipe_tests_what_it_trains() -> None:
    assert RECIPES["scratch"].tasks == RECIPES["patched"].tasks == TASKS
    assert RECIPES["aggregation"].tasks == ("frequent", "share")


def test_the_rate_falls_in_the_last_stage_alone() -> None:
    recipe = dataclasses.replace(
        TINY, stages=(Stage(240, 2, 20), Stage(256, 1, 10)), learning_rate=1.0, warmup_steps=4
    )
    rates = [recipe.rate_at(step) for step in range(recipe.steps)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[5:21] == [1.0] * 16
    assert rates[25] == pytest.approx(0.55)
    assert rates[29] == pytest.approx(0.19)


def test_a_run_without_time_is_stopped_and_says_so(tmp_path: Path) -> None:
    row = recall("dense", 0, tmp_path, 0.0, TINY)
    assert (row["status"], row["steps"], row["tests"]) == ("stopped", 0, [])
    assert not (tmp_path / MODEL).exists()


def test_a_run_without_time_for_its_tests_is_tested_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("nsa_flex.bench.quality.recall.test", lambda run, until: [])
        row = recall("dense", 0, tmp_path, 1e6, TINY)
    assert (row["status"], row["steps"]) == ("stopped", TINY.steps)
    row = recall("dense", 0, tmp_path, 1e6, TINY)
    assert (row["status"], row["steps"]) == ("ok", TINY.steps)


@pytest.mark.gpu
def test_a_run_on_the_kernels(tmp_path: Path) -> None:
    recipe = Recipe(stages=(Stage(256, 8, 4), Stage(2048, 2, 4)), tests=((4096, 2),))
    row = recall("mean", 0, tmp_path, 1e6, recipe)
    assert (row["status"], len(row["tests"])) == ("ok", len(TASKS))
    shares = [each["causes"]["wrong"]["selected"] for each in row["tests"] if each["right"] < 1]
    assert all(0 <= share <= 1 for share in shares)
    assert shares
