"""`nsa-flex tune`: what is measured, what follows from times, the file, and its look-up."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from nsa_flex import tuning
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.measure import machine, runner, tuner
from nsa_flex.bench.report.rows import read_rows
from nsa_flex.cli.app import app
from nsa_flex.dispatch import CUDA_ORDER, Facts, choose_backends, unsupported
from nsa_flex.tuning import Entry, lookup, parse, tuned_entries, tuned_file

DEVICE = "Imaginary GPU 9"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own, and nothing remembered from another test."""
    monkeypatch.setenv("NSA_FLEX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("NSA_FLEX_TUNED", raising=False)
    tuned_entries.cache_clear()
    yield tmp_path
    tuned_entries.cache_clear()


@pytest.fixture
def imaginary_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(unsupported, "shared_memory", lambda: tuning.HOPPER_SHARED_MEMORY)
    monkeypatch.setattr(tuning, "shared_memory", lambda: tuning.HOPPER_SHARED_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: DEVICE)
    monkeypatch.setattr(
        machine, "ceilings", lambda *_: {"matrix_tflops": 100.0, "memory_gb_per_s": 1000.0}
    )


def invoke(*arguments: str) -> Result:
    command = ["tune", *arguments]
    return CliRunner().invoke(app, command, prog_name="nsa-flex", env={"COLUMNS": "200"})


def entry(**changes: Any) -> Entry:
    fields = {"branch": "sliding", "dtype": "bfloat16", "train": False, "group_size": 4}
    fields |= {"head_dim": 128, "value_head_dim": 128, "bands": ((0, ("fa2", "flex")),)}
    return Entry(**{**fields, **changes})


def look_up(*entries: Entry, **changes: Any) -> tuple[str, ...]:
    asked = {**entry()._asdict(), "num_queries": 8192, **changes}
    del asked["bands"]
    return lookup(entries, **asked)


# Look-up.


def test_nothing_tuned_says_nothing():
    assert look_up() == ()


def test_finds_its_own_kind_of_shape():
    assert look_up(entry()) == ("fa2", "flex")


@pytest.mark.parametrize("other", [{"branch": "selected"}, {"train": True}])
def test_other_kinds_say_nothing(other):
    assert look_up(entry(), **other) == ()


def test_the_other_half_precision_stands_in():
    other = entry(dtype="float16", bands=((0, ("flex",)),))
    assert look_up(entry(), dtype="float16") == ("fa2", "flex")
    assert look_up(entry(), other, dtype="float16") == ("flex",)


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ({"group_size": 8}, ("flex",)),
        ({"group_size": 7}, ("flex",)),
        ({"group_size": 5}, ("fa2", "flex")),
        ({"group_size": 17}, ()),
        ({"head_dim": 64, "value_head_dim": 64}, ("fa2", "flex")),
        ({"head_dim": 32}, ()),
    ],
)
def test_the_nearest_shape_answers_if_it_is_near(asked, answer):
    assert look_up(entry(), entry(group_size=8, bands=((0, ("flex",)),)), **asked) == answer


@pytest.mark.parametrize(
    ("queries", "answer"), [(1, "a"), (4096, "a"), (4097, "b"), (16384, "b"), (1 << 20, "c")]
)
def test_bands_of_lengths(queries, answer):
    bands = ((4096, ("a",)), (16384, ("b",)), (0, ("c",)))
    assert look_up(entry(bands=bands), num_queries=queries) == (answer,)


# From times to entries.


def row(implementation: str, milliseconds: float, **changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"target": "sliding", "pass": "forward", "dtype": "bfloat16"}
    fields |= {"heads": "32/8", "head_dim": 128, "value_dim": 128, "seq_len": 4096}
    fields |= {"implementation": implementation, "median_ms": milliseconds, "status": "ok"}
    return {**fields, **changes}


def test_the_fastest_comes_first_and_failures_not_at_all():
    rows = [row("flex", 2.0), row("fa2", 1.0), row("triton", 0.5, status="failed")]
    assert tuner.order_of(rows) == ("fa2", "flex")


def test_a_lead_within_noise_changes_no_order():
    assert tuner.order_of([row("flex", 1.0), row("fa2", 0.98)]) == ("flex", "fa2")
    assert tuner.order_of([row("flex", 1.0), row("fa2", 0.96)]) == ("fa2", "flex")


