"""The benchmark's own parts: its reference, its gate, its formulas, its files and verdicts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nsa_flex import NSAConfig
from nsa_flex.bench.cases import layers, patterns, registry
from nsa_flex.bench.cases.branches import deterministically
from nsa_flex.bench.cases.case import Case, Skip
from nsa_flex.bench.cases.core import PACKED
from nsa_flex.bench.cases.layers import LayerCase
from nsa_flex.bench.cases.models import WHOLE, ModelCase, Trainee
from nsa_flex.bench.cases.parts import compression_by_definition
from nsa_flex.bench.cases.registry import PRESETS, TARGETS, preset
from nsa_flex.bench.cases.targets import Task
from nsa_flex.bench.measure import gate, machine, reference, runner, work
from nsa_flex.bench.measure.gate import GateError, check
from nsa_flex.bench.measure.timing import Times, measure
from nsa_flex.bench.report import table
from nsa_flex.bench.report.compare import compare
from nsa_flex.bench.report.rows import Notebook, read_rows, write_rows
from nsa_flex.compression import Compression
from reference import oracle

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
SMALL = NSAConfig(8, 4, 8, 4, window_size=16, compression="mean")
LENGTH = 72
FLOAT64_LIMIT = 64 * np.finfo(np.float64).eps  # sums of some dozen terms, in another order
CEILINGS = {"matrix_tflops": 1.0, "memory_gb_per_s": 10.0}


def small_case(target: str = "core", implementation: str = "nsa-eager", **changes: Any) -> Case:
    sides = {"seq_len": LENGTH, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16}
    options = {"dtype": "float32", "config": SMALL, **sides, **changes}
    return Case(target, implementation, options.pop("train", True), **options)


# The reference: written for some queries of one group, held to the oracle on all of them.


@pytest.fixture
def problem() -> tuple[oracle.Problem, oracle.Forward]:
    rng = np.random.default_rng(torch.initial_seed())
    drawn = oracle.random_problem(rng, SMALL, LENGTH, head_dim=16)
    return drawn, oracle.forward(*drawn, SMALL)


def group_of(problem: oracle.Problem, *names: str) -> list[torch.Tensor]:
    """The second KV head with its two query heads, as float64 tensors."""
    heads = {"query": slice(2, 4)}
    return [torch.from_numpy(getattr(problem, name)[0, heads.get(name, 1)]) for name in names]


@pytest.mark.parametrize("branch", ["compressed", "selected", "sliding"])
def test_reference_is_the_oracle(branch, problem):
    inputs, want = problem
    prefix = "compressed_" if branch == "compressed" else ""
    tensors = group_of(inputs, "query", f"{prefix}key", f"{prefix}value")
    chosen = [torch.from_numpy(want.blocks[0, 1])] if branch == "selected" else []
    got = getattr(reference, branch)(*tensors, torch.arange(LENGTH), 0.25, *chosen, SMALL)
    assert oracle.relative_error(got.numpy(), want.outputs[branch][0, 2:4]) < FLOAT64_LIMIT


def test_dense_reference_is_the_oracle(problem):
    inputs, _ = problem
    got = reference.dense(*group_of(inputs, "query", "key", "value"), torch.arange(LENGTH), 0.25)
    want = oracle.dense_causal(inputs.query, inputs.key, inputs.value)[0, 2:4]
    assert oracle.relative_error(got.numpy(), want) < FLOAT64_LIMIT


def test_reference_scores_and_chooses_as_the_oracle(problem):
    inputs, want = problem
    positions = torch.arange(LENGTH)
    tensors = group_of(inputs, "query", "compressed_key")
    scored = reference.scores(*tensors, positions, 0.25, SMALL)
    assert oracle.relative_error(scored.numpy(), want.scores[0, 1]) < FLOAT64_LIMIT
    blocks, margin = reference.choice(torch.from_numpy(want.scores[0, 1]), positions, SMALL)
    np.testing.assert_array_equal(blocks.numpy(), want.blocks[0, 1])
    assert (margin >= 0).all()
    assert torch.isinf(margin[: SMALL.num_selected_blocks * SMALL.select_block_size]).all()


def test_margin_is_the_lead_over_the_best_block_left_out():
    config = NSAConfig(8, 4, 8, 3, window_size=16)
    scored = torch.tensor([[0.0, 4.0, 3.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    blocks, margin = reference.choice(scored, torch.tensor([47]), config)
    assert blocks.tolist() == [[0, 4, 5]]
    assert margin.item() == math.inf  # all taken are forced
    blocks, margin = reference.choice(
        scored, torch.tensor([47]), dataclasses.replace(config, num_selected_blocks=4)
    )
    assert blocks.tolist() == [[0, 1, 4, 5]]
    assert margin.item() == 0.25


@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_written_out_compression_is_the_module(kind):
    config = dataclasses.replace(SMALL, compression=kind)
    module = Compression(config, num_kv_heads=2, head_dim=16, dtype=torch.float64)
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    key = torch.randn(1, 2, LENGTH, 16, dtype=torch.float64)
    weights = dict(module.named_parameters())
    torch.testing.assert_close(module(key), compression_by_definition(key, weights, config))


# The gate: what is right passes, each planted error is found.


def prepared(case: Case) -> tuple[Task, Any]:
    target = TARGETS[case.target]
    task = target.prepare(case, CPU)
    return task, target.function(case, task, "eager")


def test_gate_passes_what_is_right():
    case = small_case()
    task, function = prepared(case)
    ratios, grad = check(TARGETS["core"], case, task, function)
    assert grad.shape == function(*task.arguments.values()).shape
    assert set(ratios) == {"out", "grad_query", "grad_key", "grad_value", "grad_gates"}
    assert max(ratios.values()) <= 1


class WrongGradient(torch.autograd.Function):
    """The identity whose gradient is half a percent too large."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 1.005 * grad


