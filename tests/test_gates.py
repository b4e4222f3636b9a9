"""Gates: where they start, that they can learn from there, and in which precision."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from nsa_flex import NSAAttention
from nsa_flex import gates as gates_module
from nsa_flex.gates import GateLinear, Gates
from reference import oracle

STARTS = {"paper": [0.5, 0.5, 0.5], "dense": [0.0, 1.0, 0.0]}


@pytest.mark.parametrize("init", STARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_start_is_exact(init, dtype):
    gates = Gates(16, 4, init=init, dtype=dtype)(torch.randn(2, 7, 16, dtype=dtype))
    assert gates.shape == (2, 4, 7, 3)
    assert gates.dtype == dtype
    assert torch.equal(gates, torch.tensor(STARTS[init], dtype=dtype).expand(2, 4, 7, 3))


@pytest.mark.parametrize("init", STARTS)
def test_gradients_at_the_start_are_not_saturated(init):
    gates = Gates(16, 4, init=init)
    x = torch.randn(1, 1, 16)
    gates(x).sum().backward()
    torch.testing.assert_close(gates.linear.bias.grad, torch.full((12,), 0.25))
    torch.testing.assert_close(gates.linear.weight.grad, 0.25 * x[0].expand(12, 16))


def test_formula_and_order_of_heads_and_branches():
    gates = Gates(16, 4, init="dense", dtype=torch.float64)
    torch.nn.init.normal_(gates.linear.weight)
    torch.nn.init.normal_(gates.linear.bias)
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    got = gates(x)
    for head in range(4):
        for branch, offset in enumerate((-0.5, 0.5, -0.5)):
            row = 3 * head + branch
            logit = x @ gates.linear.weight[row] + gates.linear.bias[row]
            want = 1 / (1 + torch.exp(-logit)) + offset
            assert oracle.relative_error(got[:, head, :, branch].detach(), want.detach()) < 1e-14


def test_small_logits_move_a_closed_gate_in_bfloat16():
    gates = Gates(16, 1, init="dense", dtype=torch.bfloat16)
    torch.nn.init.constant_(gates.linear.bias, 1e-3)
    got = gates(torch.zeros(1, 1, 16, dtype=torch.bfloat16))[0, 0, 0, 0].item()
    assert got == pytest.approx(0.25e-3, rel=2**-8)


def test_offset_is_saved_but_not_learned():
    gates = Gates(16, 4, init="dense")
    assert set(gates.state_dict()) == {"linear.weight", "linear.bias", "offset"}
    assert {name for name, _ in gates.named_parameters()} == {"linear.weight", "linear.bias"}
    reloaded = Gates(16, 4, init="paper")
    reloaded.load_state_dict(gates.state_dict())
    assert reloaded(torch.zeros(1, 1, 16))[0, 0, 0].tolist() == STARTS["dense"]


def test_meta_device_then_reset():
    gates = Gates(16, 4, init="dense", device="meta").to_empty(device="cpu")
    gates.reset_parameters()
    assert gates(torch.randn(1, 1, 16))[0, 3, 0].tolist() == STARTS["dense"]


def test_a_framework_may_reset_module_by_module():
    gates = Gates(16, 4, init="dense", device="meta").to_empty(device="cpu")
    for module in gates.modules():  # parents first, as FSDP and torchtitan do
        module.reset_parameters()
    assert gates(torch.randn(1, 1, 16))[0, 3, 0].tolist() == STARTS["dense"]


def test_compiles():
    gates = Gates(16, 4)
    torch.nn.init.normal_(gates.linear.weight)
    compiled = torch.compile(gates, backend="aot_eager", fullgraph=True, dynamic=True)
    for num_tokens in (5, 9):
        x = torch.randn(2, num_tokens, 16)
        torch.testing.assert_close(compiled(x), gates(x))


@pytest.mark.kept(lambda num_heads: num_heads == 12)
@pytest.mark.parametrize(("num_heads", "columns"), [(12, 40), (16, 48)])
def test_compiled_columns_fill_up_16_bytes(num_heads, columns):
    gates = Gates(16, num_heads)
    torch.nn.init.normal_(gates.linear.weight)
    torch.nn.init.normal_(gates.linear.bias)
    compiled = torch.compile(gates, fullgraph=True, dynamic=True)
    inputs = [torch.randn(2, tokens, 16, requires_grad=True) for tokens in (5, 33)]

    def run() -> None:
        for x in inputs:
            found, want = compiled(x), gates(x)
            assert found.stride() == want.stride()
            wrt = [x, *gates.parameters()]
            pairs = [(found, want)]
            pairs += zip(
                torch.autograd.grad(found.square().sum(), wrt),
                torch.autograd.grad(want.square().sum(), wrt),
                strict=True,
            )
            for a, b in pairs:
                torch.testing.assert_close(a, b)

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run)
    assert len(codes) == 2
    assert all(f"(16, {columns})" in code or f"({columns}, 16)" in code for code in codes)


def test_a_compiled_bias_is_not_rounded():
    gates = Gates(16, 12)
    torch.nn.init.constant_(gates.linear.bias, 1 + 2**-12)
    run = torch.compile(gates, fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = run(torch.zeros(1, 3, 16))
    want = (gates.linear.bias[0]).sigmoid().expand_as(found)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=0)
    found.sum().backward()
    assert gates.linear.bias.grad.dtype == torch.float32
    exact = 3 * want[0, 0, 0, 0] * (1 - want[0, 0, 0, 0])
    torch.testing.assert_close(gates.linear.bias.grad, exact.expand(36), rtol=1e-5, atol=0)


def test_a_compiled_linear_map_of_another_class_is_called():
    class Zero(torch.nn.Module):
        def forward(self, x):
            return x.new_zeros(*x.shape[:2], 36)

    gates = Gates(16, 12)
    gates.linear = Zero()
    x = torch.randn(2, 5, 16)
    assert torch.equal(torch.compile(gates, backend="aot_eager")(x), gates(x))


@pytest.fixture
def on_kernels(monkeypatch):
    """Steps on the CPU are taken for ones that kernels run."""
    monkeypatch.setattr(gates_module, "_on_kernels", lambda x: True)


def random_gates(dtype=torch.float32):
    gates = Gates(16, 4, init="dense", dtype=dtype)
    torch.nn.init.normal_(gates.linear.weight)
    torch.nn.init.normal_(gates.linear.bias)
    return gates


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_logits_of_a_step_come_without_the_bias(dtype, on_kernels):
    gates, x = random_gates(dtype), torch.randn(2, 3, 16, dtype=dtype)
    found = gates(x, as_logits=True)
    assert found.bias is gates.linear.bias
    assert found.logits.shape == (2, 4, 3, 3)
    got, want = found.gates(), gates.double()(x.double())
    assert got.dtype == dtype
    # Logits below 32 are rounded by at most 16 eps, at a slope of 1/4; then the gate is, by one.
    # In another order their sum may be as far off.
    assert (got - want).abs().max() <= 2 * 5 * torch.finfo(dtype).eps


def test_on_the_cpu_logits_have_the_bias():
    gates = random_gates()
    with torch.no_grad():
        found = gates(torch.randn(2, 1, 16), as_logits=True)
    assert found.bias is None


class Doubled(torch.nn.Module):
    def forward(self, x):
        return 2 * x


class Adapted(GateLinear):
    def forward(self, x):
        return 2 * super().forward(x)


class Quantized(torch.Tensor):
    """A weight of another class, as torchao's are."""