def test_lengths_of_one_order_are_one_band():
    rows = [
        row(name, milliseconds, seq_len=length)
        for length, times in {
            1024: {"flex": 1.0, "fa2": 2.0},
            2048: {"flex": 1.0, "fa2": 2.0},
            4096: {"flex": 2.0, "fa2": 1.0},
        }.items()
        for name, milliseconds in times.items()
    ]
    (found,) = tuner.entries_of(tuner.orders_of(rows))
    assert found == entry(bands=((2048, ("flex", "fa2")), (0, ("fa2", "flex"))))


def test_backward_alone_and_other_targets_do_not_count():
    rows = [row("flex", 1.0, **{"pass": "backward"}), row("auto", 1.0, target="merge")]
    assert tuner.orders_of(rows) == {}


def shape(**changes: Any) -> tuner.Shape:
    fields: dict[str, Any] = {"dtype": "bfloat16", "train": True, "query_heads": 32, "kv_heads": 8}
    fields |= {"head_dim": 128, "value_dim": 128, "seq_len": 4096}
    return tuner.Shape(**{**fields, **changes})


def as_untuned(changed: dict[str, str]) -> dict[str, tuple[str, ...]]:
    """What `auto` takes first, with some branches changed."""
    firsts = {**tuner.untuned(shape()), **changed}
    return {branch: (first, "flex") for branch, first in firsts.items()}


def test_where_auto_wins_the_core_need_not_run():
    assert tuner.core_cases({shape(): as_untuned({})}) == []


def test_where_another_wins_the_core_runs_both_ways():
    plain, named = tuner.core_cases({shape(): as_untuned({"sliding": "fa2"})})
    assert plain == Case("core", "nsa", True, 4096)
    assert named.implementation.startswith("nsa:")
    assert "sliding=fa2" in named.implementation


@pytest.mark.parametrize(("changed_ms", "first"), [(0.9, "fa2"), (0.99, None), (1.2, None)])
def test_only_what_is_faster_in_the_core_comes_first(changed_ms, first):
    orders = {shape(): as_untuned({"sliding": "fa2"})}
    names = [case.implementation for case in tuner.core_cases(orders)]
    core_rows = [
        row(name, ms, target="core", **{"pass": "forward_backward"})
        for name, ms in zip(names, (1.0, changed_ms), strict=True)
    ]
    kept = tuner.confirmed(orders, core_rows)[shape()]["sliding"]
    assert kept[0] == (first or tuner.untuned(shape())["sliding"])
    assert set(kept) >= {"fa2"}


def test_auto_takes_on_an_h200_what_was_fastest_there():
    """The rows that `nsa-flex tune` wrote, judged again: the committed order is theirs."""
    path = Path(__file__).parents[2] / "bench" / "results" / "tune_h200.json"
    rows = read_rows(path)
    orders = tuner.orders_of(rows)
    assert {shape.seq_len for shape in orders} >= {8192, 65536}
    core_rows = [row for row in rows if row["target"] == "core"]
    for by_branch in tuner.confirmed(orders, core_rows).values():
        assert {branch: order[0] for branch, order in by_branch.items()} == {
            branch: order[0] for branch, order in CUDA_ORDER.items()
        }


# The file.


def test_a_file_is_read_as_it_was_written(cache):
    tuner.write_tuned(cache / "tuned.json", [entry()], {"device": DEVICE})
    assert parse((cache / "tuned.json").read_text()) == (entry(),)


@pytest.mark.parametrize("name", tuning.VERSIONS)
def test_other_versions_do_not_count(cache, name):
    tuner.write_tuned(cache / "tuned.json", [entry()], {"device": DEVICE})
    content = json.loads((cache / "tuned.json").read_text())
    assert parse(json.dumps({**content, name: "0.0.1"})) == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"entries": 3}', "null"])
def test_other_files_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own message, or ours
        parse(text)


def test_a_broken_file_is_reported_and_ignored(imaginary_gpu):
    tuned_file(DEVICE).write_text("broken")
    with pytest.warns(UserWarning, match=r"tuned-imaginary-gpu-9\.json was ignored"):
        assert tuned_entries() == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuned_entries() == ()  # once


