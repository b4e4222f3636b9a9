"""Keys, values and gates from one product: where, and that results and gradients stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nsa_flex
from nsa_flex import NSAAttention, NSAConfig
from nsa_flex.joined import JoinedInput, joined_input, reads_linearly
from patching.tiny_models import tiny_model

SMALL = NSAConfig(8, 4, 8, 4, window_size=16)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _forget() -> None:
    torch._dynamo.reset()


def attention(**options: Any) -> NSAAttention:
    """A layer whose gates are not all the same."""
    layer = NSAAttention(32, 6, 2, 8, config=SMALL, **options)
    nn.init.normal_(layer.gates.linear.weight, std=0.3)
    nn.init.normal_(layer.gates.linear.bias, std=0.3)
    return layer


def products(graphs: list[torch.fx.GraphModule]) -> list[int]:
    """Columns of the linear maps in graphs, in order."""
    return [
        node.meta["example_value"].shape[-1]
        for graph in graphs
        for node in graph.graph.nodes
        if node.target in (F.linear, torch._C._nn.linear)
    ]


def recorded(fn: Callable[..., Tensor]) -> tuple[Callable[..., Tensor], list[Any]]:
    """fn compiled as one graph, and the graphs that this makes."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(fn, fullgraph=True, backend=backend), graphs


def check(module: nn.Module, run: Callable[..., Tensor], x: Tensor, columns: list[int]) -> None:
    """Compiled maps by their columns; result and every gradient are those of eager code."""
    compiled, graphs = recorded(run)
    parameters = [each for each in module.parameters() if each.requires_grad]
    want, got = run(x), compiled(x)
    assert products(graphs) == columns
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(want)
    assert_equal_gradients(
        *(torch.autograd.grad(each, [x, *parameters], grad) for each in (got, want)), grad
    )


def assert_equal_gradients(found: Any, wanted: Any, grad: Tensor) -> None:
    """To rounding; some of φ's vanish but for it, and unused parameters have none."""
    assert sum(each is not None and bool(each.norm() > 0.01 * grad.norm()) for each in found) >= 5
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert b is None or (a - b).norm() <= 2e-5 * max(b.norm(), 0.01 * grad.norm())


