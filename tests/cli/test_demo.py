"""`nsa-flex demo`: one quick run, its report and picture, its exit codes, and its parts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.cli import demo, demo_model
from nsa_flex.cli.app import app

CPU = torch.device("cpu")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", *arguments], prog_name="nsa-flex")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    """What one run answered, and the folder that it wrote."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    return invoke("--quick", "--json", "--device", "cpu", "--out", str(out)), out


@pytest.fixture(scope="module")
def report(quick: tuple[Result, Path]) -> dict[str, Any]:
    return json.loads(quick[0].stdout)


def test_quick_run_succeeds(quick, report):
    assert quick[0].exit_code == 0, quick[0].output
    assert report["wrong"] == []


def test_stdout_is_the_report_that_was_written(quick, report):
    assert json.loads((quick[1] / "report.json").read_text()) == report


def test_progress_goes_to_stderr(quick):
    for heading in ("Text", "Model", "Audit", "Compile", "Train", "Generate", "Done"):
        assert f"{heading} ─" in quick[0].stderr


def test_picture_is_a_png(quick):
    assert (quick[1] / "losses.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_losses_fell_for_both_models(report):
    for name in ("nsa", "twin"):
        losses = report["losses"][name]
        assert len(losses["training"]) == report["sizes"]["steps"]
        assert all(map(math.isfinite, losses["training"]))
        assert losses["held_out_before"] == losses["held_out"]["0"]
        assert losses["held_out_after"] == losses["held_out"][str(report["sizes"]["steps"])]
        # Random weights know nothing: nearly log 256 nats a byte.
        assert losses["held_out_before"] == pytest.approx(math.log(256), abs=0.2)
        assert losses["held_out_after"] < 0.7 * losses["held_out_before"]


def test_report_tells_what_ran(report):
    assert report["environment"]["packages"]["torch"] == torch.__version__
    assert report["device"] == "cpu"
    assert report["sizes"]["config"] == demo_model.QUICK.config.to_dict()
    assert report["audit"] == {"findings": [], "graphs": 2}
    assert report["parameters"]["nsa"] > report["parameters"]["twin"]
    assert 0 < report["keys_read"]["fraction_last"] < report["keys_read"]["fraction_mean"] < 1
    for times in report["step_milliseconds"].values():
        assert times["compiled"] > 0
        assert times["eager"] > 0
    stages = ("audit", "compile_nsa", "compile_twin", "train", "generate", "total")
    assert all(report["seconds"][stage] > 0 for stage in stages)
    assert report["generated"]["prompt"]
    assert report["generated"]["text"]


@pytest.mark.parametrize("wrong", [[], ["something"]])
def test_exit_code_says_whether_something_was_wrong(wrong, monkeypatch):
    monkeypatch.setattr("nsa_flex.cli.demo._Demo.run", lambda self: {"wrong": wrong})
    result = invoke("--quick", "--json")
    assert result.exit_code == len(wrong)
    assert json.loads(result.stdout) == {"wrong": wrong}


def losses(before: float, after: float) -> dict[str, Any]:
    return {"held_out_before": before, "held_out_after": after}


@pytest.mark.parametrize("after", [5.5, 5.1, math.nan])
def test_verdict_on_a_loss_that_did_not_fall(after):
    seen = {"nsa": losses(5.5, after), "twin": losses(5.5, 2.0)}
    report = {"losses": seen, "sizes": {"steps": 7}, "audit": {"findings": []}}
    (sentence,) = demo.verdict(report)
    assert "held-out loss of nsa did not fall visibly (5.500 before" in sentence
    assert "after 7 steps; raise --steps" in sentence


def test_verdict_on_findings():
    seen = {"nsa": losses(5.5, 2.0)}
    report = {"losses": seen, "sizes": {"steps": 7}, "audit": {"findings": [{}, {}]}}
    assert demo.verdict(report) == ["the audit found 2 things (listed above)"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "nonsense"], "'nonsense' is no device"),
        (["--device", "meta"], "runs on cpu and cuda"),
        (["--device", "cuda:99"], "torch sees"),
        (["--steps", "0"], "--steps"),
        (["--seq-len", "8"], "--seq-len"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, text):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in result.output


def test_missing_package_is_said_first(monkeypatch):
    monkeypatch.setattr("nsa_flex.cli.demo.NEEDED_PACKAGES", {"no_such_package": "bench"})
    result = invoke("--device", "cpu")
    assert result.exit_code == 2
    assert "needs no_such_package; install with: pip install 'nsa-flex[cli,bench]'" in (
        result.output
    )


