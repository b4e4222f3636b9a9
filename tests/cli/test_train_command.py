"""`nsa-flex train`: exit codes, the dry run, JSON, and the shipped tiny config from end to end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from training.small_config import small_mapping, write_texts
from training.tiny_run import rows_of
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.training.telemetry import last_of_each_step, read_rows

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)], prog_name="nsa-flex")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The file of a config that takes seconds."""
    texts = write_texts(tmp_path / "texts")
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(small_mapping(tmp_path / "run", texts)))
    return file


def test_a_run_with_its_progress_as_lines(config: Path, tmp_path: Path) -> None:
    result = invoke(config)
    assert result.exit_code == 0, result.output
    assert "step 2/12: loss " in result.stdout
    assert " tokens/s" in result.stdout
    assert "step 6/12: held-out loss " in result.stdout
    assert "loss" in result.stdout
    rows_of(tmp_path / "run")
    model = nsa_flex.load(tmp_path / "run" / "model")
    assert model.config.nsa_flex["config"]["window_size"] == 12


def test_json_for_machines(config: Path, tmp_path: Path) -> None:
    result = invoke(config, "--json", "--set", "training.steps=4")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["steps"], report["tokens"]) == (4, 4 * 2 * 64)
    losses = [row["loss"] for row in read_rows(tmp_path / "run", "training") if row["loss"]]
    assert [report["first_loss"], report["loss"]] == losses
    assert "step 2/4: loss " in result.stderr


def test_the_dry_run_writes_nothing(config: Path, tmp_path: Path) -> None:
    result = invoke(config, "--dry-run", "--json", "--set", "engine.compile=true")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens"] == 12 * 2 * 64
    assert told["files"] == 30
    assert told["compiled"] == [
        "2 layers LlamaDecoderLayer, one graph for all",
        "the loss",
    ]
    memory = told["memory_bytes"]
    assert memory["weights"] == memory["gradients"] == 4 * told["parameters"]
    assert memory["optimizer"] == 8 * told["parameters"]
    assert memory["total"] == sum(memory.values()) - memory["total"]
    assert not (tmp_path / "run").exists()
    assert "parameters" in invoke(config, "--dry-run").stdout


def test_what_the_dry_run_says_of_the_125m(tmp_path: Path) -> None:
    """12 layers of 7.1M, two embeddings of 256 tokens, gates and φ; 6 FLOPs a weight and token."""
    write_texts(tmp_path / "texts", 2)
    result = invoke("125m", "--dry-run", "--json", "--set", f"data.files={tmp_path / 'texts'}")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    layer = 768 * (12 + 2 + 2 + 12) * 64 + 3 * 768 * 2048 + 2 * 768
    dense = 12 * layer + 768 + 2 * 256 * 768
    assert told["parameters"] - told["parameters_of_nsa"] == dense
    assert told["tokens_per_step"] == 16 * 2048
    assert told["flops_per_token"] > 6 * (dense - 256 * 768)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one config: a file or a shipped one's name"),
        (["tiny", "--config", "tiny"], "give one config: a file or a shipped one's name"),
        (["nowhere"], "nowhere is neither a file nor one of the configs 125m"),
        (["tiny", "--set", "training.step=3"], "unknown key training.step; did you mean steps?"),
        (["125m", "--set", "data.files=[nowhere]"], "data: nowhere names no file"),
        (["{config}", "--set", "model.preset=huge"], "model.preset is huge; expected one of tiny"),
        (["{config}", "--set", "model={checkpoint: nowhere}"], "config.json does not exist"),
        (["{config}", "--set", "model={config: {model_type: none}}"], "model.config: Unrec"),
        (["{config}", "--set", "model.config={model_type: llama, vocab_size: 9}",
          "--set", "model.preset="], "vocabulary has 9 ids, the tokenizer 256"),
        (["{config}", "--set", "run.strict=true"], "strict: the compressed branch of model"),
        (["{config}", "--set", "data.tokenizer=nowhere"], "expected bytes or the directory"),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(
    config: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = invoke(*(text.replace("{config}", str(config)) for text in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert not (tmp_path / "run" / "training.csv").exists()
    assert not list(tmp_path.glob("run/checkpoint*"))


def test_what_stops_a_run_exits_with_1(config: Path, tmp_path: Path) -> None:
    (tmp_path / "texts" / "torn.txt.gz").write_bytes(b"\x1f\x8b\x08nothing")
    result = invoke(config)
    assert result.exit_code == 1, result.output
    assert "torn.txt.gz cannot be read" in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_exits_with_130(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_flex.training import stopping

    monkeypatch.setattr(stopping.StopCallback, "_agreed", lambda self, args, control: True)
    result = invoke(config)
    assert result.exit_code == 130, result.output
    assert "checkpoint-1 goes on with --resume" in result.stderr


def test_help_has_examples() -> None:
    assert "nsa-flex train tiny" in invoke("--help").output


def tiny(out: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "nsa_flex.cli", "train", "--config", "tiny"]
    return [*command, "--set", f"out={out}", "--json", *arguments]


def test_the_tiny_config_killed_and_resumed_on_a_cpu(tmp_path: Path) -> None:
    """To a falling loss, with all artefacts, in less than three minutes of one core."""
    out = tmp_path / "run"
    before = _seconds_of_children()
    environment: Any = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    first = subprocess.Popen(tiny(out), env=environment, stderr=subprocess.PIPE)
    while first.poll() is None and not (out / "checkpoint-50").exists():
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    done = subprocess.run(tiny(out, "--resume"), env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["steps"] == 100
    assert report["loss"] < report["first_loss"] - 2
    found = rows_of(out)
    assert all(found.values())
    held_out = [
        row["held_out_loss"]
        for row in last_of_each_step(found["training"])
        if row["held_out_loss"] is not None
    ]
    assert len(held_out) == 2
    assert held_out[1] < held_out[0]
    assert _seconds_of_children() - before < 180


def _seconds_of_children() -> float:
    """CPU time of the processes that this one, which runs other tests too, has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