@pytest.mark.parametrize("name", ["query", "key", "value", "gates"])
def test_gate_finds_a_wrong_gradient(name):
    case = small_case()
    task, function = prepared(case)
    place = list(task.arguments).index(name)

    def wrong(*arguments: torch.Tensor) -> torch.Tensor:
        changed = list(arguments)
        changed[place] = WrongGradient.apply(changed[place])
        return function(*changed)

    with pytest.raises(GateError, match=f"grad_{name}"):
        check(TARGETS["core"], case, task, wrong)


@pytest.mark.parametrize("factor", [1.001, math.nan])
def test_gate_finds_a_wrong_output(factor):
    case = small_case(train=False)
    task, function = prepared(case)
    with pytest.raises(GateError, match="out"):
        check(TARGETS["core"], case, task, lambda *tensors: function(*tensors) * factor)


def test_gate_finds_a_wrong_choice():
    case = small_case("choice", "operations", train=False, seq_len=256)
    task, function = prepared(case)
    assert check(TARGETS["choice"], case, task, function) == ({"excess": 0.0}, None)

    def first_ones(*tensors: torch.Tensor) -> torch.Tensor:
        chosen = function(*tensors)
        late = torch.arange(chosen.shape[2]) >= 128
        early = torch.arange(chosen.shape[3], dtype=torch.int32)
        return torch.where(late[:, None], early, chosen)

    with pytest.raises(GateError, match="excess"):
        check(TARGETS["choice"], case, task, first_ones)


def test_gate_allows_what_eager_errs_twice():
    eps = torch.finfo(torch.bfloat16).eps
    assert gate.allowed_error(3e-3, torch.bfloat16) == 6e-3 + eps / 8
    assert gate.allowed_error(3e-3, torch.float32) == 32 * torch.finfo(torch.float32).eps


def test_sampled_queries_are_sorted_and_inside():
    for length in (1, 2, 63, 5000):
        positions = gate.sample_positions(length, CPU).tolist()
        assert positions == sorted(set(positions))
        assert positions[0] == 0
        assert positions[-1] == length - 1


# Inputs.


def test_overlapping_queries_overlap_as_promised():
    config = NSAConfig(16, 8, 16, 8, window_size=32, compression="mean")
    case = small_case("selected", "dense", pattern="overlap", seq_len=2048, config=config)
    task = TARGETS["selected"].prepare(case, CPU)
    low, high = patterns.OVERLAP
    assert low - 0.02 <= task.facts["overlap"] <= high + 0.02  # measured on samples, here on all
    alike = TARGETS["selected"].prepare(dataclasses.replace(case, pattern="random"), CPU)
    assert alike.facts["overlap"] < 0.7


