"""`nsa-flex export`: what others find in the folder, and that they can load it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.small_config import small_config, write_texts
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.training.config import read_config
from nsa_flex.training.run import train
from patching.test_llama_nsa import NSA, write

ROOT = Path(__file__).resolve().parents[2]
IDS = list(b"the sparse branch reads a block")
# In a process that has not imported nsa_flex.
LOADS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
assert "nsa_flex" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
ids = torch.tensor([json.loads(sys.argv[2])])
print(type(model.model.layers[1].self_attn.nsa).__name__)
print(json.dumps(model(ids).logits[0, -1].tolist()))
"""


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], prog_name="nsa-flex")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    texts = write_texts(folder / "texts")
    options: dict[str, Any] = {
        "model": {"dense_layers": [0]},
        "training": {"ema": 0.5},
        "data": {"cache": str(folder / "cache")},
    }
    train(small_config(folder / "run", texts, **options))
    return folder / "run"


def test_what_a_run_exports(run: Path, tmp_path: Path) -> None:
    result = invoke(run, tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json", "training.yaml"} <= {
        *told["files"]
    }
    assert not [name for name in told["files"] if "optimizer" in name or "random" in name]
    assert told["run"]["steps"] == 12
    assert told["data"]["files"] == 30
    assert len(told["data"]["fingerprint"]) == 64
    card = (tmp_path / "out" / "README.md").read_text()
    for text in (
        "library_name: transformers",
        "| layers | [1] |",
        "| window size | 12 |",
        f"| perplexity | {told['run']['perplexity']:.4g} |",
        f"| fingerprint | {told['data']['fingerprint']} |",
        "nsa-flex train training.yaml",
        "vLLM, llama.cpp (GGUF) and ONNX Runtime have no such attention",
        told["sample"]["prompt"],
    ):
        assert text in card
    assert read_config(str(tmp_path / "out" / "training.yaml")) == read_config(
        str(run / "config.yaml")
    )


def loaded_by_a_stranger(tmp_path: Path) -> list[str]:
    """What `LOADS` prints of the folder `out`."""
    environment: Any = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADS, str(tmp_path / "out"), json.dumps(IDS)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_stranger_loads_it(run: Path, tmp_path: Path) -> None:
    """By transformers alone with trust_remote_code, and by `nsa_flex.load`."""
    assert invoke(run, tmp_path / "out").exit_code == 0
    kind, logits = loaded_by_a_stranger(tmp_path)
    assert kind == "NSALayer"
    ids = torch.tensor([IDS])
    for folder in (run / "model", tmp_path / "out"):
        expected = nsa_flex.load(folder)(ids).logits[0, -1]
        torch.testing.assert_close(torch.tensor(json.loads(logits)), expected)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("the", add_special_tokens=False)["input_ids"] == list(b"the")


def test_a_checkpoint_of_others_trained_on(tmp_path: Path) -> None:
    """NSA-1B's own names and config.json, and what a card says of NSA."""
    write(tmp_path / "given", replace(NSA, vocab_size=260))
    section = {"preset": None, "checkpoint": str(tmp_path / "given"), "nsa": {}}
    texts = write_texts(tmp_path / "texts")
    with pytest.raises(ValueError, match="a patched checkpoint: attention cannot be dense"):
        train(small_config(tmp_path / "run", texts, model={**section, "attention": "dense"}))
    options: dict[str, Any] = {"training": {"steps": 2}, "run": {"eval_every": 0}}
    train(small_config(tmp_path / "run", texts, model=section, **options))
    assert invoke(tmp_path / "run", tmp_path / "out").exit_code == 0
    card = (tmp_path / "out" / "README.md").read_text()
    assert "A language model with Native Sparse Attention" in card
    assert "| layers | [0, 1] |" in card
    assert "| window size | 6 |" in card
    kind, logits = loaded_by_a_stranger(tmp_path)
    assert kind == "NSALayer"
    expected = nsa_flex.load(tmp_path / "run" / "model")(torch.tensor([IDS])).logits[0, -1]
    torch.testing.assert_close(torch.tensor(json.loads(logits)), expected)


# The same where nsa_flex is not installed.
REFUSED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name == "nsa_flex":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from transformers import AutoModelForCausalLM
for trust in (True, False):
    try:
        AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=trust)
    except (ImportError, ValueError) as error:
        print(type(error).__name__, " ".join(str(error).split()))
"""


def test_without_nsa_flex_the_error_names_it(run: Path, tmp_path: Path) -> None:
    assert invoke(run, tmp_path / "out").exit_code == 0
    environment: Any = {**os.environ, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REFUSED, str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    trusted, plain = done.stdout.splitlines()
    assert trusted.startswith("ImportError")
    assert "not found in your environment: nsa_flex" in trusted
    assert plain.startswith("ValueError")
    assert "trust_remote_code=True" in plain


def test_a_checkpoint_and_the_average(run: Path, tmp_path: Path) -> None:
    weights = {
        "checkpoint": run / "checkpoint-8" / "model.safetensors",
        "average": run / "model-average" / "model.safetensors",
    }
    result = invoke(run / "checkpoint-8", tmp_path / "checkpoint", "--json")
    told = json.loads(result.stdout)
    assert (told["run"]["steps"], told["sample"]["step"]) == (8, 6)
    assert told["run"]["held_out_step"] == 6
    planned = json.loads((run / "data.json").read_text())["epochs"]
    assert told["data"]["epochs"] == pytest.approx(planned * 8 / 12)
    assert told["run"]["perplexity"] is not None
    assert invoke(run, tmp_path / "average", "--average").exit_code == 0
    assert "Averages over the training" in (tmp_path / "average" / "README.md").read_text()
    for name, path in weights.items():
        ours, theirs = load_file(tmp_path / name / "model.safetensors"), load_file(path)
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert (tmp_path / name / "tokenizer.json").exists()
        assert nsa_flex.load(tmp_path / name) is not None


def test_what_cannot_be_exported(run: Path, tmp_path: Path) -> None:
    def refused(*arguments: str | Path) -> str:
        result = invoke(*arguments)
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "holds something already: choose another folder" in refused(run, run)
    assert f"{tmp_path} holds no model: name the folder of a run" in refused(
        tmp_path, tmp_path / "a"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    text = refused(tmp_path / "run", tmp_path / "a", "--average")
    assert "holds no average of weights (training.ema)" in text
    (tmp_path / "run" / "model").mkdir()
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    assert "holds no weights in one piece: end the run" in refused(
        tmp_path / "run", tmp_path / "a"
    )
    assert not (tmp_path / "a").exists()
