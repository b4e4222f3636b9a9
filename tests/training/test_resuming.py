"""Going on with a run: over the same data, with told changes, from a whole checkpoint."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models as tokenizer_models
from tokenizers import pre_tokenizers
from training.begun_run import Rows, begin, copied, quiet_config
from training.small_config import write_texts
from training.tiny_run import rows_of
from transformers import PreTrainedTokenizerFast, TrainerCallback

from nsa_flex.training import TrainingError, models
from nsa_flex.training.config import DataSection, TrainConfig
from nsa_flex.training.exporting import export
from nsa_flex.training.packing import PackedRows
from nsa_flex.training.run import train
from nsa_flex.training.telemetry import read_rows
from nsa_flex.training.tokenization import BYTES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`texts`, and `run` on them, stopped after step 8."""
    folder = tmp_path_factory.mktemp("base")
    begin(folder / "run", write_texts(folder / "texts"))
    return folder


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights at the end of `run`, which went on as it was."""
    folder = copied(base / "run", tmp_path_factory.mktemp("whole") / "run")
    train(quiet_config(folder, base / "texts"), resume=True)
    return weights(folder)


@pytest.fixture
def run(base: Path, tmp_path: Path) -> Path:
    return copied(base / "run", tmp_path / "run")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def assert_ends_as(whole: dict[str, torch.Tensor], run: Path) -> None:
    ours = weights(run)
    assert all(torch.equal(ours[name], x) for name, x in whole.items())


def rewritten(path: Path, data: bytes) -> None:
    """At another time."""
    path.write_bytes(data)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def test_the_same_data_elsewhere(
    base: Path, run: Path, whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """A copy with other times goes on, and gives what the run gives where it was."""
    elsewhere = copied(base / "texts", tmp_path / "moved")
    for path in elsewhere.iterdir():
        os.utime(path, (0, 0))
    config = quiet_config(run, elsewhere)
    with pytest.raises(ValueError, match=r"data\.files is \[.*texts\] in the run and \[.*moved\]"):
        train(config, resume=True)
    train(config, resume=True, changes={"data.files"})
    assert_ends_as(whole, run)
    [row] = read_rows(run, "changes")
    assert (row["step"], row["key"]) == (8, "data.files")
    assert json.loads(row["after"]) == [str(elsewhere)]


def edit(texts: Path) -> str:
    data = (texts / "07.txt").read_bytes()
    rewritten(texts / "07.txt", b"X" + data[1:])  # of the same size
    return r"07\.txt has changed"


def lengthen(texts: Path) -> str:
    with (texts / "07.txt").open("a") as file:
        file.write("more")
    return r"07\.txt has changed"


def remove(texts: Path) -> str:
    (texts / "07.txt").unlink()
    return r"07\.txt is gone"


def add(texts: Path) -> str:
    (texts / "new.txt").write_text("text")
    return r"new\.txt is new"


@pytest.mark.parametrize("change", [edit, lengthen, remove, add])
def test_other_data_are_refused_and_the_file_is_named(
    base: Path, run: Path, tmp_path: Path, change: Any
) -> None:
    texts = copied(base / "texts", tmp_path / "texts")
    message = change(texts)
    config = quiet_config(run, texts)
    with pytest.raises(ValueError, match=rf"not those of .*checkpoint-8: \S*{message}; put back"):
        train(config, resume=True, changes={"data.files"})
    assert not (run / "changes.csv").exists()


def write_tokenizer(folder: Path, words: str) -> Path:
    vocabulary = {
        word: number for number, word in enumerate(["<end>", "<unknown>", *words.split()])
    }
    backend = RustTokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def test_another_tokenizer_is_refused(base: Path, tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "tokenizer", "the sparse branch")
    config = quiet_config(tmp_path / "run", base / "texts", data={"tokenizer": str(folder)})
    begin(tmp_path / "run", base / "texts", data={"tokenizer": str(folder)})
    write_tokenizer(folder, "the branch sparse")
    with pytest.raises(
        ValueError, match=r"the tokenizer is not that of .*tokenizer\.json has cha"
    ):
        train(config, resume=True)
    write_tokenizer(folder, "the sparse branch")
    assert train(config, resume=True)["steps"] == 12


def first_rows(texts: Path, count: int) -> list[tuple[int, ...]]:
    config = quiet_config(Path("out"), texts)
    rows = PackedRows(sorted(texts.iterdir()), BYTES, config.data, seed=0, held_out=False)
    return [tuple(row.ids.tolist()) for row in itertools.islice(rows, count)]


def test_rows_do_not_come_again_in_batches_of_another_size(
    base: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 steps of 2 rows, 2 of 3, stopped there, and 2 of 1: rows 1 to 24 of the stream."""
    seen = Rows(monkeypatch)
    three = {"batch_size": 3, "steps": 10}
    told = {"training.batch_size", "training.steps"}
    train(quiet_config(run, base / "texts", training=three), resume=True, changes=told)
    last = {"batch_size": 1, "steps": 12}
    found = train(quiet_config(run, base / "texts", training=last), resume=True, changes=told)
    assert seen.rows == first_rows(base / "texts", 24)[16:]
    assert found["tokens"] == 24 * 64
    rows = {row["step"]: row["tokens"] for row in read_rows(run, "training")}
    assert rows == {2: 256, 4: 512, 6: 768, 8: 1024, 10: 1408, 12: 1536}


