"""The study of quality at a tiny size: text, variants, runs in pieces, rows and their table."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import lzma
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from training.small_corpus import SHARED, wheel, write_corpus

from nsa_flex.bench.quality import one_run as one_run_module
from nsa_flex.bench.quality.build import (
    MANIFEST,
    Project,
    build,
    corpus_file,
    files_of,
    package_file,
)
from nsa_flex.bench.quality.cutting import cut
from nsa_flex.bench.quality.evaluation import BUCKETS, names_again, summary
from nsa_flex.bench.quality.one_run import ROW, one_run
from nsa_flex.bench.quality.report import draw, quality
from nsa_flex.bench.quality.run import Piece, in_order, run_piece
from nsa_flex.bench.quality.side_by_side import (
    POLL_SECONDS,
    SECONDS,
    Job,
    Limits,
    environment_on,
    run_jobs,
)
from nsa_flex.bench.quality.variants import config_of, parameters, variants
from nsa_flex.bench.quality.windows import window_attention, windows_by_chunks
from nsa_flex.bench.report.rows import merged, read_rows, write_rows
from nsa_flex.config import BRANCHES
from nsa_flex.training.models import build_model
from nsa_flex.training.tokenization import BYTES

LENGTH = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"), tmp_path_factory.mktemp("downloads"))


def documents(corpus: Path, split: str) -> list[str]:
    with lzma.open(corpus_file(corpus, split), "rt") as file:
        return [json.loads(line)["text"] for line in file]


def test_projects_are_trained_on_or_held_out(corpus: Path) -> None:
    trained, held_out = ("".join(documents(corpus, split)) for split in ("train", "held_out"))
    assert trained.startswith("==> trained/trained/a.py <==\n")
    assert held_out.startswith("==> kept-back/kept_back/a.py <==\n")
    assert SHARED in trained
    assert SHARED not in held_out
    assert held_out.isascii()
    manifest = json.loads((corpus / MANIFEST).read_text())
    assert [each["split"] for each in manifest["sources"]] == ["train", "held_out"]
    assert manifest["splits"]["train"]["tokens"] == len(trained)


def test_archives_in_packages_are_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "source.tar.xz", "w:xz") as archive:
        member = tarfile.TarInfo("kernel/main.c")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"int;"))
    wheel(tmp_path, "x", {"b/c.py": "1"})
    (tmp_path / f"{'x-1.0-py3-none-any'}.whl").rename(tmp_path / "src.zip")
    (tmp_path / "plain.txt").write_text("plain")
    found = {str(file.path): file.read() for file in files_of(Path("y.deb"), tmp_path)}
    assert found == {"kernel/main.c": b"int;", "b/c.py": b"1", "plain.txt": b"plain"}


def test_no_more_of_a_project_than_asked(tmp_path: Path) -> None:
    wheel(tmp_path, "many", {f"many/{i}/a.py": f"{i}" * 5000 for i in range(9)})
    projects = tuple(
        Project("many", None, "wheel", size, held_out=held)
        for size, held in ((0.012, False), (1.0, True))
    )
    counts = build(tmp_path / "out", tmp_path, projects)["splits"]
    assert counts["train"]["documents"] == 3
    assert counts["held_out"]["documents"] == 6  # those that were trained on are left out


def test_a_package_is_told_from_others_by_its_name(tmp_path: Path) -> None:
    names = ("ansible_core-2-py3-none-any.whl", "ansible_core_more-2-py3-none-any.whl")
    for name in (*names, "gcc-12-source_12_all.deb", "gcc-12-source-more_12_all.deb"):
        (tmp_path / name).touch()
    for package, kind, name in (
        ("ansible-core", "wheel", names[0]),
        ("gcc-12-source", "debian", "gcc-12-source_12_all.deb"),
    ):
        version = "2" if kind == "wheel" else "12"
        for known in (version, None):
            project = Project(package, known, kind, 1.0)
            assert package_file(project, tmp_path) == tmp_path / name
        assert package_file(Project(package, "13", kind, 1.0), tmp_path) is None
    assert package_file(Project("gcc", None, "debian", 1.0), tmp_path) is None


def test_rows_are_pieces_of_documents(corpus: Path, tmp_path: Path) -> None:
    paths = cut(corpus, LENGTH, tmp_path, 5)
    rows = {k: [json.loads(line)["text"] for line in p.open()] for k, p in paths.items()}
    assert {len(row) for each in rows.values() for row in each} == {LENGTH - 1}
    assert len(rows["held_out"]) == 5
    whole = "".join(documents(corpus, "held_out"))
    assert rows["held_out"][0] == whole[: LENGTH - 1]
    assert len(rows["train"]) * (LENGTH - 1) > 0.9 * len("".join(documents(corpus, "train")))


def test_rows_of_two_corpora_are_not_cut_into_one_folder(corpus: Path, tmp_path: Path) -> None:
    for _ in range(2):
        cut(corpus, LENGTH, tmp_path, 5)
    wheel(tmp_path / "downloads", "other", {"other/a.py": "other\n" * 2000})
    projects = tuple(
        Project("other", "1.0", "wheel", 1.0, held_out=held) for held in (False, True)
    )
    build(tmp_path / "corpus_2", tmp_path / "downloads", projects)
    with pytest.raises(ValueError, match="holds rows of another corpus; choose another --work"):
        cut(tmp_path / "corpus_2", 2 * LENGTH, tmp_path, 5)


def test_a_corpus_without_a_whole_row_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no row of 16777216 tokens in train"):
        cut(corpus, 1 << 24, tmp_path, 5)


def test_variants_have_the_layers_that_they_name() -> None:
    built = {}
    for name in variants():
        config = config_of(name, "tiny")
        built[name] = build_model(config.model, config.data, BYTES)
        ids = torch.randint(1, 256, (1, LENGTH))
        assert built[name](input_ids=ids, labels=ids).loss.item() == pytest.approx(5.545, abs=0.2)
    patched = {
        name: [hasattr(layer.self_attn, "nsa") for layer in model.model.layers]
        for name, model in built.items()
    }
    dense = ("dense", "dense-as-mlp", "window")
    assert {name for name, layers in patched.items() if not any(layers)} == set(dense)
    assert patched["dense-nsa"] == patched["window-nsa"] == [False, True]
    windows = {
        name: [layer.self_attn.sliding_window for layer in built[name].model.layers]
        for name in ("dense", "window", "window-nsa")
    }
    assert windows["dense"] == [None, None]
    assert windows["window"] == [12, 12]
    assert windows["window-nsa"] == [12, None]


@pytest.mark.parametrize(
    ("name", "branches"),
    [
        ("window-compressed", ("compressed", "sliding")),
        ("window-selected", ("selected", "sliding")),
        ("mean", BRANCHES),
    ],
)
def test_variants_have_the_branches_that_they_name(name: str, branches: tuple[str, ...]) -> None:
    config = config_of(name, "tiny")
    layer = build_model(config.model, config.data, BYTES).model.layers[1].self_attn.nsa
    assert layer.config.branches == branches
    gates = layer.gates(torch.randn(1, 5, 32))
    assert gates.shape == (1, 4, 5, len(branches))


def test_dense_attention_is_widened_to_the_parameters_of_another() -> None:
    for size in ("30m", "125m"):
        wanted = parameters(config_of("mlp", size))
        assert parameters(config_of("dense-as-mlp", size)) == pytest.approx(wanted, rel=2e-3)
    assert 25e6 < parameters(config_of("dense", "30m")) < 35e6
    assert 100e6 < parameters(config_of("mlp", "125m")) < 135e6


@pytest.mark.parametrize(("name", "size"), [("dense", "huge"), ("denser", "tiny")])
def test_unknown_names_are_refused(name: str, size: str) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        config_of(name, size)


@pytest.mark.parametrize("tokens", [5, 12, 40, 48])
def test_windows_by_chunks(tokens: int) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, tokens, 8, requires_grad=True) for _ in range(3))
    ago = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = (ago >= 0) & (ago < 12)
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    found = window_attention(query, key, value, 12, 0.3)
    torch.testing.assert_close(found, wanted)
    grads = [
        torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (found, wanted)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("name", ["window", "window-nsa", "dense-nsa"])
def test_models_with_windows_by_chunks_compute_what_transformers_does(name: str) -> None:
    torch.manual_seed(0)
    config = config_of(name, "tiny")
    model = build_model(config.model, config.data, BYTES).eval()
    ids = torch.randint(1, 256, (2, LENGTH))
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        with windows_by_chunks():
            found = model(input_ids=ids).logits
    torch.testing.assert_close(found, wanted)


def test_names_that_one_row_alone_repeats() -> None:
    rows = np.full((2, 6000), ord(" "), np.uint8)

    def put(row: int, start: int, name: bytes) -> None:
        rows[row, start : start + len(name)] = np.frombuffer(name, np.uint8)

    for start in (0, 100, 1000, 5900):
        put(0, start, b"unique_name")
    put(0, 200, b"common_name")
    put(0, 300, b"common_name")
    put(1, 0, b"common_name")
    put(1, 20, b"only_one_time")
    put(1, 40, b"short")
    put(1, 60, b"short")
    found = list(names_again(rows))
    assert [(each.start, each.end, each.kind) for each in found] == [
        (3, 11, "first"),
        (103, 111, "near"),
        (1003, 1011, "middle"),
        (5903, 5911, "far"),
    ]
    losses = np.zeros((2, 6000))
    losses[0, 5902:5910] = 2.0  # of tokens 5903 to 5910
    losses[:, -1] = 99.0  # read by nobody
    columns = summary(losses, rows)
    assert columns["names"]["far"] == {"loss": 2.0, "count": 1}
    assert columns["names"]["near"] == {"loss": 0.0, "count": 1}
    assert columns["loss"] == pytest.approx(16 / 11998, abs=1e-5)
    assert len(columns["by_position"]) == BUCKETS
    assert columns["by_position"][-1] > 0.0
    assert columns["by_position"][0] == 0.0


@pytest.fixture
def little_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_run_module, "HELD_OUT_TOKENS", 4 * LENGTH)
    monkeypatch.setattr(one_run_module, "FEW_TOKENS", 2 * LENGTH)


# One of each kind: no NSA, NSA, layers of transformers, both, a branch that is absent.
TRAINED = ("dense", "mean", "window", "window-selected", "dense-nsa")


@pytest.mark.usefixtures("little_held_out")
def test_runs_become_a_table(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("training.steps=4", "run.log_every=1", "run.gates_every=4", "model.backend=dense")
    monkeypatch.setattr(one_run_module, "POINTS", 2)

    runs = in_order(TRAINED, [0]) + in_order(["dense"], [1])
    piece = Piece(corpus, tmp_path / "work", tmp_path / "rows.json", runs, "tiny", few)

    class Done:
        def __init__(self, job: Job, gpu: int, seconds: float) -> None:
            name, seed = next(run for run in runs if piece.job(run) == job)
            folder = piece.folder((name, seed))
            one_run(name, piece.size, seed, corpus, folder, piece.overrides)

        def poll(self) -> int:
            return 0

    rows = run_piece(piece, Done, sleep=lambda seconds: None)
    assert rows == read_rows(piece.out)
    assert {(row["variant"], row["seed"]) for row in rows} == set(runs)
    for row in rows:
        assert (row["status"], row["tokens"], row["held_out_rows"]) == ("ok", 4 * 2 * LENGTH, 4)
        losses = [loss for _, _, loss in row["curve"]]
        assert losses[-1] < losses[0] < 6.0
        assert np.mean(row["by_position"]) == pytest.approx(row["loss"], abs=0.05)
        present = variants()[row["variant"]].branches
        if row["shares"]:
            assert [name for name in BRANCHES if row["shares"][name]] == list(present)
    write_rows(tmp_path / "others.json", [{**rows[0], "corpus": "0123456789ab"}])
    mixed = dataclasses.replace(piece, out=tmp_path / "others.json")
    with pytest.raises(ValueError, match=r"others\.json holds rows of another corpus; choose"):
        run_piece(mixed, Done, sleep=lambda seconds: None)
    table = quality(rows)
    assert list(table.variant) == list(TRAINED)
    assert list(table["seeds"])[:2] == ["2", "1"]
    assert table["after dense"][0] == "+0.000 ± 0.000"
    stopped = [{**rows[0], "status": "stopped", "tokens": rows[0]["tokens"] // 2}]
    assert quality([*rows, *stopped]).equals(table)  # its variant has a finished run
    others = [{**stopped[0], "size": "125m"}]
    assert list(quality([*rows, *others]).model)[-1] == "125m"
    draw(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    # What is finished is not run again.
    assert run_piece(piece, lambda *given: pytest.fail("ran again")) == rows
    other = dataclasses.replace(piece, overrides=(*piece.overrides, "training.learning_rate=0.5"))
    with pytest.raises(ValueError, match=r"has .* with other settings; choose another --out"):
        run_piece(other, lambda *given: pytest.fail("ran again"))


@pytest.mark.usefixtures("little_held_out")
@pytest.mark.parametrize("is_killed", [False, True], ids=["evaluated", "killed while evaluated"])
def test_a_stopped_run_goes_on(
    is_killed: bool, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("training.steps=6", "run.log_every=1", "run.gates_every=0")
    losses = one_run_module.Evaluation._losses

    def stopped(self: Any, rows: torch.Tensor) -> torch.Tensor:
        if not self.row["curve"]:
            signal.raise_signal(signal.SIGTERM)
        elif is_killed and len(rows) == len(self.held_out):  # at the end
            raise SystemExit
        return losses(self, rows)

    whole = one_run("dense", "tiny", 3, corpus, tmp_path / "whole" / "run", few)
    folder = tmp_path / "parts" / "run"
    with monkeypatch.context() as patched:
        patched.setattr(one_run_module.Evaluation, "_losses", stopped)
        with pytest.raises(SystemExit) if is_killed else contextlib.nullcontext():
            one_run("dense", "tiny", 3, corpus, folder, few)
    part = json.loads((folder / ROW).read_text())
    assert (part["steps"], part["tokens"]) == (2, 2 * 2 * LENGTH)
    assert part["status"] == ("running" if is_killed else "stopped")
    assert ("loss" in part) != is_killed
    row = one_run("dense", "tiny", 3, corpus, folder, few)
    assert row == json.loads((folder / ROW).read_text())
    assert (row["status"], row["steps"]) == ("ok", 6)
    assert row["loss"] == pytest.approx(whole["loss"], abs=1e-4)
    assert [point[0] for point in row["curve"]] == [point[0] for point in whole["curve"]]
    assert row["seconds"] > part["seconds"]


class Process:
    """Runs for `length` seconds, or until it is told to stop."""

    def __init__(self, clock: Any, length: float, stops_in: float) -> None:
        self.clock, self.ends, self.stops_in = clock, clock() + length, stops_in
        self.told: list[str] = []

    def poll(self) -> int | None:
        return 0 if self.clock() >= self.ends else None

    def terminate(self) -> None:
        self.told.append("terminate")
        self.ends = min(self.ends, self.clock() + self.stops_in)

    def kill(self) -> None:
        self.told.append("kill")
        self.ends = self.clock()


@pytest.mark.parametrize(
    ("length", "stops_in", "count", "told"),
    [
        (210.0, 10.0, 4, []),
        (190.0, 10.0, 6, ["terminate"]),
        (190.0, 1000.0, 6, ["terminate", "kill"]),
    ],
)
def test_a_piece_ends_in_time(
    corpus: Path, tmp_path: Path, length: float, stops_in: float, count: int, told: list[str]
) -> None:
    times = [0.0]
    started: list[tuple[Job, Process]] = []

    def sleep(seconds: float) -> None:
        times[0] += seconds

    def start(job: Job, gpu: int, seconds: float) -> Process:
        assert seconds == 540 - 45 - times[0] >= 90
        started.append((job, Process(lambda: times[0], length, stops_in)))
        return started[-1][1]

    runs = in_order(["dense", "mean"], [0, 1, 2, 3])
    out = tmp_path / "rows.json"
    piece = Piece(corpus, tmp_path / "work", out, runs, "tiny")
    assert run_piece(piece, start, lambda: times[0], sleep) == []
    assert [job for job, _ in started] == [piece.job(run) for run in runs[:count]]
    assert [process.told for _, process in started] == [[]] * 4 + [told] * (count - 4)
    assert times[0] <= 540 + POLL_SECONDS


def test_what_is_told_its_time_ends_by_itself() -> None:
    times = [0.0]
    told = []

    def sleep(seconds: float) -> None:
        times[0] += seconds

    def start(job: Job, gpu: int, seconds: float) -> Process:
        told.append(Process(lambda: times[0], seconds + 10, 0.0))
        return told[-1]

    jobs = [Job("a", (f"--seconds={SECONDS}",)), Job("b", ())]
    given = (0.0, lambda job: False, lambda: None, start, lambda: times[0], sleep)
    assert run_jobs(jobs, Limits(seconds=200.0), *given) == []
    assert [process.told for process in told] == [[], ["terminate"]]


@pytest.mark.parametrize("finishes", [True, False])
def test_a_job_waits_for_what_it_needs(finishes: bool) -> None:
    """And is left for later if that was stopped."""
    times = [0.0]
    started: list[tuple[str, float]] = []

    def sleep(seconds: float) -> None:
        times[0] += seconds

    def start(job: Job, gpu: int, seconds: float) -> Process:
        started.append((job.name, times[0]))
        return Process(lambda: times[0], 20.0, 0.0)

    def is_done(job: Job) -> bool:
        return finishes and any(job.name == name and times[0] >= at + 20 for name, at in started)

    jobs = [Job("needs it", (), ("needed",)), Job("needed", ()), Job("alone", ())]
    given = (0.0, is_done, lambda: None, start, lambda: times[0], sleep)
    assert run_jobs(jobs, Limits(), *given) == []
    later = [("needs it", 20.0)] if finishes else []
    assert started == [("needed", 0.0), ("alone", 0.0), *later]
    assert times[0] < 60


def test_runs_are_spread_over_the_gpus(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, str]] = []
    lengths = {"dense": 1.0, "mean": 30.0}
    times = [0.0]

    def sleep(seconds: float) -> None:
        times[0] += seconds

    def start(job: Job, gpu: int, seconds: float) -> Process:
        found.append((gpu, environment_on(gpu, 2)["CUDA_VISIBLE_DEVICES"]))
        return Process(lambda: times[0], lengths[job.command[2]], 0.0)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    runs = in_order(["mean", "dense"], [0, 1, 2])
    out = tmp_path / "rows.json"
    limits = Limits(gpus=2, side_by_side=1)
    piece = Piece(corpus, tmp_path / "work", out, runs, "tiny", limits=limits)
    run_piece(piece, start, lambda: times[0], sleep)
    assert found == [(0, "5"), (1, "7"), (1, "7"), (0, "5"), (0, "5"), (1, "7")]


def test_rows_of_pieces_are_merged() -> None:
    def row(case: str, steps: int, loss: float) -> dict[str, Any]:
        return {"case": case, "device": "x", "steps": steps, "loss": loss}

    before = [row("a", 5, 1.0), row("b", 5, 2.0)]
    new = [row("a", 4, 3.0), row("b", 5, 4.0), row("c", 1, 5.0)]
    assert [each["loss"] for each in merged(before, new)] == [1.0, 4.0, 5.0]