def adapt(gates):
    linear, gates.linear = gates.linear, Adapted(16, 12)
    gates.linear.load_state_dict(linear.state_dict())


def replace_forward(gates):
    former = gates.linear.forward
    gates.linear.forward = lambda x: 2 * former(x)


def quantize(gates):
    weight = gates.linear.weight.detach().as_subclass(Quantized)
    gates.linear.weight = torch.nn.Parameter(weight, requires_grad=False)


def stride(gates):
    gates.linear.bias = torch.nn.Parameter(torch.randn(24)[::2])


CHANGES = {
    "hook": lambda g: g.linear.register_forward_hook(lambda m, args, out: 2 * out),
    "pre-hook": lambda g: g.linear.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    "backward hook": lambda g: g.linear.register_full_backward_hook(lambda *_: None),
    "forward": replace_forward,
    "parametrization": lambda g: torch.nn.utils.parametrize.register_parametrization(
        g.linear, "weight", Doubled()
    ),
    "adapter": adapt,
    "quantized": quantize,
    "no bias": lambda g: setattr(g.linear, "bias", None),
    "strided bias": stride,
    "compiled": lambda g: g.linear.compile(backend="eager"),
}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_a_linear_map_that_is_no_plain_one_is_called(change, on_kernels):
    gates, x = random_gates(), torch.randn(2, 1, 16)
    CHANGES[change](gates)
    found = gates(x, as_logits=True)
    assert found.bias is None
    want = gates.linear(x).view(2, 1, 4, 3).transpose(1, 2)
    assert torch.equal(found.logits.as_subclass(torch.Tensor), want.as_subclass(torch.Tensor))