def test_the_current_device_finds_its_file(imaginary_gpu, monkeypatch):
    tuner.write_tuned(tuned_file(DEVICE), [entry()], {"device": DEVICE})
    assert tuned_entries() == (entry(),)
    monkeypatch.setenv("NSA_FLEX_TUNED", "0")
    tuned_entries.cache_clear()
    assert tuned_entries() == ()


def test_cache_folder_follows_the_platform(monkeypatch, tmp_path):
    monkeypatch.delenv("NSA_FLEX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert tuning.cache_folder() == tmp_path / "nsa_flex"
    monkeypatch.setattr("sys.platform", "darwin")
    assert tuning.cache_folder() == Path.home() / "Library" / "Caches" / "nsa_flex"


# The command.


def measured(times: dict[str, float]) -> Any:
    """Stands in for the runner: a time for each implementation."""

    def rows_of(case: Case, *arguments: Any) -> list[dict[str, Any]]:
        which = "forward_backward" if case.train else "forward"
        milliseconds = times.get(case.implementation, 5.0)
        return [{**case.fields(), "pass": which, "status": "ok", "median_ms": milliseconds}]

    return rows_of


def test_without_cuda_it_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = invoke()
    assert result.exit_code == 2
    assert "there is no CUDA device" in result.output


def test_measures_writes_and_shows(imaginary_gpu, monkeypatch):
    monkeypatch.setattr(runner, "rows_of", measured({"flex": 9.0}))
    options = ("--heads", "32/8", "--seq-len", "4096", "--seq-len", "8192")
    result = invoke(*options, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["counts"]
    assert found["device"] == DEVICE
    entries = parse(tuned_file(DEVICE).read_text())
    assert {(e.branch, e.train) for e in entries} == {
        (branch, train) for branch in CUDA_ORDER for train in (False, True)
    }
    assert all(len(e.bands) == 1 and e.bands[0][1][-1] == "flex" for e in entries)
    assert "fastest first" in invoke("--show").output


def test_goes_on_where_it_stopped(imaginary_gpu, monkeypatch):
    monkeypatch.setattr(runner, "rows_of", measured({}))
    options = ("--heads", "32/8", "--seq-len", "4096")
    assert invoke(*options).exit_code == 0

    def fail(*arguments: Any) -> None:
        raise AssertionError("something was measured again")

    monkeypatch.setattr(runner, "rows_of", fail)
    assert invoke(*options).exit_code == 0
    assert invoke(*options, "--fresh").exit_code == 1


def test_a_wrong_result_is_exit_code_one(imaginary_gpu, monkeypatch):
    def rows_of(case: Case, *arguments: Any) -> list[dict[str, Any]]:
        (found,) = measured({})(case)
        wrong = case.implementation == "flex"
        return [{**found, **({"status": "failed", "reason": "wrong"} if wrong else {})}]

    monkeypatch.setattr(runner, "rows_of", rows_of)
    result = invoke("--heads", "32/8", "--seq-len", "4096")
    assert result.exit_code == 1
    assert "wrong" in result.output
    assert all("flex" not in e.bands[0][1] for e in parse(tuned_file(DEVICE).read_text()))


def test_clear_removes_what_is_cached(imaginary_gpu, monkeypatch):
    monkeypatch.setattr(runner, "rows_of", measured({}))
    invoke("--heads", "32/8", "--seq-len", "4096")
    assert tuned_file(DEVICE).exists()
    assert invoke("--clear").exit_code == 0
    assert not tuned_file(DEVICE).exists()
    assert invoke("--show").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--heads", "8/3"), "3 key-value heads must divide 8 query heads"),
        (("--dtype", "float32"), "'float32' is none of bfloat16, float16"),
        (("--device", "cpu"), "backends compete on CUDA only"),
    ],
)
def test_wrong_usage_is_exit_code_two(imaginary_gpu, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())


# In dispatch.


FACTS = Facts(
    device_type="cuda",
    dtype=torch.bfloat16,
    head_dim=128,
    value_head_dim=128,
    num_query_heads=32,
    num_kv_heads=8,
    num_queries=8192,
    whole=True,
    documents=False,
    needs_grad=False,
)


def remember(*entries: Entry) -> None:
    tuner.write_tuned(tuned_file(DEVICE), entries, {"device": DEVICE})
    tuned_entries.cache_clear()


