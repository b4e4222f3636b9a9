"""`nsa-flex convert`: its stages, and what it refuses before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import nsa_flex.training.convert as module
from nsa_flex.cli.app import app


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["convert", *arguments], prog_name="nsa-flex")


def test_options_become_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def convert(checkpoint: str, out: Path, files: list[str], **options: Any) -> dict[str, Any]:
        seen.update(options, given=(checkpoint, out, files))
        return {"stopped": False, "recall": {}}

    monkeypatch.setattr(module, "convert", convert)
    options = ["--steps", "10,20,0", "--lengths", "64,128,256", "--rates", "1e-2,1e-3,1e-4"]
    options += ["--alignment", "0.5", "--keep-dense", "2", "--choice-len", "512"]
    options += ["--set", "seed=1", "--json"]
    result = invoke("dense", "--text", "a", "--text", "b", "--out", "runs/x", *options)
    assert result.exit_code == 0, result.output
    assert seen["given"] == ("dense", Path("runs/x"), ["a", "b"])
    assert list(seen["overrides"]) == ["seed=1"]
    assert (seen["tokenizer"], seen["keep_dense"], seen["choice_len"]) == (None, 2, 512)
    assert seen["stages"] == [
        module.Stage("1-align", 10, 64, 1e-2, frozen=True, alignment=1.0),
        module.Stage("2-sparse", 20, 128, 1e-3, alignment=0.5),
        module.Stage("3-long", 0, 256, 1e-4),
    ]
    invoke("dense", "--text", "a", "--out", "runs/x")
    assert seen["stages"] == list(module.STAGES)


def test_a_stopped_conversion_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "convert", lambda *given, **options: {"stopped": True})
    assert invoke("dense", "--text", "a", "--out", "runs/x").exit_code == 130


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--steps", "1,2"], "expected three numbers with commas between them"),
        (["--rates", "a,b,c"], "expected three numbers with commas between them"),
        (
            ["--steps", "9,9,9", "--lengths", "512,4096,4096"],
            "all of which are selected: take more",
        ),
        (
            ["--steps", "9,9,9", "--set", "data.documents=separate"],
            'expected "joined" for stage 1-align',
        ),
    ],
)
def test_wrong_usage_exits_with_2(options: list[str], text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    given = ["dense", "--text", str(tmp_path / "a.txt"), "--out", str(tmp_path / "out")]
    result = invoke(*given, *options)
    assert result.exit_code == 2
    told = " ".join(result.stderr.replace("│", " ").split())
    assert text in told
    assert not (tmp_path / "out").exists()
