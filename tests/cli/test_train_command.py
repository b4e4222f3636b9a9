"""`nsa-flex train`: exit codes, the dry run, JSON, and the shipped tiny config from end to end."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from training.small_config import small_mapping, write_texts
from training.tiny_run import rows_of
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.training import data_report
from nsa_flex.training.telemetry import last_of_each_step, read_rows, schema

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
    mixed = invoke(
        *(config, "--dry-run", "--json", "--set", "engine.compile=true"),
        *("--set", "model.dense_layers=[0]"),
    )
    assert json.loads(mixed.stdout)["compiled"][0] == (
        "2 layers LlamaDecoderLayer, one graph for the 1 of NSA, one for the 1 dense"
    )
    memory = told["memory_bytes"]
    assert memory["weights"] == memory["gradients"] == 4 * told["parameters"]
    assert memory["optimizer"] == 8 * told["parameters"]
    assert memory["total"] == sum(memory.values()) - memory["total"]
    assert not (tmp_path / "run").exists()
    assert "parameters" in invoke(config, "--dry-run").stdout


def test_the_report_of_the_data_writes_nothing(config: Path, tmp_path: Path) -> None:
    """Beside a dry run too; a run shows it at its start, and keeps it."""
    (tmp_path / "texts" / "a.png").write_bytes(b"\x89PNG\0")
    result = invoke(config, "--data-report", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["files"], told["skipped"]) == (31, {"binary": 1})
    assert told["parameters"] > 0
    assert told["documents"] < 30  # some are held out
    assert not (tmp_path / "run").exists()
    assert "longest document" in invoke(config, "--data-report").stdout
    for options in ([], ["--set", f"data.cache={tmp_path / 'cache'}"]):
        done = invoke(config, "--set", f"out={tmp_path / 'run'}{len(options)}", *options)
        assert done.exit_code == 0, done.output
        line = f"data: {told['documents']} documents, {told['tokens']:,} tokens, the longest "
        assert line in done.stdout
        assert "1 files skipped: binary" in done.stdout
        assert data_of(tmp_path / f"run{len(options)}") == {name: told[name] for name in COUNTED}


COUNTED = schema("data")["properties"]


def data_of(run: Path) -> dict[str, Any]:
    found = json.loads((run / "data.json").read_text())
    jsonschema.validate(found, schema("data"))
    return found


def test_large_data_are_not_counted_at_the_start(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those that cannot be read as far as the training comes."""
    short = ["--set", "training.steps=2"]
    monkeypatch.setattr(data_report, "COUNTED_BYTES", 100)
    done = invoke(config, *short)
    assert done.exit_code == 0, done.output
    size = sum(path.stat().st_size for path in (tmp_path / "texts").iterdir())
    line = f"data: 30 files, {size / 1e6:,.1f} MB; --data-report counts what is in them"
    assert line in done.stdout
    none = dict.fromkeys(COUNTED)
    assert data_of(tmp_path / "run") == {**none, "files": 30, "file_bytes": size}
    monkeypatch.undo()
    (tmp_path / "texts" / "torn.txt.gz").write_bytes(b"\x1f\x8b\x08nothing")
    apart = ["--set", f"data.held_out_files=[{write_texts(tmp_path / 'apart')}]"]
    assert invoke(config, *short, *apart, "--set", f"out={tmp_path / 'torn'}").exit_code == 1
    assert data_of(tmp_path / "torn")["documents"] is None


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