def test_missing_compiler_is_said_first(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = invoke("--device", "cpu")
    assert result.exit_code == 2
    assert "needs a C++ compiler" in result.output


def test_text_that_is_too_short_exits_with_2(tmp_path):
    result = invoke("--quick", "--seq-len", "100000000", "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "seq_len=100000000 is longer than the text" in result.stderr


def quick_trainee() -> demo_model.Trainee:
    patched, _ = demo_model.build_models(demo_model.QUICK, 0, CPU)
    return demo_model.Trainee("NSA", patched, demo_model.QUICK)


def test_twins_start_equal():
    patched, twin = demo_model.build_models(demo_model.QUICK, 0, CPU)
    state = patched.state_dict()
    assert all(torch.equal(state[name], value) for name, value in twin.state_dict().items())
    assert any(".nsa." in name for name in state)


@pytest.mark.exhaustive
def test_audit_finds_a_planted_host_sync():
    trainee = quick_trainee()

    def read(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        assert not math.isnan(output.sum().item())

    trainee.model.model.norm.register_forward_hook(read)
    found = trainee.audit(torch.randint(0, 256, (2, 64)))
    assert {finding.kind for finding in found.findings} == {
        "host-sync",
        "meta-run",
        "graph-break",
    }
    assert found.graphs is None


def test_training_refuses_a_shape_that_was_not_compiled():
    trainee = quick_trainee()
    trainee.compile(torch.randint(0, 256, (2, 64)))
    other = torch.randint(0, 256, (4, 2, 72))
    with pytest.raises(RuntimeError, match="recompile"):
        demo_model.train([trainee], other, other[0], lambda _: None)


def test_compiled_layers_compute_what_eager_ones_do():
    trainee = quick_trainee()
    tokens = torch.randint(0, 256, (2, 64))
    eager = trainee.loss(tokens)
    trainee.compile(tokens)
    # A mean over 126 bytes of float32 losses of about 5.5.
    torch.testing.assert_close(trainee.loss(tokens), eager, rtol=1e-6, atol=0)


def test_loss_of_byte_frequencies():
    training = torch.tensor([7] * 499 + [9] * 243, dtype=torch.uint8)  # + 256 = 998 counts.
    windows = torch.tensor([[0, 7, 7, 9]])
    expected = -(2 * math.log(500 / 998) + math.log(244 / 998)) / 3
    assert demo_model.frequency_loss(training, windows) == pytest.approx(expected)


@pytest.mark.parametrize("seq_len", [5, 64, 100])
def test_keys_read_are_those_that_attention_reads(seq_len):
    config = NSAConfig(
        compress_block_size=8,
        compress_stride=4,
        select_block_size=8,
        num_selected_blocks=4,
        window_size=12,
    )
    num_blocks = max(1, config.num_compressed_blocks(seq_len))
    query, key, compressed = (
        torch.randn(1, heads, length, 8)
        for heads, length in ((2, seq_len), (1, seq_len), (1, num_blocks))
    )
    gates = torch.ones(1, 2, seq_len, 3)
    _, aux = nsa_attention(
        query, key, key, compressed, compressed, gates, config=config, return_aux=True
    )
    t = torch.arange(seq_len)
    chosen = (t // 8 == aux.blocks[0, 0, :, :, None]) & (t <= t[:, None, None])
    selected = chosen.sum((1, 2))
    visible = (torch.arange(num_blocks) * 4 + 7 <= t[:, None]).sum(1)
    sliding = (t + 1).clamp(max=12)
    total = selected + visible + sliding
    found = demo_model.keys_read(config, seq_len)
    assert (found.compressed, found.selected, found.sliding) == (
        visible[-1],
        selected[-1],
        sliding[-1],
    )
    assert found.fraction_last == pytest.approx(total[-1].item() / seq_len)
    assert found.fraction_mean == pytest.approx(total.sum().item() / (t + 1).sum().item())


@pytest.mark.long
@pytest.mark.gpu
def test_on_a_gpu(tmp_path, monkeypatch):
    """The whole command, on a model that is soon traced, trained and sampled.

    Without generated code, which test_cuda_graphs.py and test_graph_break.py have for patched
    models: here it took most of the time.
    """
    small = replace(
        demo_model.GPU,
        hidden_size=512,
        num_layers=2,
        seq_len=2048,
        new_bytes=40,
        compiler="aot_eager",
    )
    monkeypatch.setattr(demo_model, "GPU", small)
    result = invoke("--device", "cuda", "--steps", "60", "--json", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["sizes"]["dtype"] == "bfloat16"