@torch.no_grad()
def test_hooks_of_all_modules_see_the_linear_map(on_kernels):
    gates, seen = random_gates(), []
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: seen.append(module)
    )
    try:
        assert gates(torch.randn(2, 1, 16), as_logits=True).bias is None
    finally:
        hook.remove()
    assert gates.linear in seen


def test_with_gradients_the_linear_map_is_called(on_kernels):
    gates = random_gates()
    found = gates(torch.randn(2, 1, 16), as_logits=True)
    assert found.bias is None
    found.gates().sum().backward()
    assert gates.linear.bias.grad is not None


def test_compiled_logits_have_the_bias(on_kernels):
    gates, x = random_gates(), torch.randn(2, 1, 16)
    with torch.no_grad():
        logits, _, bias = torch.compile(gates, backend="aot_eager", fullgraph=True)(
            x, as_logits=True
        )
        assert bias is None
        torch.testing.assert_close(logits, gates.linear(x).view(2, 1, 4, 3).transpose(1, 2))


@pytest.mark.parametrize(
    ("arguments", "init", "message"),
    [
        ((16, 4), "closed", "init is 'closed'; it must be one of paper, dense"),
        ((0, 4), "paper", "hidden_size=0 must be at least 1"),
        ((16, 0), "paper", "num_query_heads=0 must be at least 1"),
    ],
)
def test_bad_arguments(arguments, init, message):
    with pytest.raises(ValueError, match=message):
        Gates(*arguments, init=init)


@pytest.mark.parametrize("branches", ["selected", ("compresed",), ("sliding", "sliding"), ()])
def test_branches_that_are_none_are_refused(branches):
    with pytest.raises(ValueError, match=r"branches is .*; it must name some of compressed"):
        Gates(16, 4, branches=branches)


@pytest.mark.parametrize("shape", [(7, 16), (2, 7, 15), (2, 4, 7, 16)])
def test_bad_shapes(shape):
    with pytest.raises(ValueError, match=r"x has shape .*; expected \(batch, tokens, hidden_s"):
        Gates(16, 4)(torch.randn(shape))


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("branches", [("selected",), ("compressed", "sliding")])
def test_unbiased_gates_are_rows_of_the_branches_that_there_are(branches, as_logits):
    """Row 3h + c of the weight is head h and branch c, whether c is there or not."""
    gates, x = Gates(16, 4, init="unbiased", branches=branches), torch.randn(2, 5, 16)
    assert list(gates.state_dict()) == ["offset", "linear.weight"]
    gates.linear.weight.data.normal_()
    found = gates(x, as_logits=as_logits)
    found = found.gates() if as_logits else found
    places = [("compressed", "selected", "sliding").index(name) for name in branches]
    whole = (x @ gates.linear.weight.T).sigmoid().unflatten(-1, (4, 3))
    torch.testing.assert_close(found, whole[..., places].transpose(1, 2))


def test_gates_of_fewer_branches_have_rows_of_those_alone():
    gates = Gates(16, 4, init="dense", branches=("selected", "sliding"))
    assert gates.linear.weight.shape == (8, 16)
    assert gates(torch.randn(1, 3, 16))[0, 0, 0].tolist() == [1.0, 0.0]
    with pytest.raises(ValueError, match='init="dense" starts with the selected branch alone'):
        Gates(16, 4, init="dense", branches=("sliding",))


@pytest.mark.parametrize("register", ["module", "every module"])
def test_a_hook_sees_the_gates_of_a_decode_step(register):
    layer, x = NSAAttention(32, 4, 2), torch.randn(1, 9, 32)
    seen = []

    def halved(module, args, out):
        if module is layer.gates:
            seen.append(out)
            return out / 2
        return None

    with torch.no_grad():
        if register == "module":
            layer.gates.register_forward_hook(halved)
            expected = layer(x)
        else:
            handle = torch.nn.modules.module.register_module_forward_hook(halved)
            expected = layer(x)
        cache = layer.new_cache()
        found = [layer(part, cache=cache) for part in x.split([6, 1, 2], dim=1)]
    if register != "module":
        handle.remove()
    assert [tuple(each.shape) for each in seen[1:]] == [(1, 4, n, 3) for n in (6, 1, 2)]
    torch.testing.assert_close(torch.cat(found, 1), expected)