def test_smooth_noise_has_variance_one():
    noise = patterns.smooth_noise((1, 4096, 2, 16), 7, CPU)
    assert noise.square().mean().item() == pytest.approx(1, abs=0.1)
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean().item()
    assert neighbours == pytest.approx(6 / 7, abs=0.1)


def test_recorded_choices_are_taken_head_by_head(tmp_path, monkeypatch):
    recorded = np.arange(2 * 16 * 4).reshape(2, 16, 4)
    monkeypatch.setattr(patterns, "RESULTS", tmp_path)
    np.savez(patterns.recorded_file(2), blocks=recorded.astype(np.int16), block_size=8)
    case = small_case("selected", "dense", query_heads=6, kv_heads=3, seq_len=12)
    blocks = patterns.recorded_choices(case, CPU)
    assert blocks.dtype == torch.int32
    np.testing.assert_array_equal(blocks[0].numpy(), recorded[[0, 1, 0], :12])
    with pytest.raises(Skip, match="recorded for 16 tokens only"):
        patterns.recorded_choices(dataclasses.replace(case, seq_len=17), CPU)
    with pytest.raises(Skip, match=r"not there: .*choices_demo_g6\.npz"):
        patterns.recorded_choices(dataclasses.replace(case, kv_heads=1), CPU)


# Formulas.


def test_work_of_dense_attention():
    case = Case("core", "sdpa-cudnn", True, 4, query_heads=2, kv_heads=1, batch=3)
    pairs, elements = 3 * 2 * 10, 3 * 4 * 128
    assert work.work_of(case, "forward").flops == pairs * 4 * 128
    assert work.work_of(case, "backward").flops == pairs * 10 * 128
    assert work.work_of(case, "forward").bytes == 2 * elements * (2 + 1 + 1 + 2)
    both = work.work_of(case, "forward_backward")
    assert both == work.work_of(case, "forward") + work.work_of(case, "backward")


def test_work_of_the_core_is_that_of_its_parts():
    core = Case("core", "nsa", True, 4096)
    names = ("compressed", "selected", "sliding", "choice")
    for which in ("forward", "backward"):
        each = [
            work.work_of(dataclasses.replace(core, target=name), which).flops for name in names
        ]
        assert work.work_of(core, which).flops == sum(each)


def test_floor_is_the_slower_of_arithmetic_and_memory():
    assert work.Work(2e12, 1e9).floor_ms(1e12, 1e9) == 2000
    assert work.Work(1e9, 3e9).floor_ms(1e12, 1e9) == 3000


def test_rates_of_a_slow_machine_are_not_rounded_to_nothing(monkeypatch):
    took = Times(median_ms=20.0, p20_ms=20.0, p80_ms=20.0, repeats=3, host_ms=20.0, wall_ms=20.0)
    monkeypatch.setattr(machine, "measure", lambda *_: {"whole": took})
    rates = machine.ceilings(CPU, torch.float32)
    assert rates["matrix_tflops"] == pytest.approx(2 * 512**3 / 0.020 / 1e12, rel=1e-3)
    assert rates["memory_gb_per_s"] == pytest.approx(2 * 2 * 2**24 / 0.020 / 1e9, rel=1e-3)


# Times.


def test_times_are_those_of_the_function():
    def step(mark: Any) -> None:
        time.sleep(0.002)
        mark()
        time.sleep(0.004)

    times = measure(step, CPU, budget_ms=60)
    whole, second = times["whole"], times["second"]
    assert 3 <= whole.repeats <= 10
    assert whole.p20_ms <= whole.median_ms <= whole.p80_ms
    assert whole.median_ms >= 6
    assert 4 <= second.median_ms <= whole.median_ms - 2


def test_what_is_slow_is_repeated_once_and_the_first_run_watched():
    runs: list[str] = []

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        runs.append("watched")
        yield
        runs.append("end")

    def step(mark: Any) -> None:
        time.sleep(0.51)
        runs.append("run")

    times = measure(step, CPU, budget_ms=1, first_run=watch())
    assert runs == ["watched", "run", "end", "run"]
    assert times["whole"].repeats == 2
    assert times["whole"].p20_ms >= 510


# Rows on disk.

