"""What a run survives: SIGKILL, Ctrl-C, NaN, bad files, a full disk, too little memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from training.small_config import small_config, small_mapping, write_texts
from training.tiny_run import rows_of
from transformers import TrainerCallback

from nsa_flex.training import TrainingError, saving
from nsa_flex.training.run import train
from nsa_flex.training.saving import last_checkpoint
from nsa_flex.training.telemetry import last_of_each_step, read_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return write_texts(tmp_path / "texts")


def curve(run: Path) -> list[tuple[Any, ...]]:
    """Rows of training.csv but for sessions and times."""
    rows = last_of_each_step(read_rows(run, "training"))
    names = ("step", "loss", "learning_rate", "grad_norm", "tokens", "held_out_loss")
    return [tuple(row[name] for name in names) for row in rows]


def same_weights(run: Path, other: Path) -> bool:
    ours, theirs = (load_file(each / "model" / "model.safetensors") for each in (run, other))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)


def in_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-m", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.kept(lambda kills: kills == 2)
@pytest.mark.parametrize(("kills", "steps"), [(2, 20), (4, 40), (10, 60)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    kills: int, steps: int, tmp_path: Path, texts: Path, request: pytest.FixtureRequest
) -> None:
    """Bitwise: every logged loss, norm and learning rate, and the weights."""
    settings = {
        "training": {"steps": steps},
        "run": {"save_every": 2, "eval_every": 10},
    }
    for name in ("whole", "killed"):
        values = small_mapping(tmp_path / name, texts, **settings)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(values))
    seed = str(request.config.getoption("seed"))
    for name, times in (("whole", "0"), ("killed", str(kills))):
        done = in_python("training.kill_and_resume", tmp_path / f"{name}.yaml", times, seed)
        assert done.returncode == 0, done.stdout + done.stderr
    where = done.stdout.split()[1 : kills + 1]
    assert where == ["writing", "stepping"] * (kills // 2)
    assert read_rows(tmp_path / "killed", "training")[-1]["session"] == kills + 1
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert len(curve(tmp_path / "whole")) == steps // 2 + steps // 10
    assert same_weights(tmp_path / "killed", tmp_path / "whole")
    assert not (tmp_path / "killed" / ".writing").exists()
    rows_of(tmp_path / "killed")


class Every(TrainerCallback):
    """Calls a function after each step."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.function(state.global_step, kwargs["model"])


def test_ctrl_c_saves_and_resuming_goes_on(tmp_path: Path, texts: Path) -> None:
    def interrupt(step: int, model: Any) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    whole = train(small_config(tmp_path / "whole", texts))
    config = small_config(tmp_path / "run", texts)
    stopped = train(config, callbacks=[Every(interrupt)])
    assert (stopped["stopped"], stopped["steps"]) == (True, 6)
    assert stopped["checkpoint"] == str(tmp_path / "run" / "checkpoint-6")
    done = train(config, resume=True)
    assert (done["stopped"], done["steps"]) == (False, 12)
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert same_weights(tmp_path / "run", tmp_path / "whole")
    assert done["loss"] < whole["first_loss"]


def poison(at: int) -> Any:
    def function(step: int, model: Any) -> None:
        if step == at:
            with torch.no_grad():
                model.lm_head.weight.fill_(float("nan"))

    return Every(function)


def test_a_loss_that_is_not_finite_stops_before_it_is_saved(tmp_path: Path, texts: Path) -> None:
    config = small_config(tmp_path / "run", texts)
    with pytest.raises(TrainingError, match="the loss is nan at step 8: resume from the last"):
        train(config, callbacks=[poison(6)])
    last = last_checkpoint(tmp_path / "run")
    assert last is not None
    assert last.name == "checkpoint-4"
    assert all(x.isfinite().all() for x in load_file(last / "model.safetensors").values())
    assert train(config, resume=True)["steps"] == 12


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, texts: Path) -> None:
    (texts / "05.jsonl").write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(TrainingError, match=r"05\.jsonl cannot be read \(ValueError: line 2: fie"):
        train(small_config(tmp_path / "run", texts, data={"shuffle": 1}))


@pytest.mark.exhaustive
def test_a_disk_that_fills_up_leaves_the_last_checkpoint_whole(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run", texts)
    write, calls = saving.save_file, []

    def full(tensors: Any, path: Path, **options: Any) -> None:
        calls.append(path)
        if "checkpoint-8" in str(path):
            Path(path).write_bytes(b"the first half of it")
            raise OSError(28, "No space left on device")
        write(tensors, path, **options)

    monkeypatch.setattr(saving, "save_file", full)
    message = r"checkpoint 8 could not be written to .*No space left.* resume from checkpoint-4"
    with pytest.raises(TrainingError, match=message):
        train(config)
    assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == [
        "checkpoint-4"
    ]
    assert not (tmp_path / "run" / ".writing").exists()
    monkeypatch.setattr(saving, "save_file", write)
    train(small_config(tmp_path / "whole", texts))
    assert train(config, resume=True)["steps"] == 12
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("tried to allocate 2 GiB"), MemoryError("no more")]
)
def test_too_little_memory_says_what_to_change(
    tmp_path: Path, texts: Path, error: Exception
) -> None:
    def fail(step: int, model: Any) -> None:
        if step == 5:
            raise error

    message = r"out of memory .*lower training\.batch_size.*then resume from checkpoint-4"
    with pytest.raises(TrainingError, match=message):
        train(small_config(tmp_path / "run", texts), callbacks=[Every(fail)])
    assert read_rows(tmp_path / "run", "heartbeat")[-1]["phase"] == "failed"


def test_checkpoints_hold_no_pickle(tmp_path: Path, texts: Path) -> None:
    train(small_config(tmp_path / "run", texts))
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert kinds == {".yaml", ".json", ".jsonl", ".csv", ".safetensors", ".lock"}


def test_a_run_without_checkpoints(tmp_path: Path, texts: Path) -> None:
    result = train(small_config(tmp_path / "run", texts, run={"save_every": 0}))
    assert (result["steps"], result["checkpoint"]) == (12, None)
    assert [path.name for path in (tmp_path / "run").iterdir() if path.is_dir()] == ["model"]


def test_a_run_is_not_written_over(tmp_path: Path, texts: Path) -> None:
    config = small_config(tmp_path / "run", texts, training={"steps": 2})
    train(config)
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "run").rglob("*"))
    with pytest.raises(ValueError, match=r"holds a run already: resume it \(--resume\)"):
        train(config)
    other = small_config(tmp_path / "run", texts, training={"steps": 3})
    with pytest.raises(ValueError, match=r"training\.steps is 2 in the run and 3 here"):
        train(other, resume=True)
    assert before == sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "run").rglob("*"))