# Of 6 query and 2 KV heads of 8: 48 for q, 16 for k and v, 18 for the gates; padded to 8.
APART = [48, 16, 16, 24, 32]
JOINED = [56, 48, 32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("separate", [False, True])
def test_of_a_module(device: str, bias: bool, separate: bool) -> None:
    layer = attention(bias=bias, separate_branch_kv=separate, device=device)
    x = torch.randn(2, 40, 32, device=device, requires_grad=True)
    check(layer, layer, x, [120 if separate else 56, 48, 32])


def test_of_packed_documents_with_checkpointing() -> None:
    """Within the region that a checkpoint recomputes, and without side effects of it."""
    layer = attention()
    bounds = torch.tensor([0, 7, 8, 40], dtype=torch.int32)

    def run(x: Tensor) -> Tensor:
        return checkpoint(layer, x, cu_seqlens=bounds, use_reentrant=False)

    x = torch.randn(1, 40, 32, requires_grad=True)
    want = run(x)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    inputs, grad = [x, *layer.parameters()], torch.randn_like(want)
    assert_equal_gradients(
        *(torch.autograd.grad(each, inputs, grad) for each in (got, want)), grad
    )


def _hooked(layer: NSAAttention) -> None:
    layer.v_proj.register_forward_hook(lambda module, args, out: out * 2)


def _frozen(layer: NSAAttention) -> None:
    layer.k_proj.weight.requires_grad_(False)


def _wrapped(layer: NSAAttention) -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    other = Doubled(32, 16, bias=False)
    layer.k_proj = other


def _half_biased(layer: NSAAttention) -> None:
    layer.k_proj = nn.Linear(32, 16, bias=True)


@pytest.mark.parametrize("change", [_hooked, _frozen, _wrapped, _half_biased])
def test_what_is_more_than_a_product_is_called(change: Callable[[NSAAttention], None]) -> None:
    layer = attention()
    change(layer)
    check(layer, layer, torch.randn(2, 40, 32, requires_grad=True), APART)


def test_another_gate_is_called() -> None:
    layer = attention()
    layer.gates.linear = nn.Linear(32, 18, bias=False)
    check(layer, layer, torch.randn(2, 40, 32, requires_grad=True), [48, 16, 16, 18, 32])


def test_without_gradients_weights_are_not_put_together() -> None:
    layer = attention()
    compiled, graphs = recorded(layer)
    with torch.no_grad():
        compiled(torch.randn(2, 40, 32))
    assert products(graphs) == APART


def test_eager_calls_have_no_joined_input() -> None:
    layer, x = attention(), torch.randn(1, 4, 32, requires_grad=True)
    assert joined_input(x, [layer.k_proj, layer.v_proj], layer.gates) is None


@pytest.mark.kept(lambda family: family in ("llama", "qwen2"))
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_of_patched_layers(family: str, device: str) -> None:
    model = tiny_model(family).to(device)
    nsa_flex.patch(model, SMALL)
    for name, parameter in model.named_parameters():
        if "gates" in name or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    decoder, attend = model.model, model.model.layers[0].self_attn
    sizes = [each.weight.shape[0] for each in (attend.k_proj, attend.v_proj)]
    sizes.append(attend.nsa.gates.linear.weight.shape[0])
    compiled, graphs = recorded(lambda x: decoder(inputs_embeds=x, use_cache=False)[0])
    x = torch.randn(2, 40, model.config.hidden_size, device=device, requires_grad=True)
    want, got = decoder(inputs_embeds=x, use_cache=False)[0], compiled(x)
    width, inner = model.config.hidden_size, model.config.intermediate_size
    queries = attend.q_proj.weight.shape[0]
    of_layer = [sum(sizes) + -sum(sizes) % 8, queries, width, inner, inner, width]
    assert products(graphs) == of_layer * len(decoder.layers)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    grad, parameters = torch.randn_like(want), list(decoder.parameters())
    assert_equal_gradients(
        *(
            torch.autograd.grad(each, [x, *parameters], grad, allow_unused=True)
            for each in (got, want)
        ),
        grad,
    )


def test_a_cache_is_filled_by_each_map() -> None:
    model = tiny_model("llama")
    nsa_flex.patch(model, SMALL)
    compiled, graphs = recorded(lambda x: model.model(inputs_embeds=x, use_cache=False)[0])
    x = torch.randn(1, 20, model.config.hidden_size)
    with torch.no_grad():
        compiled(x)
    assert len(products(graphs)) == len(model.model.layers) * 8


class Plain(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        shape = (*hidden.shape[:-1], -1)
        return self.k_proj(hidden).view(shape) + self.q_proj(hidden)


class Added(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.k_proj(hidden) + hidden


class Assigned(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float()
        return self.k_proj(hidden)


class Other(nn.Module):
    def forward(self, hidden: Tensor) -> Tensor:
        return self.q_proj(hidden) + self.o_proj(hidden)


@pytest.mark.parametrize("kind", [Plain, Added, Assigned, Other])
def test_which_forwards_read_linearly(kind: type[nn.Module]) -> None:
    assert reads_linearly(kind(), "hidden", ("q_proj", "k_proj")) == (kind is Plain)


def test_forwards_without_source_do_not_read_linearly() -> None:
    made: dict[str, Any] = {"nn": nn}
    exec("class Made(nn.Module):\n def forward(self, hidden): return self.k_proj(hidden)", made)
    assert not reads_linearly(made["Made"](), "hidden", ("k_proj",))


def test_nothing_but_a_map_takes_a_joined_input() -> None:
    x, weight = torch.randn(1, 3, 4), torch.randn(2, 4)
    joined = JoinedInput(x, [(weight, None)], [torch.zeros(1, 3, 2)], torch.zeros(1, 3, 3))
    other, bias = torch.randn(5, 4), torch.randn(2)
    assert torch.equal(F.linear(joined, other), F.linear(x, other))
    assert torch.equal(F.linear(joined, weight), torch.zeros(1, 3, 2))
    tied = F.linear(x, weight, bias)
    assert torch.equal(F.linear(joined, weight, bias), tied)
    assert torch.equal(F.linear(joined, weight, bias=bias), tied)
    assert joined.shape == x.shape
    with pytest.raises(TypeError, match="joined"):
        torch.add(joined, 1)
    assert copy.copy(joined).x is x