SHARED = {"device": "d", "torch": "1", "triton": None, "sources": "s", "commit": None}


def row(case: str, median: float, spread: float = 0.0, **others: Any) -> dict[str, Any]:
    times = {"median_ms": median, "p20_ms": median - spread, "p80_ms": median + spread}
    return {"case": case, "pass": "forward", "status": "ok", "device": "d", **times, **others}


def test_rows_survive_the_disk(tmp_path):
    rows = [row("a", 1.0), row("b", 2.0)]
    write_rows(tmp_path / "new" / "rows.json", rows)
    assert read_rows(tmp_path / "new" / "rows.json") == rows
    assert len((tmp_path / "new" / "rows.json").read_text().splitlines()) == 4  # a row a line


@pytest.mark.parametrize("text", ["not json", "{}", "[1]", '[{"other": 1}]'])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "rows.json").write_text(text)
    with pytest.raises(ValueError, match=r"rows\.json holds no"):
        read_rows(tmp_path / "rows.json")


def test_notebook_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "rows.json"
    Notebook(path, SHARED).add([row("a", 1.0)])
    again = Notebook(path, SHARED)
    assert [r["median_ms"] for r in again.done("a")] == [1.0]
    assert again.done("b") == []
    assert Notebook(path, SHARED, fresh=True).done("a") == []


@pytest.mark.parametrize("changed", ["device", "torch", "triton", "sources"])
def test_rows_of_another_machine_or_version_do_not_count(tmp_path, changed):
    path = tmp_path / "rows.json"
    Notebook(path, SHARED).add([row("a", 1.0)])
    assert Notebook(path, {**SHARED, changed: "other"}).done("a") == []


def test_failed_rows_are_measured_again_and_replaced(tmp_path):
    path = tmp_path / "rows.json"
    notebook = Notebook(path, SHARED)
    notebook.add([{**row("a", 1.0), "status": "failed", "reason": "wrong"}])
    assert notebook.done("a") == []
    notebook.add([row("a", 2.0)])
    assert [(r["status"], r["median_ms"]) for r in read_rows(path)] == [("ok", 2.0)]


def test_fingerprint_is_stable_and_short():
    assert machine.fingerprint() == machine.fingerprint()
    assert len(machine.fingerprint()) == 12


@pytest.mark.parametrize(
    ("checkout", "told", "commit"),
    [("0123456789-dirty", "other", "0123456789-dirty"), ("", "abcdef", "abcdef"), ("", "", None)],
)
def test_commit_is_the_checkouts_or_else_the_environments(monkeypatch, checkout, told, commit):
    monkeypatch.setattr(machine, "_answer", lambda *_: checkout)
    monkeypatch.setenv("NSA_FLEX_COMMIT", told)
    assert machine.commit.__wrapped__() == commit


# Comparisons.


@pytest.mark.parametrize(
    ("old", "new", "spread", "verdict"),
    [
        (10.0, 10.1, 0.0, "same"),  # within 2 %
        (10.0, 10.5, 0.01, "slower"),
        (10.0, 9.5, 0.01, "faster"),
        (10.0, 10.5, 0.3, "same"),  # within two spreads of 3 %, taken together
        (10.0, 12.0, 0.3, "slower"),
    ],
)
def test_verdicts_know_noise(old, new, spread, verdict):
    found = compare([row("a", old, spread)], [row("a", new, spread)])
    assert list(found.verdict) == [verdict]
    assert list(found.ratio) == [pytest.approx(new / old)]


def test_what_no_longer_runs_is_broken():
    failed = {"case": "a", "pass": "forward", "device": "d", "status": "failed", "reason": "x"}
    assert list(compare([row("a", 1.0)], [failed]).verdict) == ["broken"]
    assert compare([failed], [row("a", 1.0)]).empty


def test_nothing_in_common_is_an_error():
    with pytest.raises(ValueError, match="no case on the same device in common"):
        compare([row("a", 1.0)], [row("a", 1.0, device="other")])


# Presets and runs.


@pytest.mark.parametrize("name", registry.PRESETS)
def test_presets_name_what_there_is(name):
    cases = preset(name)
    assert len({case.key for case in cases}) == len(cases)
    for case in cases:
        if isinstance(case, Case):
            assert case.implementation in TARGETS[case.target].implementations()
            assert TARGETS[case.target].trains or not case.train