class Random(TrainerCallback):
    """torch's random state before each step, and a number drawn in it."""

    def __init__(self) -> None:
        self.states: dict[int, torch.Tensor] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.states[state.global_step] = torch.get_rng_state()
        torch.rand(3)


@pytest.mark.parametrize("workers", [0, 1])
def test_random_numbers_go_on(base: Path, tmp_path: Path, workers: int) -> None:
    options = {"data": {"workers": workers}}
    whole, stopped = Random(), Random()
    train(quiet_config(tmp_path / "whole", base / "texts", **options), callbacks=[whole])
    half = quiet_config(tmp_path / "run", base / "texts", training={"steps": 4}, **options)
    train(half, callbacks=[stopped])
    config = quiet_config(tmp_path / "run", base / "texts", **options)
    train(config, resume=True, changes={"training.steps"}, callbacks=[stopped])
    assert stopped.states.keys() == whole.states.keys() == set(range(12))
    assert all(torch.equal(stopped.states[step], whole.states[step]) for step in range(12))


def test_the_model_of_an_earlier_end_is_not_taken_for_that_of_a_longer_run(
    base: Path, tmp_path: Path
) -> None:
    """Neither by who exports a run that was stopped again, nor by who resumes it at its end."""
    run, texts = tmp_path / "run", base / "texts"
    train(quiet_config(run, texts, training={"steps": 4}))
    first = (run / "model" / "model.safetensors").read_bytes()
    begin(run, texts, resume=True, changes={"training.steps"})
    assert not (run / "model").exists()
    assert (run / "earlier-model-4" / "model.safetensors").read_bytes() == first
    assert export(run, tmp_path / "exported")["run"]["steps"] == 8
    exported = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert exported == (run / "checkpoint-8" / "model.safetensors").read_bytes() != first
    assert train(quiet_config(run, texts), resume=True)["steps"] == 12
    assert not (run / "earlier-model-8").exists()


def test_told_changes_hold_and_are_recorded(base: Path, run: Path) -> None:
    """Rate and steps from step 8 on; rows where the config now says, though nobody told that."""
    training = {"learning_rate": 1e-3, "schedule": "constant", "steps": 15}
    told = {f"training.{name}" for name in training}
    config = quiet_config(run, base / "texts", training=training, run={"log_every": 1})
    assert train(config, resume=True, changes=told)["steps"] == 15
    rows = read_rows(run, "training")
    assert [row["step"] for row in rows] == [2, 4, 6, 8, *range(9, 16)]
    assert {row["learning_rate"] for row in rows[4:]} == {1e-3}
    changed = {row["key"]: (row["before"], row["after"]) for row in rows_of(run)["changes"]}
    assert changed == {
        "training.learning_rate": ("0.01", "0.001"),
        "training.schedule": ('"cosine"', '"constant"'),
        "training.steps": ("12", "15"),
        "run.log_every": ("2", "1"),
    }
    assert {row["step"] for row in read_rows(run, "changes")} == {8}
    assert train(config, resume=True, changes=told)["steps"] == 15  # no changes any more
    assert len(read_rows(run, "changes")) == 4


