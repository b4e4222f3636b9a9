"""What is the audit's doing, or the caller's, is no finding; what is the function's always is."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from audit.quick_audit import quick
from nsa_flex.auditing.sources import place_of
from nsa_flex.hot_path import SyncDetector, find_syncs

pytestmark = pytest.mark.usefixtures("forget_shapes")


def made_with_syncs() -> tuple[torch.Tensor]:
    lengths = torch.tensor([3, 8])
    x = torch.ones(2, lengths.max().item())
    return (x[x > 0].view(2, -1),)


@torch.compile(backend="eager")
def broken_maker():
    x = torch.ones(4)
    torch._dynamo.graph_break()
    return x + 1


def test_what_makes_the_inputs_is_not_audited() -> None:
    for phase in ({"train": False}, {"train": True}, {"decode": [made_with_syncs]}):
        weight = nn.Parameter(torch.ones(()))
        report = quick(lambda x, weight=weight: x * weight, [made_with_syncs] * 2, **phase)
        assert report.ok, report
        assert report.notes == ()


def test_graph_breaks_of_what_makes_the_inputs_are_not_reported() -> None:
    report = quick(torch.sin, lambda: (broken_maker(),))
    assert report.ok, report
    assert report.graphs == {"inference": 1}


def classes(x: torch.Tensor) -> torch.Tensor:
    return F.one_hot(x, num_classes=4).float() * 2


def test_the_detector_does_not_recompile_what_it_watches() -> None:
    report = quick(classes, torch.zeros(3, dtype=torch.long))
    assert report.ok, report
    assert report.graphs == {"inference": 1}
    assert report.phases[0].recompiles == ()


def test_compiled_one_hot_keeps_its_graph_and_eager_one_hot_is_silent() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable:
        graphs.append(module)
        return module.forward

    compiled, x = torch.compile(classes, backend=backend), torch.zeros(3, dtype=torch.long)
    compiled(x)
    with SyncDetector(compiled=True) as detector:
        compiled(x)
    assert (len(graphs), detector.findings) == (1, [])
    assert find_syncs(lambda x: F.one_hot(input=x, num_classes=4), x) == []
    assert find_syncs(F.one_hot, x)


def test_calls_after_the_sweep_are_not_counted() -> None:
    class Counting(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    (phase,) = quick(Counting(), [torch.ones(4)] * 2).phases
    assert len(phase.graphs) == 2
    assert len(phase.recompiles) == 1


def test_recompilation_of_a_torch_module_names_its_forward() -> None:
    (phase,) = quick(nn.Linear(4, 4), [torch.ones(n, 4) for n in (3, 5)], train=False).phases
    (recompile,) = phase.recompiles
    file, line, function = place_of(recompile.location)
    forward = nn.Linear.forward
    assert (file, line) == (inspect.getfile(forward), forward.__code__.co_firstlineno)
    assert function == "forward"


def no_gradient(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    return (x * weight.exp()).detach()


def test_output_without_a_gradient_is_a_note() -> None:
    report = quick(no_gradient, (torch.ones(4), nn.Parameter(torch.ones(4))))
    assert report.ok, report
    assert report.graphs == {"inference": 1}
    assert any("training: no output requires a gradient" in note for note in report.notes)


def wrong_shapes(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    return y @ y


def fails_in_training(x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        raise LookupError("no loss yet")
    return x * 2


def failing_input() -> tuple[torch.Tensor]:
    raise LookupError("no such file")


def test_exception_of_the_function_is_a_finding() -> None:
    report = quick(wrong_shapes, torch.ones(2, 3))
    (finding,) = report.findings
    assert finding.kind == "error"
    assert finding.message.startswith("RuntimeError: mat1 and mat2 shapes")
    file, line, function = place_of(finding.location)
    first = inspect.getsourcelines(wrong_shapes)[1]
    assert (Path(file).name, line, function) == (Path(__file__).name, first + 2, "wrong_shapes")
    assert report.phases == ()


def test_exception_in_one_phase_leaves_the_others() -> None:
    report = quick(fails_in_training, torch.ones(2, requires_grad=True))
    (finding,) = report.findings
    assert (finding.kind, finding.phases) == ("error", ("training",))
    assert finding.location.endswith("in fails_in_training")
    assert report.graphs == {"inference": 1}


def test_exception_of_the_sweep_keeps_what_eager_code_showed() -> None:
    calls: list[int] = []

    def fails_later(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 4:
            raise LookupError("once too often")
        return x * x.max().item()

    report = quick(fails_later, torch.ones(3), lint_scope="none")
    assert {finding.kind for finding in report.findings} == {"error", "host-sync"}
    assert report.graphs == {}


@pytest.mark.parametrize("name", ["inputs", "decode"])
def test_exception_while_an_input_is_made_is_a_finding(name: str) -> None:
    given = {"inputs": torch.ones(2), name: [failing_input]}
    (finding,) = quick(torch.sin, given.pop("inputs"), **given).findings
    assert finding.kind == "error"
    assert finding.message == "LookupError: no such file (while an input was made)"
    assert finding.location.endswith("in failing_input")


def test_decode_steps_of_gpt2_are_not_charged_with_their_prefill() -> None:
    pytest.importorskip("transformers")
    from nsa_flex.auditing.targets import decoding_batches, logits
    from nsa_flex.testing.models import tiny_decoder

    model = tiny_decoder("gpt2")
    report = quick(logits(model), decoding_batches(model))
    assert report.ok, report


@pytest.mark.parametrize(
    ("experts", "mend"), [("grouped_mm", "compile in bfloat16"), ("eager", "'grouped_mm'")]
)
def test_loops_over_experts_are_marked_as_fallbacks(experts: str, mend: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation(experts)
    layer = model.model.layers[0].mlp
    report = quick(layer, torch.randn(1, 12, 32), train=False)
    in_loops = [f for f in report.findings if "transformers" in f.location]
    assert in_loops
    for finding in in_loops:
        assert "(fallback of transformers: a loop over experts)" in finding.message
        assert mend in finding.mend


def test_only_loops_over_experts_are_marked() -> None:
    report = quick(lambda x: x * x.max().item(), torch.ones(3))
    assert not any("experts" in finding.message for finding in report.findings)


def test_packages_below_this_environment_are_not_own_code(tmp_path: Path) -> None:
    """As those that an environment with --system-site-packages, or a .pth file, looks into."""
    below = tmp_path / "site-packages"
    (below / "installed_below").mkdir(parents=True)
    (below / "installed_below" / "__init__.py").write_text("def f(x):\n    return x.item()\n")
    script = (
        "import installed_below\n"
        "from nsa_flex.auditing.lint import lint\n"
        "assert lint(installed_below.f) == [], lint(installed_below.f)\n"
        "assert len(lint(installed_below.f, 'all')) == 1\n"
    )
    path = f"{below}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
