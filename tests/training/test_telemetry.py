"""Telemetry of a loop of one's own: rows, gates, counters, heartbeat, and what it leaves alone."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from torch import nn
from training.tiny_run import batch, loss_of, patched, rows_of

import nsa_flex
from nsa_flex.hot_path import SyncDetector
from nsa_flex.training import TrainingError
from nsa_flex.training.alignment import recalls
from nsa_flex.training.block_mass import selection_recall, spread_queries
from nsa_flex.training.telemetry import ARTEFACTS, last_of_each_step, read_rows, schema
from nsa_flex.training.telemetry import observe as observing
from nsa_flex.training.telemetry.observe import STATISTICS, observe, probe_call, statistics
from nsa_flex.training.telemetry.rows import RowFile
from patching.tiny_models import NSA


def run(model, folder, steps, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with nsa_flex.telemetry(model, folder, **options) as told:
        for _ in range(steps):
            tokens = batch()
            loss = loss_of(model, tokens)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            told.step(loss, tokens=tokens.numel(), learning_rate=0.1, grad_norm=norm)
    return losses


def test_every_artefact_is_written_and_valid(tmp_path: Path) -> None:
    losses = run(patched(), tmp_path, 6, probe=batch(1), every=2, gates_every=4)
    found = rows_of(tmp_path)
    rows = found["training"]
    assert [row["step"] for row in rows] == [2, 4, 6]
    means = [sum(losses[i : i + 2]) / 2 for i in (0, 2, 4)]
    assert [row["loss"] for row in rows] == pytest.approx(means, rel=1e-6)
    assert [row["tokens"] for row in rows] == [288, 576, 864]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert [(row["step"], row["layer"]) for row in found["gates"]] == [
        (step, f"model.layers.{layer}.self_attn.nsa") for step in (0, 4) for layer in (0, 1)
    ]
    counters = found["fallback_counters"]
    assert [(row["step"], row["branch"], row["calls"]) for row in counters] == [
        (step, branch, 8 if step else 0)
        for step in (0, 4)
        for branch in ("compressed", "selected", "sliding")
    ]
    assert {(row["backend"], row["fallback"]) for row in counters} == {("dense", 1)}
    assert {row["reason"] for row in counters} == {"on cpu: trains everywhere"}
    beats = found["heartbeat"]
    assert [beats[0]["phase"], beats[-1]["phase"]] == ["starting", "done"]
    assert beats[-1]["step"] == 6
    assert beats[-1]["backends"] == dict.fromkeys(("compressed", "selected", "sliding"), "dense")


@pytest.mark.parametrize("artefact", ARTEFACTS)
def test_a_schema_refuses_another_row(artefact: str, tmp_path: Path) -> None:
    run(patched(), tmp_path, 1, probe=batch(1), every=1)
    write_others(tmp_path)
    (row, *_) = read_rows(tmp_path, artefact)
    jsonschema.validate(row, schema(artefact))
    for wrong in ({**row, "step": "two"}, {**row, "more": 1}, {"step": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema(artefact))


def write_others(folder: Path) -> None:
    """What a loop of one's own has none of."""
    rows = {
        "changes": {"time": 1.5, "step": 2, "key": "ranks", "before": "1", "after": "2"},
        "samples": {"session": 1, "step": 2, "prompt": "a\n", "text": "b"},
        "recall": {"step": 2, "layer": "a", "block_recall": None, "score_recall": 0.5},
    }
    for name, row in rows.items():
        file = RowFile(folder, name)
        file.append(row)
        file.close()


def test_gates_are_measured_from_their_multiples_on(tmp_path: Path) -> None:
    """Also by a run that goes on between two of them."""
    run(patched(), tmp_path / "whole", 10, probe=batch(1), every=2, gates_every=3)
    assert steps_of(tmp_path / "whole") == [0, 4, 6, 10]
    run(patched(), tmp_path / "on", 6, probe=batch(1), every=2, gates_every=3, first_step=4)
    assert steps_of(tmp_path / "on") == [4, 6, 10]


def steps_of(folder: Path) -> list[int]:
    return sorted({row["step"] for row in read_rows(folder, "gates")})


def test_statistics_are_those_of_plain_loops() -> None:
    """Against loops over every query and head, of random gates; with documents and without."""
    model = patched()
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.nsa.gates.linear.weight, std=2.0)
    tokens = batch(1, 150)
    bounds = torch.tensor([0, 61, 61, 150])
    for documents in ({}, {"cu_seq_lens_q": bounds}):
        probe = {"input_ids": tokens, **documents}
        for seen in observe(model, probe_call(model, probe)):
            torch.testing.assert_close(statistics(seen)[:-2], torch.tensor(by_loops(seen)))


