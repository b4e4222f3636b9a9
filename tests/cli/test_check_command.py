"""`nsa-flex check`: its report, its exit status, what it takes as a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from nsa_flex.cli.app import app
from nsa_flex.testing import run
from nsa_flex.testing.models import model_named


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", *arguments], prog_name="nsa-flex")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checks in the place of all."""
    kept = ("patch", "causality", "dense start")
    monkeypatch.setattr(run, "CHECKS", kept)
    monkeypatch.setitem(run.check_model.__kwdefaults__, "checks", kept)


def test_a_family_as_text_with_its_progress(quick: None) -> None:
    result = invoke("llama")
    assert result.exit_code == 0, result.output
    head, *lines = result.stdout.splitlines()
    assert head == "llama: right, 2 sparse layers"
    assert lines == ["  ok        patch", "  ok        causality", "  ok        dense start"]
    assert "llama: causality" in result.stderr


def test_json_for_machines(quick: None) -> None:
    result = invoke("gemma2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["model"], report["verdict"], report["ok"]) == ("gemma2", "refused", True)


def test_a_directory(quick: None, tmp_path: Path) -> None:
    model_named("qwen3", torch.float32).save_pretrained(tmp_path)
    result = invoke(str(tmp_path), "--dtype", "fp32")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path}: right, 2 sparse layers")


def write_checkpoint(kind: str, folder: Path) -> None:
    """As its authors published it, tiny and random."""
    from patching import test_llama_nsa, test_minicpm, test_minimax_m3_as_published

    if kind == "NSA-1B":
        test_llama_nsa.write(folder, test_llama_nsa.NSA)
    elif kind == "MiniCPM4":
        test_minicpm.write(folder, test_minicpm.MODEL)
    else:
        test_minimax_m3_as_published.write(folder)


@pytest.mark.parametrize("kind", ["NSA-1B", "MiniCPM4", "MiniMax-M3"])
def test_checkpoints_that_others_trained(kind: str, tmp_path: Path) -> None:
    """With all checks, as they are on the hub."""
    write_checkpoint(kind, tmp_path)
    result = invoke(str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["verdict"], len(report["layers"])) == ("right", 2)
    of_patches = run._OF_UNPATCHED if kind != "NSA-1B" else ()
    expected = [name for name in run.CHECKS if name not in of_patches]
    assert [(check["name"], check["status"]) for check in report["checks"]] == [
        (name, "ok") for name in expected
    ]


MODULE = """
import torch
from nsa_flex.testing.models import tiny_decoder

class Dreamer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = tiny_decoder("llama")
        self.config = self.inner.config

    def forward(self, ids, **inputs):
        logits = self.inner(ids, **inputs).logits
        patched = hasattr(self.inner.model.layers[0].self_attn, "nsa")
        return logits + logits.mean(1, keepdim=True) if patched else logits

def dreamer():
    return Dreamer()

def number():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "checked_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "checked_models"


def test_a_model_that_is_wrong_once_patched(quick: None, module: str) -> None:
    result = invoke(f"{module}:dreamer")
    assert result.exit_code == 1
    assert "wrong     causality  logits up to token 0 under other tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_family"], "transformers has no causal language model of type"),
        (["gemma3n"], "gemma3n cannot be built alone"),
        (["no_such_module:model"], "No module named 'no_such_module'"),
        (["{module}:number"], "must return an nn.Module, got int"),
        (["{module}:missing"], "has no attribute 'missing'"),
        (["{empty}"], "config.json"),
        (["llama", "--dtype", "bf16"], "none of fp32, fp64"),
        (["llama", "--device", "nowhere"], "is no device"),
    ],
)
def test_wrong_usage_exits_with_2(
    module: str, tmp_path: Path, arguments: list[str], message: str
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    result = invoke(*(text.format(module=module, empty=empty) for text in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_help_has_an_example() -> None:
    assert "nsa-flex check llama" in invoke("--help").output
