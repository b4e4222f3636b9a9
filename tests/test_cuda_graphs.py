"""CUDA graphs are taken, and nothing waits: function, layer and patched model, as they train.

`mode="reduce-overhead"` throughout. A skipped CUDA graph is silent; torch counts it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_graph_break import CUDA, attention, attention_inputs, layer, random
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from nsa_flex import NSAAttention, NSAConfig, audit, patch
from nsa_flex.auditing.measuring import parameters_of
from nsa_flex.hot_path import ForwardBackward, SyncDetector
from nsa_flex.hot_path.syncs import cuda_sync_warnings
from nsa_flex.hot_path.torch_internals import cudagraph_skips

pytestmark = pytest.mark.gpu

CONFIG = NSAConfig(compression="mlp")
TOKENS = 1000
# The first call runs as it is, the second is recorded, the third is a replay.
CALLS = 4


@pytest.fixture(autouse=True)
def _forget_shapes() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llama(**changes: Any) -> torch.nn.Module:
    pytest.importorskip("transformers")
    from patching.tiny_models import tiny_model

    # The second layer goes by the launch plans of the first.
    sizes = {"num_hidden_layers": 2, "hidden_size": 256, "head_dim": 64}
    return patch(tiny_model("llama", **sizes).cuda(), CONFIG, **changes)


def token_ids() -> torch.Tensor:
    return torch.randint(2, 90, (1, TOKENS), device=CUDA)


def function() -> tuple[Callable, tuple]:
    return attention(CONFIG, "auto"), attention_inputs(CUDA, TOKENS, grad=True)


def module() -> tuple[Callable, tuple]:
    made = layer(CUDA)
    return made, (random(CUDA, 1, TOKENS, made.hidden_size, grad=True),)


def patched() -> tuple[Callable, tuple]:
    model = llama().bfloat16()
    return lambda ids: model(input_ids=ids, use_cache=False).logits, (token_ids(),)


def mixed_precision() -> tuple[Callable, tuple]:
    made = NSAAttention(256, 4, 2, config=CONFIG, device=CUDA)

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return made(x)

    return step, (torch.randn(1, TOKENS, 256, device=CUDA, requires_grad=True),)


def save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_checkpointing() -> tuple[Callable, tuple]:
    made, inputs = module()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return lambda x: checkpoint(made, x, use_reentrant=False, context_fn=contexts), inputs


MADE = {f.__name__: f for f in (function, module, patched, mixed_precision)}
INFERRED = ("function", "patched")  # a patched model is made of modules
TRAINED = {**MADE, "selective_checkpointing": selective_checkpointing}


def assert_recorded_without_waiting(call: Callable[[], Any]) -> None:
    """Repeats `call` until it is a replay; no CUDA graph is skipped, no replay waits."""
    detector = SyncDetector()
    with cudagraph_skips() as skips:
        for number in range(CALLS):
            torch.compiler.cudagraph_mark_step_begin()
            last = number == CALLS - 1
            with cuda_sync_warnings(detector) if last else contextlib.nullcontext():
                call()
        torch.cuda.synchronize()
    assert skips.count == 0, skips.reasons
    assert detector.findings == []


@pytest.mark.parametrize("name", INFERRED)
def test_inference(name: str) -> None:
    fn, inputs = MADE[name]()
    compiled = torch.compile(fn, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        assert_recorded_without_waiting(lambda: compiled(*inputs))


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_training(name: str) -> None:
    fn, inputs = TRAINED[name]()
    step = ForwardBackward(torch.compile(fn, fullgraph=True, mode="reduce-overhead"))
    trained = [x for x in (*parameters_of(fn), *inputs) if x.requires_grad]

    def zero_grad_and_step() -> None:
        for x in trained:  # Gradients lie in memory that the next replay writes to.
            x.grad = None
        step(*inputs)

    assert_recorded_without_waiting(zero_grad_and_step)
    assert all(x.grad is not None for x in trained)


def test_gradient_accumulation() -> None:
    """Two micro-batches a step: gradients add up to those of each alone.

    They need memory of their own, as `zero_grad(set_to_none=False)` keeps it: a gradient that a
    replay returned is overwritten by the next. The kernels' atomic additions may turn a rounding
    to bfloat16, 2^-8 of an element.
    """
    made = NSAAttention(256, 4, 2, config=CONFIG, device=CUDA)
    for parameter in made.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.0)

    def loss(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return made(x).square().mean()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")

    def gradients(*batches: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad(set_to_none=False)
        for x in batches:
            torch.compiler.cudagraph_mark_step_begin()
            compiled(x).backward()
        optimizer.step()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    first, second = (torch.randn(1, TOKENS, 256, device=CUDA) for _ in range(2))
    with cudagraph_skips() as skips:
        for _ in range(CALLS):
            found = gradients(first, second)
    assert skips.count == 0, skips.reasons
    for both, one, other in zip(found, gradients(first), gradients(second), strict=True):
        assert (both - one - other).norm() <= 2**-7 * both.norm()
        assert both.norm() > 0


@pytest.mark.long
def test_audit_on_cuda() -> None:
    made = layer(CUDA)
    inputs = [(random(CUDA, 1, length, made.hidden_size),) for length in (1000, 700, 2000)]
    report = audit(made, inputs)
    assert report.ok, report
    assert report.graphs == {"inference": 2, "training": 2}
    for phase in report.phases:
        assert phase.cudagraphs == 0
        assert phase.measured["compile_seconds_warm"] < phase.measured["compile_seconds_cold"]
        assert phase.measured["peak_bytes_compiled"] > 0
        assert phase.kernels
    assert {branch.branch for branch in report.branches} >= {"compressed", "selected", "sliding"}
    assert any(branch.kernels for branch in report.branches)


def test_audit_names_what_cuda_cannot_record() -> None:
    """An input that is changed in place: torch skips the CUDA graph and says why."""

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1.0).sin()

    report = audit(shifted, torch.ones(64, device=CUDA), train=False)
    (finding,) = [f for f in report.findings if f.kind == "cudagraph-skip"]
    assert "mutated inputs" in finding.message