def test_a_deterministic_call_leaves_torch_as_it_was():
    def settings(*_: torch.Tensor) -> torch.Tensor:
        fills = torch.utils.deterministic.fill_uninitialized_memory
        return torch.tensor([torch.are_deterministic_algorithms_enabled(), fills])

    before = settings()
    assert deterministically(settings).tolist() == [True, False]
    assert torch.equal(settings(), before)


def test_headline_covers_what_must_be_shown():
    shapes = {(c.heads, c.seq_len, c.implementation, c.train) for c in preset("headline")}
    for heads in ("64/4", "32/8", "16/16"):
        for length in (8192, 32768, 65536, 131072):
            for implementation in ("nsa", "sdpa-cudnn"):
                assert {(heads, length, implementation, t) for t in (False, True)} <= shapes


def test_full_has_all_groups_dims_lengths_and_presets():
    every = set(preset("full"))
    for name in set(PRESETS) - {"smoke", "quick"}:
        assert set(preset(name)) <= every
    cases = [case for case in every if isinstance(case, Case) and case.target == "core"]
    assert {case.group_size for case in cases} == {1, 3, 4, 5, 6, 7, 8, 16}
    assert {(64, 64), (128, 128), (192, 128)} == {(c.head_dim, c.value_dim) for c in cases}
    assert max(case.seq_len for case in cases) == 256 * 1024
    assert {case.implementation for case in cases} == set(TARGETS["core"].implementations())