def test_checkpointing_may_change_on_the_way(
    base: Path, run: Path, whole: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer is computed again in the 4 steps that are left, with the same results."""
    watched = Mock(wraps=models.checkpoint)
    monkeypatch.setattr(models, "checkpoint", watched)
    config = quiet_config(run, base / "texts", engine={"checkpointing": "full"})
    with pytest.raises(ValueError, match="checkpointing is none in the run and full here"):
        train(config, resume=True)
    assert not watched.called
    train(config, resume=True, changes={"engine.checkpointing"})
    assert watched.call_count == 4 * 2
    assert_ends_as(whole, run)
    [row] = read_rows(run, "changes")
    assert (row["key"], row["before"], row["after"]) == (
        "engine.checkpointing", '"none"', '"full"',
    )  # fmt: skip


def test_other_changes_are_refused_with_both_values(base: Path, run: Path) -> None:
    def resumed(changes: set[str], **sections: Any) -> None:
        train(quiet_config(run, base / "texts", **sections), resume=True, changes=changes)

    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    with pytest.raises(
        ValueError,
        match=r"training\.learning_rate is 0\.01 in the run and 0\.001 here \(keep it with --set "
        r"training\.learning_rate=0\.01, or change it with --change training\.learning_rate=0\.0",
    ):
        resumed(set(), training={"learning_rate": 1e-3})
    with pytest.raises(
        ValueError, match=r"seq_len is 64 in the run and 32 here, and a run cannot"
    ):
        resumed({"data.seq_len"}, data={"seq_len": 32})
    with pytest.raises(ValueError, match=r"model\.nsa\.window_size is 12 in the run and 16 here"):
        resumed({"model"}, model={"nsa": {**quiet_config(run, run).model.nsa.__dict__,
                                          "window_size": 16}})  # fmt: skip
    with pytest.raises(ValueError, match=r"training\.steps is 6, and .*-8 has 8 behind it"):
        resumed({"training.steps"}, training={"steps": 6})
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))


def truncate(path: Path) -> str:
    os.truncate(path, 1000)
    return rf"{path.name} is damaged: 1000 bytes, expected \d+"


def overwrite(path: Path) -> str:
    path.write_bytes(b"\xff" * path.stat().st_size)
    return rf"{path.name} is damaged: "


def lose(path: Path) -> str:
    path.unlink()
    return rf"{path.name} is damaged: No such file"


@pytest.mark.parametrize("name", ["optimizer.safetensors", "trainer_state.json", "run.json"])
@pytest.mark.parametrize("damage", [truncate, overwrite, lose])
def test_a_damaged_file_is_named(run: Path, base: Path, name: str, damage: Any) -> None:
    message = damage(run / "checkpoint-8" / name)
    if name == "run.json" and damage is truncate:
        message = r"run\.json is damaged: "
    with pytest.raises(
        TrainingError, match=rf"checkpoint-8/{message}.*; go on from checkpoint-4 with --resume-fr"
    ):
        train(quiet_config(run, base / "texts"), resume=True)


def test_going_on_from_an_earlier_checkpoint(
    base: Path, run: Path, whole: dict[str, torch.Tensor]
) -> None:
    """The later one is out of the way, and the run ends as if it had never been there."""
    config = quiet_config(run, base / "texts")
    (run / "checkpoint-8" / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint-5 is no checkpoint; .* the steps: 4, 8"):
        train(config, resume_from="5")
    assert train(config, resume_from="4")["steps"] == 12
    names = {path.name for path in run.iterdir() if path.is_dir()}
    assert names == {"checkpoint-8", "checkpoint-12", "abandoned-8", "model"}
    assert_ends_as(whole, run)


def test_no_checkpoint_is_whole(base: Path, run: Path) -> None:
    for step in (4, 8):
        (run / f"checkpoint-{step}" / "model.safetensors").unlink()
    with pytest.raises(TrainingError, match="no earlier one is whole: choose another out"):
        train(quiet_config(run, base / "texts"), resume=True)


@pytest.fixture
def elsewhere() -> Iterator[subprocess.Popen[str]]:
    """A process that locks the folder whose name it is given."""
    code = (
        "import sys, time; from pathlib import Path; from nsa_flex.training.saving import locked\n"
        "with locked(Path(input())): print('locked', flush=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def test_a_second_run_in_the_folder_is_refused(
    base: Path, run: Path, elsewhere: subprocess.Popen[str]
) -> None:
    """Until the first one is dead, killed or not."""
    assert elsewhere.stdin is not None
    assert elsewhere.stdout is not None
    elsewhere.stdin.write(f"{run}\n")
    elsewhere.stdin.flush()
    assert elsewhere.stdout.readline() == "locked\n"
    config = quiet_config(run, base / "texts")
    for resume in (True, False):
        with pytest.raises(
            ValueError, match=rf"run is in use by process {elsewhere.pid} on \S+: wait for it"
        ):
            train(config, resume=resume)
    elsewhere.send_signal(signal.SIGKILL)
    elsewhere.wait()
    assert (run / "run.lock").read_text().startswith(f"process {elsewhere.pid} on ")
    assert train(config, resume=True)["steps"] == 12


def test_a_run_that_ended_meanwhile_is_not_written_over(
    base: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process had the folder between the first look and the lock."""
    from nsa_flex.training import run as training_run

    build = training_run.build_model

    def building(*args: Any, **kwargs: Any) -> Any:
        shutil.copytree(run / "checkpoint-8", run / "checkpoint-10")
        return build(*args, **kwargs)

    monkeypatch.setattr(training_run, "build_model", building)
    with pytest.raises(ValueError, match="has changed meanwhile: start again"):
        train(quiet_config(run, base / "texts"), resume=True)


def test_files_have_the_mode_that_files_get(base: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        train(quiet_config(tmp_path / "run", base / "texts", training={"steps": 4}))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "run").rglob("*.*")}
    assert modes == {0o640}


