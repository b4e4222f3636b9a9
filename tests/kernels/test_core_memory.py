"""Memory of the core's forward and backward: what is alive at the peak, in units of the query.

Kernels are not run where bytes are counted: the schedule allocates as it does on a device, and
cuDNN is played by what it allocates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch.profiler import ProfilerActivity, profile

from nsa_flex import NSAConfig, nsa_attention
from reference.accuracy import leaf
from reference.interpreter import INTERPRETED, interpreted, kernels
from reference.modes import deterministic_algorithms
from reference.played_cudnn import causal, causal_gradients

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from nsa_flex.fallback_kernels.compressed import cudnn, fold
from nsa_flex.fallback_kernels.fused import operators as core
from nsa_flex.fallback_kernels.fused import route
from nsa_flex.fallback_kernels.launch import direct, plans
from nsa_flex.fallback_kernels.selected import config as selected_plan

PAPER = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
HEADS, KV_HEADS, TOKENS, DIM = 64, 4, 2048, 128
QUERY_BYTES = 2 * HEADS * TOKENS * DIM
# Numbers by row, keys and values, their gradients, the index: less than this of a query.
SMALL_PART = 0.35
# Of any route, by query and head, in units of the query.
STATS = 14 * 4 / (2 * DIM)
# While cuDNN is at the last third of the fold: dQ of all of it, and a workspace of four times a
# third's, with float32 dQ, and dK and dV of every query head.
CUDNN = 15 / 16 + 4 * 5 / 16

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="counts the CPU's allocations")

test_kernels_under_the_interpreter = interpreted(__file__)


def is_plain(_: Tensor) -> bool:
    """As on CUDA, also while a profiler counts."""
    return not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


@pytest.fixture
def _long(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Few tokens as if they were many: cuDNN on a fold in thirds, launch plans, plain calls."""
    monkeypatch.setattr(route, "is_short", lambda *_: False)
    monkeypatch.setattr(route, "MASKED_DIM_BACKWARD", 0)
    monkeypatch.setattr(route, "RANGES_TOKENS", 0)
    monkeypatch.setattr(route, "RANGES_ROW", 0)
    monkeypatch.setattr(fold, "SHORT", 0)
    monkeypatch.setattr(plans, "DEVICES", {"cpu"})
    monkeypatch.setattr(direct, "is_plain", is_plain)
    plans.forget_plans()
    # Graphs of other versions of the backward would be found.
    with (
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        yield
    plans.forget_plans()


@pytest.fixture
def _allocations_alone(_long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel runs; partial results take a fixed part of the query."""
    monkeypatch.setattr(InterpretedFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr(selected_plan, "PARTIAL_BYTES", QUERY_BYTES)
    monkeypatch.setattr(selected_plan, "MIN_CHUNK_TOKENS", 64)

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), torch.empty(query.shape[:3])

    def differentiate(
        grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad_query = torch.empty_like(query)
        torch.empty(4 * grad_query.nbytes, dtype=torch.uint8)
        return grad_query, torch.empty_like(key), torch.empty_like(value)

    monkeypatch.setattr(cudnn, "causal", attend)
    monkeypatch.setattr(cudnn, "causal_gradients", differentiate)


def attend(*inputs: Tensor) -> Tensor:
    query, key, value, *compressed, gates = inputs
    return core.core_attention(
        *(query, key, value, *compressed, key, value, gates),
        config=PAPER,
        scale=0.1,
        return_blocks=False,
    ).out


def attend_and_project(weight: Tensor, *inputs: Tensor) -> Tensor:
    return attend(*inputs).transpose(1, 2).flatten(2) @ weight


def inputs_of(*, tokens_first: bool) -> list[Tensor]:
    """The core's, in memory (B, S, H, D) or (B, H, S, D)."""
    blocks = PAPER.num_compressed_blocks(TOKENS)
    sizes = [(HEADS, TOKENS, DIM), *[(KV_HEADS, TOKENS, DIM)] * 2, *[(KV_HEADS, blocks, DIM)] * 2]
    found = [leaf((1, *size), torch.bfloat16, "cpu") for size in [*sizes, (HEADS, TOKENS, 3)]]
    if tokens_first:
        return found
    return [x.detach().contiguous().requires_grad_() for x in found]


def allocated(call: Callable[[], Any]) -> list[int]:
    """Bytes alive above those before a call, at each allocation; at the end with its results."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        _results = call()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return list(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def peak(call: Callable[[], Any]) -> float:
    """Bytes alive at the peak of a call above those before it."""
    return max(allocated(call))


def peaks(function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> list[float]:
    """Of a step as it is first, recorded and replayed."""

    def step() -> None:
        out = function(*inputs)
        torch.autograd.grad(out, inputs, grad)

    return [peak(step) / QUERY_BYTES for _ in range(3)]


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("_allocations_alone")
@pytest.mark.kept(
    lambda compiled, grad_first, tokens_first: not compiled or (grad_first and tokens_first)
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("grad_first", [True, False], ids=["grad BSHD", "grad BHSD"])
@pytest.mark.parametrize("tokens_first", [True, False], ids=["BSHD", "BHSD"])
def test_peak_of_a_training_step(tokens_first: bool, grad_first: bool, compiled: bool) -> None:
    """Output, compressed output, the signed gradient and what cuDNN takes.

    Other memory of the query is copied once. So is other memory of the gradient, and the copy is
    the signed gradient. Compiled code may lay the gradient out anew by itself, as versions of
    PyTorch choose: while gates are differentiated, both are there with all three branches.
    """
    inputs, grad = inputs_of(tokens_first=tokens_first), torch.randn(1, TOKENS, HEADS, DIM)
    grad = grad.to(torch.bfloat16).transpose(1, 2)
    grad = grad if grad_first else grad.contiguous()
    torch._dynamo.reset()
    function = torch.compile(attend, fullgraph=True, dynamic=False) if compiled else attend
    expected = 3 + CUDNN + (not tokens_first)
    most = max(6, expected) if compiled else expected
    for found in peaks(function, inputs, grad):
        assert expected <= found <= most + SMALL_PART


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("_allocations_alone")
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "any length"])
def test_peak_in_a_compiled_model(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that the model makes is free once it has its sign: cuDNN's stage has one less.

    Then the peak is where the gates' gradients are computed: three branches, and the gradient
    without and with its sign. Graphs of any length have no more, but for statistics of any route
    and a gradient of the longest row that other kernels take. They save what others do.
    """
    monkeypatch.setattr(route, "MASKED_TIMES", 1)
    weight = torch.zeros(HEADS * DIM, 16, dtype=torch.bfloat16, requires_grad=True)
    inputs, grad = [weight, *inputs_of(tokens_first=True)], torch.zeros(1, TOKENS, 16).bfloat16()
    torch._dynamo.reset()
    if dynamic:
        for x in inputs[1:]:
            torch._dynamo.mark_dynamic(x, 2)
    function = torch.compile(attend_and_project, fullgraph=True, dynamic=dynamic)
    most = 5 + STATS + PAPER.num_selected_tokens / TOKENS if dynamic else 5
    for found in peaks(function, inputs, grad):
        assert 5 <= found <= most + SMALL_PART
    held = allocated(lambda: function(*inputs))[-1] / QUERY_BYTES
    assert 4 <= held <= 4 + SMALL_PART  # output and branches


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("_long")
@pytest.mark.kept(lambda own: not own)
@pytest.mark.parametrize("own", [False, True], ids=["shared keys", "own keys"])
def test_a_graph_of_any_length_takes_every_route(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced at a long one: its operators run lists, masked rows and short ones."""
    monkeypatch.undo()
    monkeypatch.setattr(cudnn, "causal", causal)
    monkeypatch.setattr(cudnn, "causal_gradients", causal_gradients)
    for name in ("RANGES_TOKENS", "RANGES_ROW"):
        monkeypatch.setattr(route, name, 0)
    seen: list[str] = []
    first = core.run_first_of_any_length

    def note(*call: Any) -> Any:
        seen.append(call[-1].kernels)
        return first(*call)

    monkeypatch.setattr(core, "run_first_of_any_length", note)
    torch._dynamo.reset()
    graphs = CompileCounterWithBackend("aot_eager")
    config = NSAConfig(8, 4, 32, 2, 0, 1, window_size=20)

    def attend(*inputs: Tensor) -> Tensor:
        return attend_small(None, *inputs, config=config)

    compiled = torch.compile(attend, backend=graphs, fullgraph=True, dynamic=True)
    for length in (130, 68, 20):
        inputs, grad = small_inputs(length, own=own), torch.randn(1, 4, length, 16)
        with deterministic_algorithms():
            wanted = torch.autograd.grad(attend(*inputs), inputs, grad)
            found = torch.autograd.grad(compiled(*inputs), inputs, grad)
        for got, want in zip(found, wanted, strict=True):
            assert torch.equal(got, want)
    assert seen == ["lists", "masked", "short"]
    assert graphs.frame_count == 1


def small_inputs(length: int, *, own: bool) -> list[Tensor]:
    """Of the core, with keys and values of its own for the window; gates of both signs, and 0."""
    blocks = SMALL.num_compressed_blocks(length)
    sizes = [(4, length), (2, length), (2, length), (2, blocks), (2, blocks)]
    found = [leaf((1, *size, 16), torch.float32, "cpu") for size in sizes]
    gates = torch.randn(1, 4, length, 3)
    gates[:, 0, ::3] = 0
    window = [leaf((1, 2, length, 16), torch.float32, "cpu") for _ in range(2 * own)]
    return [*found, gates.requires_grad_(), *window]


def attend_small(start: Tensor | None, *inputs: Tensor, config: NSAConfig = SMALL) -> Tensor:
    q, k, v, ck, cv, gates, *own = inputs
    config.specialize()
    options: dict[str, Any] = {"config": config, "scale": 0.3, "document_start": start}
    return core.core_attention(q, k, v, ck, cv, *(own or (k, v)), gates, **options).out


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("_allocations_alone")
def test_a_graph_that_is_retained_keeps_what_it_saved() -> None:
    inputs = inputs_of(tokens_first=True)
    out = attend(*inputs)
    grad = torch.zeros_like(out)
    for retained in (True, True, False):
        torch.autograd.grad(out, inputs, grad, retain_graph=retained)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, inputs, grad)


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("_long")
@pytest.mark.parametrize(
    ("documents", "own"), [(False, True), (True, False)], ids=["fold, own keys", "documents"]
)
def test_two_steps_compute_what_one_does(
    documents: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, for a gradient that is copied too: as a body, recorded, replayed, compiled."""
    monkeypatch.setattr(cudnn, "causal", causal)
    monkeypatch.setattr(cudnn, "causal_gradients", causal_gradients)
    length = 21
    inputs = small_inputs(length, own=own)
    start = (torch.arange(length) // 16 * 16).int()[None] if documents else None
    grad = torch.randn(1, length, 4, 16).transpose(1, 2)
    copied = grad.contiguous()

    def gradients(function: Callable[..., Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(start, *inputs), inputs, grad)

    with monkeypatch.context() as patched:
        patched.setattr(core, "is_one_operator", lambda *_: True)
        wanted = gradients(attend_small, grad)
    compiled = torch.compile(attend_small, backend="aot_eager", fullgraph=True)
    calls = [(attend_small, grad), *[(attend_small, copied)] * 3, (compiled, grad)]
    for call in calls:
        for got, want in zip(gradients(*call), wanted, strict=True):
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("documents", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("tokens_first", [True, False], ids=["grad BSHD", "grad BHSD"])
def test_two_steps_on_a_gpu_compute_what_one_does(
    documents: bool, compiled: bool, tokens_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, where sums have an order: as bodies, recorded, and replayed."""
    length, config = 5001, PAPER
    blocks = config.num_compressed_blocks(length)
    sizes = [(8, length), (2, length), (2, length), (2, blocks), (2, blocks)]
    inputs = [leaf((1, *size, 64), torch.bfloat16, "cuda") for size in sizes]
    gates = torch.randn(1, 8, length, 3, device="cuda", dtype=torch.bfloat16)
    inputs.append(gates.requires_grad_())
    start = (torch.arange(length, device="cuda") // 1024 * 1024)[None] if documents else None
    grad = torch.randn(1, length, 8, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    grad = grad if tokens_first else grad.contiguous()

    def attend(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, config=config, document_start=start)

    def gradients() -> tuple[set[str], tuple[Tensor, ...]]:
        call = torch.compile(attend, fullgraph=True) if compiled else attend
        for _ in range(3):
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                found = torch.autograd.grad(call(*inputs), inputs, grad)
        return {event.name for event in trace.events()}, found

    with (
        deterministic_algorithms(),
        functorch_config.patch(enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(core, "is_one_operator", lambda *_: True)
            one, wanted = gradients()
        torch._dynamo.reset()
        two, found = gradients()
    assert "nsa_flex::core_backward" in one
    assert {"nsa_flex::core_backward_gates", "nsa_flex::core_backward_branches"} <= two
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got, want)