def test_recall_is_that_of_plain_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over queries, heads and blocks; with documents, of which one is empty, and without."""
    torch.manual_seed(0)
    model, calls = patched(), []

    def noting(*tensors: Any, **options: Any) -> torch.Tensor:
        calls.append((tensors, options))
        return selection_recall(*tensors, **options)

    monkeypatch.setattr(observing, "selection_recall", noting)
    for documents in ({}, {"cu_seq_lens_q": torch.tensor([0, 61, 61, 150])}):
        probe = {"input_ids": batch(1, 150), **documents}
        for seen in observe(model, probe_call(model, probe)):
            tensors, options = calls.pop(0)
            assert (options["start"] is None) == (not documents)
            expected = recall_by_loops(*tensors, **options)
            assert statistics(seen)[-2:].tolist() == pytest.approx(expected, abs=1e-5)
            assert all(0 < x < 1 for x in expected)


def recall_by_loops(query, key, blocks, config, scale, *, start, real):
    tokens, size = key.shape[2], config.select_block_size
    places = config.num_selected_blocks - config.num_forced_blocks
    hits, held = [], []
    for t in spread_queries(tokens, key.device).tolist():
        if real is not None and not real[0, t]:
            continue
        first = 0 if start is None else int(start[0, t])
        oldest = first // size + config.num_initial_blocks
        free = range(oldest, t // size - config.num_local_blocks + 1)
        for head in range(key.shape[1]):
            mass = torch.zeros(-(-tokens // size))
            for q in query[0, 2 * head : 2 * head + 2, t]:
                p = (key[0, head, first : t + 1] @ q * scale).softmax(-1) / 2
                for place, x in enumerate(p, first):
                    mass[place // size] += x
            selected = {j for j in blocks[0, head, t].tolist() if j >= 0}
            held.append(mass[list(selected)].sum().item())
            if len(free) > places:
                best = sorted(free, key=lambda j: -mass[j].item())[:places]
                hits.append(len(selected & set(best)) / places)
    return [sum(hits) / len(hits), sum(held) / len(held)]


def test_recall_beside_that_of_a_conversion(tmp_path: Path) -> None:
    """The same two numbers as recall.csv has of the same row."""
    torch.manual_seed(0)
    model, tokens = patched(), batch(1, 150)
    expected = recalls(model, tokens)
    run(model, tmp_path, 1, probe=tokens, every=1, gates_every=9)
    for row, numbers in zip(rows_of(tmp_path)["gates"], expected, strict=True):
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, abs=2e-5)


def by_loops(seen):
    gates, blocks, size = seen.gates.double(), seen.blocks, NSA.select_block_size
    real = torch.ones(gates.shape[2], dtype=torch.bool) if seen.real is None else seen.real[0]
    shares, entropies, below, above, distances = [], [], [], [], []
    chosen, possible = set(), set()
    for t in range(gates.shape[2]):
        if not real[t]:
            continue
        for row in gates[0, :, t]:
            share = row.abs() / row.abs().sum()
            shares.append(share)
            entropies.append(-sum(x * math.log(x) for x in share.tolist() if x > 0))
            below += [float(x < 0.01) for x in row]
            above += [float(x > 0.99) for x in row]
        first = 0 if seen.document_start is None else int(seen.document_start[0, t]) // size
        own = t // size
        free = range(first + NSA.num_initial_blocks, own - NSA.num_local_blocks + 1)
        for head in range(blocks.shape[1]):
            possible |= {(head, j) for j in free}
            for j in blocks[0, head, t].tolist():
                if j in free:
                    chosen.add((head, j))
                    distances.append((own - j) * size)
    flat = gates[0, :, real].flatten(0, 1)
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    return [
        *flat.mean(0).tolist(),
        *torch.stack(shares).mean(0).tolist(),
        *(mean(xs) for xs in (entropies, below, above)),
        1 - len(chosen) / len(possible),
        mean(distances),
    ]


def test_the_statistics_have_the_names_of_the_columns() -> None:
    assert STATISTICS[:3] == ["gate_compressed", "gate_selected", "gate_sliding"]
    assert STATISTICS[-4:] == ["never_chosen", "distance", "block_recall", "score_recall"]


def test_short_rows_leave_nothing_to_choose(tmp_path: Path) -> None:
    run(patched(), tmp_path, 1, probe=batch(1, 12), every=1)
    for row in rows_of(tmp_path)["gates"]:
        assert row["never_chosen"] is row["block_recall"] is None
        assert row["score_recall"] == pytest.approx(1)


def test_the_probe_changes_neither_training_nor_random_numbers() -> None:
    torch.manual_seed(3)
    model = patched()
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    model.model.layers[0].eval()
    tokens, state = batch(1), torch.get_rng_state()
    observed = observe(model, lambda: (torch.rand(3), probe_call(model, tokens)()))
    assert len(observed) == 2
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
    assert model.training
    assert not model.model.layers[0].training
    assert model.model.layers[0].self_attn.nsa._forward_pre_hooks == {}


def test_no_host_read_between_logging_steps(tmp_path: Path) -> None:
    """The step that is no logging step reads nothing; the logging step does, so it would show."""
    model, tokens = patched(), batch()
    loss = loss_of(model, tokens).detach()
    with nsa_flex.telemetry(model, tmp_path, probe=batch(1), every=2) as told:
        with SyncDetector() as quiet:
            told.step(loss, tokens=4)
        with SyncDetector() as loud:
            told.step(loss, tokens=4)
    assert quiet.findings == []
    assert loud.findings != []


def test_the_probe_is_launched_before_the_loss_is_read(tmp_path: Path) -> None:
    """The device still computes the step then. Its numbers are read once, after the loss."""
    model, tokens = patched(), batch(1)
    loss, before = loss_of(model, tokens).detach(), []

    def probe():
        before.append(list(syncs.findings))
        return model(input_ids=tokens, use_cache=False)

    syncs = SyncDetector()
    options = {"probe": probe, "every": 1, "gates_every": 1}
    with nsa_flex.telemetry(model, tmp_path, **options) as told, syncs:
        told.step(loss)
    assert before == [[], []]
    assert [finding.detail for finding in syncs.findings] == ["Tensor.item()", "Tensor.tolist()"]
    assert [row["step"] for row in rows_of(tmp_path)["gates"]] == [0, 0, 1, 1]


def test_a_batch_as_the_probe_has_logits_of_one_token_alone(tmp_path: Path) -> None:
    model, tokens = patched(), batch(1)
    for probe in (tokens, {"input_ids": tokens}):
        assert probe_call(model, probe)().logits.shape[1] == 1
    assert probe_call(model, {"input_ids": tokens, "labels": tokens})().logits.shape[1] > 1


def test_compiled_layers_stay_compiled_as_they_are(tmp_path: Path) -> None:
    """Neither a graph break nor another compilation, measured gates in between included."""
    model = patched()
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=count, fullgraph=True)
    loss_of(model, batch()).backward()
    num_graphs = len(compiled)
    assert num_graphs > 0
    run(model, tmp_path, 3, probe=batch(1, 40), every=1, gates_every=1)
    assert len(compiled) == num_graphs
    assert len(rows_of(tmp_path)["gates"]) == 2 * 4


def test_nsa_attention_modules_are_seen(tmp_path: Path) -> None:
    model = nsa_flex.NSAAttention(32, 4, 2, config=NSA)
    x = torch.randn(1, 90, 32)
    bounds = torch.tensor([0, 40, 90])
    for call in (lambda: model(x), lambda: model(x, cu_seqlens=bounds)):
        (seen,) = observe(model, call)
        assert seen.gates.shape[3] == 3
        torch.testing.assert_close(statistics(seen)[:-2], torch.tensor(by_loops(seen)))
        assert 0 < seen.recall[1] < 1


def test_strict_names_the_branch_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"compressed branch of model\.layers\.0.* on dense"):
        run(patched(), tmp_path / "run", 1, probe=batch(1), strict=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="strict=True needs a probe"):
        nsa_flex.telemetry(patched(), tmp_path, strict=True)


def test_strict_takes_what_was_asked_for(tmp_path: Path) -> None:
    model = nsa_flex.NSAAttention(32, 4, 2, config=NSA, backend="dense")
    with nsa_flex.telemetry(
        model, tmp_path, probe=lambda: model(torch.randn(1, 9, 32)), strict=True
    ):
        pass
    assert {row["fallback"] for row in rows_of(tmp_path)["fallback_counters"]} == {0}


@pytest.mark.parametrize("name", ["every", "gates_every", "heartbeat_seconds"])
def test_counts_are_positive(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}=0 must be more than 0"):
        nsa_flex.telemetry(patched(), tmp_path, **{name: 0})


@pytest.mark.parametrize("name", ["first_step", "sent_bytes"])
def test_counts_are_not_negative(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}=-1 must be at least 0"):
        nsa_flex.telemetry(patched(), tmp_path, **{name: -1})


def test_what_a_step_cannot_have_is_refused(tmp_path: Path) -> None:
    with nsa_flex.telemetry(patched(), tmp_path, every=1) as run:
        with pytest.raises(ValueError, match=r"loss has shape \(2,\); expected one number"):
            run.step(torch.ones(2))
        with pytest.raises(ValueError, match="tokens=-5 must be at least 0"):
            run.step(torch.ones(()), tokens=-5)
        run.step(torch.ones(1), tokens=5)
    assert [row["loss"] for row in read_rows(tmp_path, "training")] == [1.0]


def test_a_padded_probe_is_refused() -> None:
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask has padding"):
        probe_call(patched(), {"input_ids": batch(1, 9), "attention_mask": mask})


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path) -> None:
    nan = torch.tensor(float("nan"))
    with (
        pytest.raises(TrainingError, match="loss is nan at step 1: resume from the last checkpo"),
        nsa_flex.telemetry(patched(), tmp_path, every=1) as told,
    ):
        told.step(nan)
    assert read_rows(tmp_path, "heartbeat")[-1]["phase"] == "failed"
    assert math.isnan(read_rows(tmp_path, "training")[-1]["loss"])


def test_a_stalled_run_is_visible_from_outside(tmp_path: Path) -> None:
    with nsa_flex.telemetry(patched(), tmp_path, every=1, heartbeat_seconds=0.05) as told:
        told.step(torch.tensor(1.0))
        time.sleep(0.4)
        beats = read_rows(tmp_path, "heartbeat")
    stalled = [row["step_age"] for row in beats if row["step"] == 1]
    assert len(stalled) > 3
    assert stalled == sorted(stalled)
    assert stalled[-1] > 0.2


def test_rows_are_appended_and_a_torn_tail_is_cut(tmp_path: Path) -> None:
    run(patched(), tmp_path, 2, every=1)
    path = tmp_path / "training.csv"
    before = path.read_text()
    path.write_text(before + "1,3,0.5")
    run(patched(), tmp_path, 1, every=1)
    after = path.read_text()
    assert after.startswith(before)
    assert [(row["session"], row["step"]) for row in read_rows(tmp_path, "training")] == [
        (1, 1),
        (1, 2),
        (2, 1),
    ]
    assert [
        (row["session"], row["step"]) for row in last_of_each_step(read_rows(tmp_path, "training"))
    ] == [(2, 1)]


def test_a_file_of_fewer_columns_is_read_and_gets_them(tmp_path: Path) -> None:
    """As a version wrote it that knew no recall; other columns are refused, nothing is touched."""
    run(patched(), tmp_path, 1, probe=batch(1), every=1)
    path, rows = tmp_path / "gates.csv", read_rows(tmp_path, "gates")
    lines = [line.split(",") for line in path.read_text().splitlines()]
    path.write_text("".join(",".join(cells[:-2]) + "\n" for cells in lines))
    former = [{**row, "block_recall": None, "score_recall": None} for row in rows]
    assert read_rows(tmp_path, "gates") == former
    run(patched(), tmp_path, 1, probe=batch(1), every=1)
    found = rows_of(tmp_path)["gates"]
    assert found[: len(rows)] == former
    assert [row["session"] for row in found[len(rows) :]] == [2] * len(rows)
    assert all(row["score_recall"] for row in found[len(rows) :])

    texts = {"entropy,": ("", "no entropy"), "layer,": ("layer,more,", "more")}
    for column, (instead, named) in texts.items():
        other = path.read_text().replace(column, instead, 1)
        (tmp_path / "other").mkdir(exist_ok=True)
        (tmp_path / "other" / "gates.csv").write_text(other)
        for call in (RowFile, read_rows):
            with pytest.raises(ValueError, match=rf"other columns .* \({named}\): read it with"):
                call(tmp_path / "other", "gates")
        assert (tmp_path / "other" / "gates.csv").read_text() == other


def test_rows_with_more_columns_are_on_the_disk_before_they_replace_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, flushed = tmp_path / "gates.csv", []
    RowFile(tmp_path, "gates").close()
    path.write_text(path.read_text().replace(",score_recall", ""))
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(os.fstat(file)))
    RowFile(tmp_path, "gates")
    assert [(each.st_ino, each.st_size) for each in flushed] == [
        (path.stat().st_ino, path.stat().st_size)
    ]


def test_a_row_needs_every_column(tmp_path: Path) -> None:
    file = RowFile(tmp_path, "training")
    with pytest.raises(ValueError, match=r"row of training\.csv has \['step'\], not \['session'"):
        file.append({"step": 1})
    file.close()


def test_heartbeats_are_lines_of_json(tmp_path: Path) -> None:
    run(patched(), tmp_path, 1, every=1)
    lines = (tmp_path / "heartbeat.jsonl").read_text().splitlines()
    assert [json.loads(line)["session"] for line in lines] == [1, 1]