@pytest.mark.parametrize("implementation", ["nsa-packed", "nsa-packed-told"])
def test_packed_documents_are_held_to_the_reference_of_batch_rows(implementation):
    case = Case(
        *("core", implementation, True, 128),
        **{"batch": 3, "query_heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 16},
        dtype="float32",
    )
    both, _ = runner.rows_of(case, CEILINGS, runner.Options(CPU, 1.0, "eager"))
    assert both["status"] == "ok", both["reason"]
    odd = dataclasses.replace(case, seq_len=100)
    assert (
        "would have to be aligned"
        in runner.rows_of(odd, CEILINGS, runner.Options(CPU))[0]["reason"]
    )


def test_packed_table():
    rows = [{**each, "batch": 8, "commit": "c", "wall_ms": 9.0} for each in core_rows()]
    rows = [
        {**each, "implementation": name}
        for name, each in zip(
            ("nsa-packed", "nsa-packed", "fa2-varlen", "fa2-varlen"), rows, strict=True
        )
    ]
    line, _ = lines(table.packed(rows))
    assert line == [
        *("32/8", "8 x 8k", "forward", "2.00 ± 0.00", "-", "1.00 ± 0.00"),
        *("-", "0.50", "9 / 9", "c"),
    ]
    names = {"nsa-packed": "nsa-packed-told", "fa2-varlen": "nsa"}
    told = table.packed([{**row, "implementation": names[row["implementation"]]} for row in rows])
    assert told["longest told"].iloc[0] == "2.00 ± 0.00"
    assert told["longest told ÷ batch rows"].iloc[0] == "2.00"


def test_layers_table():
    shape = {"target": "layer", "heads": "32/8", "batch": 8, "seq_len": 8192, "commit": "c"}
    rows = [
        {**row(who, ms), **shape, "implementation": who, "pass": "forward_backward"}
        for who, ms in zip(layers.IMPLEMENTATIONS, (2.0, 2.2, 2.1), strict=True)
    ]
    (line,) = lines(table.layers(rows))
    assert line == [
        *("32/8", "8 x 8k", "2.00 ± 0.00", "2.20 ± 0.00", "1.10"),
        *("2.10 ± 0.00", "1.05", "c"),
    ]
    assert set(table.tables_of(rows)) == {"layers"}


def test_presets_of_rows_cover_what_must_be_shown():
    every = set(TARGETS["core"].implementations()) - set(PACKED)
    swept = preset("sweep")
    assert {c.seq_len for c in swept if c.implementation == "nsa"} == {1024 << i for i in range(9)}
    assert {c.implementation for c in swept if c.seq_len == 65536} == every
    grouped = {(c.group_size, c.seq_len) for c in preset("groups")}
    assert grouped == {(group, 1024 << i) for group in (1, 4, 8, 16) for i in range(9)}
    shapes = {(c.group_size, c.head_dim, c.value_dim) for c in preset("shapes")}
    dims = ((64, 64), (128, 128), (192, 128))
    assert shapes == {(group, *dim) for group in (1, 4, 8, 16) for dim in dims}
    families = {(c.group_size, c.head_dim, c.seq_len) for c in preset("families")}
    groups = ((4, 64), (3, 128), (6, 128), (7, 128), (5, 128))
    assert families == {(*each, length << 10) for each in groups for length in (4, 16, 64)}
    steps = {(c.batch, c.seq_len, c.implementation) for c in preset("models") if c.model == "125m"}
    for name in ("nsa", "nsa-eager", "dense", "dense-eager"):
        assert {(batch, n, name) for batch in (1, 16) for n in (512, 1024, 2048)} <= steps
    assert {(16, 2048, name) for name in WHOLE} <= steps
    layers_of_llama = [c for c in preset("models") if c.model.startswith("llama")]
    wholes = {(c.seq_len, c.implementation) for c in layers_of_llama}
    assert {(1024 << i, name) for i in range(1, 5) for name in WHOLE} <= wholes


def run_one(case: Any) -> list[dict[str, Any]]:
    return runner.rows_of(case, CEILINGS, runner.Options(CPU, 1.0, "eager"))


def test_training_case_yields_both_passes():
    both, backward = run_one(small_case())
    assert (both["pass"], backward["pass"]) == ("forward_backward", "backward")
    assert both["status"] == backward["status"] == "ok"
    assert both["median_ms"] > backward["median_ms"] > 0
    assert both["over_floor"] == pytest.approx(both["median_ms"] / both["floor_ms"], rel=0.05)
    json.dumps(both)


def test_what_cannot_fit_is_skipped_with_its_reason():
    (skipped, _) = run_one(small_case("core", "sdpa-math", seq_len=1 << 18))
    assert skipped["status"] == "skipped"
    assert "its scores take about" in skipped["reason"]


def test_out_of_memory_is_a_skip(monkeypatch):
    def no_memory(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 9 TiB")

    monkeypatch.setattr(TARGETS["core"], "prepare", no_memory)
    assert {r["reason"] for r in run_one(small_case())} == {
        "out of memory: tried to allocate 9 TiB"
    }


def test_a_wrong_result_is_not_timed(monkeypatch):
    monkeypatch.setattr(gate, "allowed_error", lambda *arguments: 1e-30)
    failed, _ = run_one(small_case())
    assert failed["status"] == "failed"
    assert "errors over what is allowed: out" in failed["reason"]
    assert "median_ms" not in failed


def test_a_refusal_is_a_skip_and_a_crash_is_not(monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise ValueError("backend 'fa2' cannot compute the sliding branch: it needs CUDA")

    def crash(*arguments: Any) -> None:
        raise ValueError("something else")

    for function, status in ((refuse, "skipped"), (crash, "failed")):
        monkeypatch.setattr(TARGETS["core"], "function", function)
        assert {r["status"] for r in run_one(small_case())} == {status}


def test_nothing_runs_on_a_crashed_device(tmp_path, monkeypatch):
    def crash(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(TARGETS["core"], "prepare", crash)
    notebook = Notebook(tmp_path / "rows.json", SHARED)
    cases = [small_case(seq_len=length) for length in (64, 72)]
    options = runner.Options(CPU, 1.0, "eager")
    rows = runner.run(cases, notebook, CEILINGS, options, lambda case, rows: None)
    assert {row["case"] for row in rows} == {cases[0].key}
    assert {row["status"] for row in rows} == {"failed"}


def test_training_step_reports_tokens_a_second():
    pytest.importorskip("transformers")
    (step,) = run_one(ModelCase("tiny", "nsa-eager", 2, 32))
    assert step["status"] == "ok", step
    assert step["tokens_per_s"] == pytest.approx(2 * 32 * 1e3 / step["median_ms"], rel=1e-2)
    assert step["last_loss"] < step["first_loss"]
    assert step["first_loss"] == pytest.approx(math.log(64), rel=0.1)


def layer_case(implementation: str) -> LayerCase:
    config = NSAConfig(8, 4, 8, 4, window_size=16)
    return LayerCase(implementation, 3, 40, 4, 2, 8, config)


@pytest.mark.kept(lambda implementation: implementation == "nsa-position-ids")
@pytest.mark.parametrize("implementation", layers.IMPLEMENTATIONS)
def test_a_layer_on_documents(implementation: str) -> None:
    pytest.importorskip("transformers")
    rows = run_one(layer_case(implementation))
    assert [row["pass"] for row in rows] == ["forward_backward", "backward"]
    assert {row["status"] for row in rows} == {"ok"}, rows
    assert (rows[0]["heads"], rows[0]["hidden_size"]) == ("4/2", 32)


@pytest.mark.kept(lambda implementation: implementation == "nsa-position-ids")
@pytest.mark.parametrize("implementation", layers.PACKED)
def test_a_layer_that_mixes_documents_fails(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(layers, "documents", lambda case, device: {})
    rows = run_one(layer_case(implementation))
    assert {row["status"] for row in rows} == {"failed"}
    assert "the output of the layer is off by" in rows[0]["reason"]


def test_a_dense_step_to_be_captured_is_that_of_transformers():
    pytest.importorskip("transformers")
    trainee = Trainee(ModelCase("tiny", "dense-graph", 2, 32), CPU, "eager")
    model = trainee.model.model
    want = model(input_ids=trainee.tokens, use_cache=False).last_hidden_state
    assert torch.equal(trainee._hidden(), want)


@pytest.mark.kept(lambda implementation: implementation == "nsa-whole")
@pytest.mark.parametrize("implementation", WHOLE)
def test_the_decoder_as_one_graph_trains_as_layers_do(implementation: str) -> None:
    pytest.importorskip("transformers")
    losses = []
    for name in (implementation, implementation.removesuffix("-whole")):
        torch.manual_seed(0)
        trainee = Trainee(ModelCase("tiny", name, 2, 64), CPU, "eager")
        losses.append([trainee.step().item() for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    (row,) = run_one(ModelCase("tiny", implementation, 2, 64))
    assert row["status"] == "ok", row
    assert row["case"] == f"model/{implementation} tiny 2x64"


# Tables.


def test_one_graph_has_a_table_of_its_own() -> None:
    shape = {"target": "model", "model": "125m", "batch": 16, "seq_len": 2048, "commit": "c"}
    shape |= {"parameters": 129e6}
    speeds = {"nsa": 400, "nsa-whole": 500, "transformers-sdpa-whole": 250}
    rows = [
        {**row(who, 2.0), **shape, "implementation": who, "tokens_per_s": speed}
        for who, speed in speeds.items()
    ]
    (line,) = lines(table.wholes(rows))
    assert line == ["125m", "16", "2048", "500", "400", "250", "-", "2.00", "- / -", "c"]
    longer = {**rows[1], "seq_len": 4096}
    assert len(table.models([*rows, longer])) == 1
    assert len(table.wholes([*rows, longer])) == 2
    assert set(table.tables_of(rows)) == {"models", "wholes"}
    assert set(table.tables_of(rows[:1])) == {"models"}
    assert table.markdown(table.wholes(rows[:1])) == ""


def core_rows() -> list[dict[str, Any]]:
    shape = {"target": "core", "heads": "32/8", "seq_len": 8192, "pattern": "random"}
    shape |= {"head_dim": 128, "value_dim": 128}
    return [
        {**row(f"{who} {which}", ms), **shape, "implementation": who, "pass": which, **more}
        for who, which, ms, more in (
            ("nsa", "forward", 2.0, {"over_floor": 4.0}),
            ("nsa", "forward_backward", 5.0, {"over_floor": 3.0, "peak_bytes": 2**31}),
            ("sdpa-cudnn", "forward", 1.0, {}),
            ("sdpa-cudnn", "forward_backward", 10.0, {"peak_bytes": 2**30}),
        )
    ]


def lines(found: Any) -> list[list[str]]:
    return found.to_numpy().tolist()


def test_headline_tells_the_device_s_time_and_what_a_caller_waits_for():
    rows = [{**each, "wall_ms": each["median_ms"] + 3, "commit": "c"} for each in core_rows()]
    assert lines(table.headline(rows)) == [
        [
            *("32/8", "8k", "2.00 ± 0.00", "1.00 ± 0.00", "0.50", "4.0", "5 / 4"),
            *("5.00 ± 0.00", "10.00 ± 0.00", "2.00", "3.0", "8 / 13", "2.0 / 1.0", "c"),
        ]
    ]
    assert lines(table.headline(core_rows()))[0][6] == "- / -"  # rows of before it was measured


def test_headline_tells_head_dims_where_they_differ():
    wide = [{**each, "head_dim": 192} for each in core_rows()]
    found = table.headline([*wide, *core_rows()])
    assert list(found.columns[:3]) == ["heads", "D", "tokens"]
    assert [line[:3] for line in lines(found)] == [
        ["32/8", "128", "8k"],
        ["32/8", "192/128", "8k"],
    ]


def test_sweep_table():
    rows = [*core_rows(), {**core_rows()[2], "implementation": "nsa-eager", "status": "skipped"}]
    found = table.sweep(rows)
    assert [list(found.columns), *lines(found)] == [
        ["pass", "heads", "D", "tokens", "nsa", "sdpa-cudnn", "nsa-eager"],
        ["forward", "32/8", "128", "8k", "2.00", "1.00", "skipped"],
        ["forward + backward", "32/8", "128", "8k", "5.00", "10.00", "-"],
    ]
    assert list(table.tables_of(core_rows())) == ["headline"]


def test_summary_table():
    rows = [{**each, "wall_ms": each["median_ms"] + 3, "commit": "c"} for each in core_rows()]
    assert lines(table.summary(rows)) == [
        [
            *("32/8", "8k", "2.00 / 1.00", "0.50", "5 / 4"),
            *("5.00 / 10.00", "2.00", "8 / 13", "2.0 / 1.0", "c"),
        ]
    ]


def test_repeats_tell_the_runs_of_a_case_one_below_the_other():
    rate = {"matrix_tflops": 750.4, "commit": "c"}
    first, second = ([{**each, **rate, "run": run} for each in core_rows()] for run in ("a", "b"))
    found = lines(table.repeats([*first, *second[:1], *second[2:]]))
    speeds = {"forward": ("2.00 ± 0.00", "1.00 ± 0.00", "0.50")}
    speeds["forward + backward"] = ("5.00 ± 0.00", "10.00 ± 0.00", "2.00")
    named = [("forward", "a"), ("forward", "b"), ("forward + backward", "a")]
    expected = [[title, "32/8", "8k", run, "750", *speeds[title], "c"] for title, run in named]
    assert found == expected


def test_a_reason_is_told_once_for_both_passes_of_a_case():
    why = {"case": "a train", "status": "skipped", "reason": "too large"}
    rows = [{**why, "pass": which} for which in ("forward_backward", "backward")]
    assert lines(table.reasons([*core_rows(), *rows])) == [["a train", "skipped", "too large"]]


def test_fill_writes_between_the_marks(tmp_path):
    write_rows(tmp_path / "rows.json", core_rows())
    opening, closing = "<!-- table: headline rows.json -->\n", "<!-- end of table -->"
    page = f"before\n{opening}old\n{closing}\nafter\n"
    filled = table.fill(page, tmp_path)
    assert filled.startswith(f"before\n{opening}| heads | tokens |")
    assert filled.endswith(f"{closing}\nafter\n")
    assert "old" not in filled
    assert table.fill(filled, tmp_path) == filled
    with pytest.raises(ValueError, match="no table 'other'"):
        table.fill(page.replace("headline", "other"), tmp_path)
    unmeasured = page.replace("rows.json", "none.json")
    assert table.fill(unmeasured, tmp_path) == unmeasured.replace("old\n", "")


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_in_the_docs_are_those_of_the_rows(page):
    assert table.fill(page.read_text(), ROOT) == page.read_text()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["nsa", "sdpa-cudnn"])
def test_core_is_measured_on_cuda(implementation):
    cuda = torch.device("cuda")
    options = runner.Options(cuda, 20.0)
    both, backward = runner.rows_of(Case("core", implementation, True, 2048), CEILINGS, options)
    assert both["status"] == "ok", both["reason"]
    assert 0 < backward["median_ms"] < both["median_ms"]
    assert both["peak_bytes"] > 0