def test_the_run_is_none_of_its_data(tmp_path: Path) -> None:
    """A folder is trained on in which the run itself lies."""
    texts = write_texts(tmp_path / "texts")
    begin(texts / "runs" / "one", texts)
    record = json.loads((texts / "runs" / "one" / "checkpoint-8" / "run.json").read_text())
    assert len(record["files"]) == 30
    assert train(quiet_config(texts / "runs" / "one", texts), resume=True)["steps"] == 12
    with pytest.raises(ValueError, match=r"texts names no file outside of .*texts; check"):
        train(quiet_config(texts, texts))


def test_a_torn_file_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of it before stays; what the error advises works, again and again."""
    texts = write_texts(tmp_path / "texts", 6)
    torn = texts / "03.jsonl"
    lines = [json.dumps({"text": f"line {number} " * 9}) for number in range(20)]
    torn.write_text("\n".join(lines) + "\n{")
    seen, out = Rows(monkeypatch), tmp_path / "run"

    def config(*left: Path, steps: int = 30) -> TrainConfig:
        return quiet_config(
            out,
            texts,
            data={
                "files": [str(texts)],
                "shuffle": 1,
                "leave_out": [str(path) for path in left],
                "held_out_files": [str(texts / "00.txt")],
            },
            training={"steps": steps},
            run={"save_every": 2},
        )

    with pytest.raises(
        TrainingError,
        match=r"03\.jsonl cannot be read .* or go on without it: --resume --change "
        r"data\.leave_out=\[\S*03\.jsonl\]",
    ):
        train(config())
    done = 2 * max(int(path.name[11:]) for path in out.glob("checkpoint-*"))
    trained = seen.rows[:done]
    seen.rows.clear()
    assert done < 48  # its last row is the 47th
    train(config(torn), resume=True, changes={"data.leave_out"})
    more = config(torn, steps=40)
    train(more, resume=True, changes={"data.leave_out", "training.steps"})
    rows = PackedRows(
        sorted(texts.iterdir()), BYTES, more.data, seed=0, held_out=None, left_out={torn: done}
    )
    stream = [tuple(row.ids.tolist()) for row in itertools.islice(rows, 80)]
    assert trained + seen.rows == stream
    record = json.loads((out / "checkpoint-40" / "run.json").read_text())
    assert record["left_out"] == {str(torn): done}
    with pytest.raises(ValueError, match=r"03\.jsonl was left out, which cannot be undone"):
        train(config(steps=42), resume=True, changes={"data.leave_out", "training.steps"})


def packed(texts: Path, **options: Any) -> list[tuple[int, ...]]:
    data = DataSection(files=("x",), seq_len=32, shuffle=5)
    files = sorted(texts.iterdir())
    rows = PackedRows(files, BYTES, data, seed=1, held_out=None, epochs=1, **options)
    return [tuple(row.ids.tolist()) for row in rows]


@pytest.mark.parametrize("after", [0, 1, 20, 40, 90])
def test_rows_up_to_where_a_file_was_left_out_stay(tmp_path: Path, after: int) -> None:
    texts = write_texts(tmp_path / "texts", 8)
    lines = [json.dumps({"text": f"UNIQUE {number}"}) for number in range(40)]
    left = texts / "lines.jsonl"
    left.write_text("\n".join(lines))
    whole, rows = packed(texts), packed(texts, left_out={left: after})
    assert rows[:after] == whole[:after]
    assert packed(texts, left_out={left: after}, skip=after) == rows[after:]
    ends = bytes(itertools.chain(*rows)).count(b"UNIQUE")
    pulled = bytes(itertools.chain(*whole[:after])).count(b"UNIQUE")
    assert pulled <= ends <= min(40, pulled + 6)  # the buffer holds some


def test_a_file_that_is_left_out_and_was_needed(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 8)
    first = texts / "03.txt"
    packed(texts, left_out={first: 0}, changed={first})
    with pytest.raises(TrainingError, match=r"03\.txt is left out, but rows trained on hold"):
        packed(texts, left_out={first: 10**6}, changed={first})


def test_a_worker_says_what_it_cannot_read_in_one_line(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    (texts / "00.jsonl").write_text('{"text": 3}\n')
    options = {"shuffle": 1, "workers": 1, "held_out_share": 1e-9}
    options["held_out_files"] = [str(texts / "00.txt")]
    with pytest.raises(TrainingError, match=r"^data: \S+00\.jsonl cannot be read [^\n]*$"):
        train(quiet_config(tmp_path / "run", texts, data=options))