def test_auto_takes_what_was_tuned_and_says_so(imaginary_gpu):
    untuned = choose_backends(FACTS)["sliding"]
    assert untuned.backend == CUDA_ORDER["sliding"][0]
    remember(entry(bands=((0, ("fa2",)),)))
    choices = choose_backends(FACTS)
    assert (choices["sliding"].backend, choices["sliding"].reason) == (
        "fa2",
        "fastest here by nsa-flex tune",
    )
    assert choices["compressed"].backend == CUDA_ORDER["compressed"][0]
    assert choose_backends(replace(FACTS, needs_grad=True))["sliding"].reason == untuned.reason


def test_what_was_tuned_but_cannot_do_it_is_passed_over(imaginary_gpu):
    remember(entry(bands=((0, ("fa2",)),)))
    choice = choose_backends(replace(FACTS, documents=True))["sliding"]
    assert choice.backend == "triton"
    assert "not fa2: it cannot bound the keys a query" in choice.reason


def test_an_explicit_choice_ignores_what_was_tuned(imaginary_gpu):
    remember(entry(bands=((0, ("fa2",)),)))
    assert choose_backends(FACTS, {"sliding": "flex"})["sliding"].backend == "flex"


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_compiled_code_looks_up_too(monkeypatch, dynamic):
    torch._dynamo.reset()
    with monkeypatch.context() as imagined:  # the compiler itself would look for the GPU
        imagined.setattr(torch.cuda, "is_available", lambda: True)
        imagined.setattr(torch.cuda, "get_device_name", lambda device=None: DEVICE)
        remember(entry(bands=((4096, ("fa2",)), (0, ("flex",)))))
        assert tuned_entries()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="eager")
    def taken(query: torch.Tensor) -> torch.Tensor:
        backend = choose_backends(replace(FACTS, num_queries=query.shape[2]))["sliding"].backend
        return query + ("fa2", "flex").index(backend)

    for length in (100, 4096, 4097, 9000):
        answer = taken(torch.zeros(1, 1, length, 1))
        assert answer.unique().tolist() == [0.0 if length <= 4096 else 1.0]


@pytest.mark.parametrize(
    ("given", "head_dim", "block_size", "backend"),
    [
        (232448, 128, 64, "triton"),  # H100, H200
        (232448, 256, 128, "triton"),
        (166912, 128, 64, "triton"),  # A100
        (166912, 256, 128, "triton"),
        (101376, 128, 64, "triton"),  # RTX 4090, RTX 5090, L40S
        (101376, 256, 64, "triton"),
        (101376, 256, 128, "flex"),
    ],
)
def test_selection_goes_to_flex_where_no_tile_fits(
    monkeypatch, given, head_dim, block_size, backend
):
    monkeypatch.setattr(unsupported, "shared_memory", lambda: given)
    facts = replace(
        FACTS, head_dim=head_dim, value_head_dim=head_dim, select_block_size=block_size
    )
    choice = choose_backends(facts)["selected"]
    assert choice.backend == backend
    assert backend == "triton" or f"the device has {given}" in choice.reason


@pytest.mark.parametrize(
    "sizes", [(4, 128, 128, 64, 2), (20, 192, 128, 32, 2), (1, 80, 96, 16, 4)]
)
def test_shared_memory_is_that_of_the_plan(sizes):
    pytest.importorskip("triton")
    from nsa_flex.fallback_kernels.common.arch import SM90_SHARED_MEMORY
    from nsa_flex.fallback_kernels.selected.config import SelectedPlan

    group, head_dim, value_dim, block_size, element_size = sizes
    counts = {"batch": 1, "num_queries": 64, "num_keys": 64, "num_slots": 16, "num_initial": 1}
    plan = SelectedPlan(
        **counts,
        query_heads=group,
        kv_heads=1,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=block_size,
        num_local=2,
        query_offset=0,
        element_size=element_size,
    )
    facts = replace(
        FACTS,
        num_query_heads=group,
        num_kv_heads=1,
        dtype=torch.float32 if element_size == 4 else torch.bfloat16,
        head_dim=head_dim,
        value_head_dim=value_dim,
        select_block_size=block_size,
    )
    needed = unsupported.selected_shared_bytes(facts)
    assert needed == plan.shared_bytes(plan.least_rows, 1)
    assert tuning.HOPPER_SHARED_MEMORY == SM90_SHARED_MEMORY