def write(name: str, text: str | bytes) -> Callable[[Path], None]:
    def function(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        data = text.encode() if isinstance(text, str) else text
        (folder / name).write_bytes(data)

    return function


def nothing(folder: Path) -> None:
    """All is as it is."""


MISTAKES: dict[str, tuple[Callable[[Path], None], list[str], str]] = {
    "a folder for a config": (nothing, ["{tmp}"], "is neither a file nor one of the configs"),
    "an empty config": (write("a.yaml", ""), ["{tmp}/a.yaml"], "holds no mapping of sections"),
    "a list": (write("a.yaml", "[1]"), ["{tmp}/a.yaml", "--set", "a=1"], "holds no mapping"),
    "no text": (write("a.yaml", b"\xff"), ["{tmp}/a.yaml"], "a.yaml: 'utf-8' codec can't decode"),
    "no date": (write("a.yaml", "a: 2020-99-99"), ["{tmp}/a.yaml"], "a.yaml: month must be in"),
    "no value": (nothing, ["--set", "seed=["], "seed: while parsing"),
    "not a number": (nothing, ["--set", "training.weight_decay=.nan"], "weight_decay=nan must be"),
    "no heartbeat": (nothing, ["--set", "run.heartbeat_seconds=.nan"], "heartbeat_seconds=nan"),
    "a long heartbeat": (nothing, ["--set", "run.heartbeat_seconds=.inf"], "and at most 9.22"),
    "no text at all": (
        write("empty/a.txt", ""),
        ["--set", "data.files={tmp}/empty"],
        "data.files hold no held-out document",
    ),
    "a torn tokenizer": (
        write("words/tokenizer.json", "{"),
        ["--set", "data.tokenizer={tmp}/words"],
        "data.tokenizer: the tokenizer in {tmp}/words cannot be loaded: ",
    ),
    "a torn checkpoint": (
        write("torn/config.json", "{"),
        ["--set", "model={checkpoint: {tmp}/torn}"],
        "model.checkpoint: {tmp}/torn/config.json cannot be read: ",
    ),
    "a checkpoint without weights": (
        write("bare/config.json", '{"model_type": "llama"}'),
        ["--set", "model={checkpoint: {tmp}/bare}"],
        "model.checkpoint: {tmp}/bare cannot be loaded: OSError: ",
    ),
    "a file for a folder": (
        write("file", ""),
        ["--set", "out={tmp}/file/run"],
        "Not a directory: '{tmp}/file/run'",
    ),
    "a folder that nobody makes": (nothing, ["--set", "out=/proc/run"], "'/proc/run'"),
    "a key of no model": (
        nothing,
        ["--set", "model={config: {model_type: llama, hiden_size: 64}}"],
        "unknown key model.config.hiden_size; did you mean hidden_size?",
    ),
    "a key of no part of a model": (
        nothing,
        ["--set", "model={config: {model_type: gemma3, text_config: {head_dims: 8}}}"],
        "unknown key model.config.text_config.head_dims; did you mean head_dim?",
    ),
    "a value of no model": (
        nothing,
        ["--set", "model={config: {model_type: llama, hidden_size: many}}"],
        "model.config: StrictDataclassFieldValidationError: Validation error for field",
    ),
    "a model that cannot be": (
        nothing,
        ["--set", "model={config: {model_type: llama, hidden_act: nope}}"],
        "the model: KeyError: 'nope'",
    ),
    "gates between rows": (
        nothing,
        ["--set", "run.gates_every=5"],
        "gates_every=5 must be a multiple of log_every=2: gates are measured where rows are",
    ),
    "a change of nothing": (nothing, ["--change", "seed=1"], "--change needs --resume"),
    "a change of no run": (
        nothing,
        ["--resume", "--change", "training.steps=4"],
        "{tmp}/run holds no run to go on with: begin it without changes",
    ),
    "no such checkpoint": (nothing, ["--resume-from", "4"], "-4 is no checkpoint; {tmp}/run has"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_in_one_line(config: Path, tmp_path: Path, name: str) -> None:
    prepare, arguments, message = MISTAKES[name]
    prepare(tmp_path)
    arguments = [text.replace("{tmp}", str(tmp_path)) for text in arguments]
    if arguments[0].startswith("--"):
        arguments.insert(0, str(config))
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert not result.stdout
    text = result.stderr.strip()
    if text.startswith("nsa-flex train: "):
        assert len(text.splitlines()) == 1
    else:  # typer's box
        text = " ".join(text.replace("│", " ").split())
    assert message.replace("{tmp}", str(tmp_path)) in text
    assert not list(tmp_path.glob("run/checkpoint*"))


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK"])
def test_an_environment_that_no_launcher_made(
    config: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "two")
    result = invoke(config)
    assert (result.exit_code, result.stdout) == (2, "")
    message = f"nsa-flex train: the environment has {name}='two'; expected a number"
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_processes_that_do_not_find_one_another(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    result = invoke(config)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "nsa-flex train: the environment has WORLD_SIZE=2 without RANK and LOCAL_RANK: start the "
        "processes with torchrun\n"
    )
    assert not (tmp_path / "run").exists()

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise torch.distributed.DistNetworkError("The server has failed.\nA trace")

    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr("nsa_flex.training.run.training_arguments", fail)
    result = invoke(config)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == ("nsa-flex train: The server has failed. A trace\n")


def test_rows_that_no_memory_holds(config: Path) -> None:
    """A dry run has numbers at once."""
    result = invoke(config, "--dry-run", "--json", "--set", "data.seq_len=1000000000")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens_per_step"] == 2 * 10**9
    # Nearly all are those of compressed keys: 2 layers, 4 heads, half of 1e9 / 4 keys a query,
    # and a key costs 16 D = 256: 2 D to choose, 4 D forward, 10 D backward.
    assert told["flops_per_token"] == pytest.approx(2 * 4 * 10**9 / 8 * 256, rel=0.01)


def test_too_little_memory_for_a_row(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("Unable to allocate 7.45 GiB for an array")

    monkeypatch.setattr("nsa_flex.training.packing.np.full", fill)
    result = invoke(config)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("nsa-flex train: out of memory (Unable to allocate 7.45")
    assert len(result.stderr.splitlines()) == 1


def test_a_change_is_told_on_the_command_line(config: Path, tmp_path: Path) -> None:
    begun = invoke(config, "--set", "training.steps=4", "--resume")
    assert begun.exit_code == 0
    assert f"there is no {tmp_path / 'run'} yet: from the first step" in begun.stderr
    refused = invoke(config, "--resume")
    assert refused.exit_code == 2
    assert "training.steps is 4 in the run and 12 here (keep it with --set" in refused.stderr
    result = invoke(config, "--resume", "--change", "training.steps=6", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 6
    [row] = read_rows(tmp_path / "run", "changes")
    assert (row["step"], row["key"]) == (4, "training.steps")
    assert (row["before"], row["after"]) == ("4", "6")


def test_other_ranks_print_nothing(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        result = invoke(config, "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        assert bool(result.stdout) == (rank == "0")


def test_two_processes_go_on_with_the_run_of_one(config: Path, tmp_path: Path) -> None:
    """4 steps of 2 rows, then 2 of 4: the tokens are counted, and the output is one JSON."""
    arguments = ["--set", "training.steps=4", "--set", "run.gates_every=0"]
    assert invoke(config, *arguments).exit_code == 0
    environment: Any = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-W", "ignore", *launcher, "-m", "nsa_flex.cli", "train"]
    options = ["--resume", "--change", "training.steps=6", "--json"]
    done = subprocess.run(
        [*command, str(config), *arguments[2:], *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["steps"], report["tokens"]) == (6, (4 * 2 + 2 * 4) * 64)
    record = json.loads((tmp_path / "run" / "checkpoint-6" / "run.json").read_text())
    assert (record["rows"], record["ranks"]) == (16, 2)
    changed = {row["key"]: row["after"] for row in read_rows(tmp_path / "run", "changes")}
    assert changed == {"training.steps": "6", "ranks": "2"}


def test_what_stops_a_run_exits_with_1(config: Path, tmp_path: Path) -> None:
    (tmp_path / "texts" / "torn.txt.gz").write_bytes(b"\x1f\x8b\x08nothing")
    result = invoke(config)
    assert result.exit_code == 1, result.output
    assert "torn.txt.gz cannot be read" in result.stderr
    assert "Traceback" not in result.output


def test_ctrl_c_exits_with_130(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa_flex.training import trainer

    monkeypatch.setattr(trainer.StopCallback, "_agreed", lambda self, args, control: True)
    result = invoke(config)
    assert result.exit_code == 130, result.output
    assert "checkpoint-1 goes on with --resume" in result.stderr


def test_help_has_examples() -> None:
    assert "nsa-flex train tiny" in invoke("--help").output


def tiny(out: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-m", "nsa_flex.cli", "train", "--config", "tiny"]
    return [*command, "--set", f"out={out}", "--json", *arguments]


@pytest.mark.exhaustive
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
    of_others = ("changes", "recall")  # of changed configs, of conversions
    assert all(rows for name, rows in found.items() if name not in of_others)
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
