"""φ: starts as the mean, sees whole blocks only, learns, compiles with symbolic S."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from nsa_flex.compression import (
    Compression,
    branched,
    compress_both,
    mean_of_blocks,
    split_segments,
)
from nsa_flex.config import CompressionKind, NSAConfig
from nsa_flex.hot_path import count_graphs
from reference import oracle
from reference.accuracy import assert_close, to_float64
from reference.phi import by_definition

KINDS = get_args(CompressionKind)
LEARNED = tuple(kind for kind in KINDS if kind != "mean")
SMALL = NSAConfig(
    compress_block_size=6, compress_stride=2, select_block_size=8, num_selected_blocks=4
)
# l = d, l = 2d, l = 3d, and blocks of one token.
GEOMETRIES = [(4, 4, 8), (32, 16, 64), (6, 2, 8), (1, 1, 2)]


def geometry(block: int, stride: int, select: int) -> NSAConfig:
    return NSAConfig(compress_block_size=block, compress_stride=stride, select_block_size=select)


def randomized(compress: Compression) -> Compression:
    """Parameters somewhere off their start, the halves of `mlp` unequal."""
    with torch.no_grad():
        for parameter in compress.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return compress


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", GEOMETRIES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_starts_as_the_mean(kind, sizes, dtype, tolerance):
    config = geometry(*sizes)
    x = torch.randn(2, 3, 5 * config.compress_block_size + 1, 5, dtype=dtype)
    got = Compression(config, 3, 5, kind, dtype=dtype)(x)
    assert got.dtype == dtype
    assert oracle.relative_error(got.detach(), oracle.compress_mean(x, config)) < tolerance


@pytest.mark.parametrize("head_dim", [5, 24, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_mlp_starts_as_exactly_the_mean(dtype, head_dim):
    x = torch.randn(2, 3, 161, head_dim, dtype=dtype)
    mean = Compression(NSAConfig(), 3, head_dim, "mean")(x)
    assert torch.equal(Compression(NSAConfig(), 3, head_dim, "mlp", dtype=dtype)(x), mean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", GEOMETRIES)
def test_equals_its_formula(kind, sizes):
    config = geometry(*sizes)
    compress = randomized(Compression(config, 3, 5, kind, dtype=torch.float64))
    x = torch.randn(2, 3, 5 * config.compress_block_size + 1, 5, dtype=torch.float64)
    assert oracle.relative_error(compress(x).detach(), by_definition(compress, x)) < 1e-14


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errs_at_most_twice_what_eager_torch_errs(kind, dtype):
    compress = randomized(Compression(NSAConfig(), 2, 32, kind, dtype=dtype))
    x = torch.randn(2, 2, 333, 32, dtype=dtype)
    want = by_definition(compress, x)
    got = compress(x)
    assert got.dtype == dtype
    # Plain torch in that dtype: the windows unfolded, one product over a whole block.
    windows = x.unfold(2, 32, 16).transpose(3, 4)  # [B, H, N, l, D]
    plain = torch.stack([plain_block(compress, w) for w in windows.unbind(2)], dim=2)
    error = oracle.relative_error(got.detach().double(), want)
    assert error <= 2 * oracle.relative_error(plain.detach().double(), want)


def plain_block(compress: Compression, tokens: Tensor) -> Tensor:
    """(B, H, l, D) -> (B, H, D) as one would write it, in the dtype of its input."""
    if compress.kind == "weighted":
        return torch.einsum("bhpd,hp->bhd", tokens, compress.logits.softmax(-1))
    if compress.kind == "linear":
        return torch.einsum("bhpd,hpde->bhe", tokens, compress.weight)
    if compress.kind == "mlp":
        z = tokens + compress.position
        hidden = torch.einsum("bhpd,npde->nbhe", z, compress.hidden_weight)
        residual = torch.einsum(
            "nbhe,nef->nbhf", nn.functional.gelu(hidden), compress.output_weight
        )
        return z.mean(2) + residual[0] - residual[1]
    return tokens.mean(2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 32, 33, 47, 48, 100])
def test_number_of_blocks(kind, num_tokens):
    config = NSAConfig()
    compress = randomized(Compression(config, 2, 4, kind))
    got = compress(torch.randn(1, 2, num_tokens, 4))
    assert got.shape == (1, 2, max(2, config.num_compressed_blocks(num_tokens)), 4)
    assert got.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_depends_on_its_own_tokens_only(kind):
    compress = randomized(Compression(SMALL, 2, 3, kind, dtype=torch.float64))
    x = torch.randn(1, 2, 17, 3, dtype=torch.float64)  # blocks end at 6, 8, ... 16; one left over
    before = compress(x)
    assert before.shape[2] == 6
    for token in range(17):
        changed = x.clone()
        changed[:, :, token] += 1.0
        moved = (compress(changed) != before).any(-1)[0, 0].tolist()
        assert moved == [2 * i <= token < 2 * i + 6 for i in range(6)]


@pytest.mark.parametrize("kind", KINDS)
def test_nan_behind_the_last_whole_block_stays_there(kind):
    compress = randomized(Compression(SMALL, 2, 3, kind))
    x = torch.randn(1, 2, 17, 3)
    x[:, :, 16:] = float("nan")
    assert compress(x).isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_strides_do_not_matter(kind):
    compress = randomized(Compression(SMALL, 2, 4, kind, dtype=torch.float64))
    x = torch.randn(2, 2, 21, 4, dtype=torch.float64)
    want = compress(x)
    transposed = x.transpose(1, 2).contiguous().transpose(1, 2)
    spread = torch.stack((x, x + 1), dim=-1)[..., 0]
    for view in (transposed, spread, x.repeat(1, 1, 2, 1)[:, :, :21]):
        assert oracle.relative_error(compress(view).detach(), want.detach()) < 1e-14


@pytest.mark.kept(lambda num_heads, tokens_first: (num_heads == 3) == tokens_first)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("tokens_first", [True, False])
def test_two_graphs_serve_every_length(kind: str, num_heads: int, tokens_first: bool) -> None:
    """One for the first length and one for all, whether or not d divides them."""
    config = NSAConfig(8, 4, 16, 4, compression=kind)
    layer = Compression(config, num_heads, 16)
    lengths = (64, 63, 60, 77, 96)
    inputs = [torch.randn(3, num_heads, length, 16) for length in lengths]
    if tokens_first:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert count_graphs(layer, [(x,) for x in inputs]).graphs == 2


def test_half_precision_sums_in_float32():
    x = torch.ones(1, 1, 32, 1, dtype=torch.bfloat16)
    x[:, :, 0] = 256.0  # 256 + 1 is 256 in bfloat16
    segments = split_segments(x, NSAConfig())
    assert mean_of_blocks(segments, NSAConfig())[..., 0, :].item() == (256 + 31) / 32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [5, 6, 11])
def test_gradients_against_finite_differences(kind, num_tokens):
    compress = randomized(Compression(SMALL, 2, 2, kind, dtype=torch.float64))
    names = [name for name, _ in compress.named_parameters()]
    x = torch.randn(1, 2, num_tokens, 2, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(compress, dict(zip(names, parameters, strict=True)), x)

    assert torch.autograd.gradcheck(run, (x, *compress.parameters()))


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_has_a_gradient_at_the_start(kind, dtype):
    compress = Compression(NSAConfig(), 2, 8, kind, dtype=dtype)
    out = compress(torch.randn(2, 2, 100, 8, dtype=dtype))
    out.backward(torch.randn_like(out))
    for name, parameter in compress.named_parameters():
        reached = (parameter.grad != 0).float().mean()
        assert reached > 0.99, f"{name}: {reached:.0%} of the gradient is nonzero"


def test_halves_of_the_mlp_start_with_opposite_gradients():
    compress = Compression(SMALL, 2, 4, "mlp", dtype=torch.float64)
    compress(torch.randn(2, 2, 30, 4, dtype=torch.float64)).square().sum().backward()
    for parameter in (compress.hidden_weight, compress.output_weight):
        assert oracle.relative_error(parameter.grad[0], -parameter.grad[1]) < 1e-13


@pytest.mark.parametrize("kind", LEARNED)
def test_learns_what_the_mean_is_not(kind):
    compress = Compression(SMALL, 1, 4, kind)
    optimizer = torch.optim.Adam(compress.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        x = torch.randn(8, 1, 30, 4)
        last = x[:, :, SMALL.compress_block_size - 1 :: SMALL.compress_stride]
        loss = (compress(x) - last).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_with_symbolic_length(kind):
    compress = randomized(Compression(SMALL, 2, 8, kind))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(compress, backend=counter, dynamic=True, fullgraph=True)
    for num_tokens in (100, 77, 32, 250, 9, 3):
        x = torch.randn(2, num_tokens, 2, 8).transpose(1, 2).requires_grad_()
        got, want = compiled(x), compress(x)
        assert oracle.relative_error(got.detach(), want.detach()) < 1e-6
        got_grad, want_grad = (torch.autograd.grad(y.square().sum(), x)[0] for y in (got, want))
        assert oracle.relative_error(got_grad, want_grad) < 1e-6
        assert counter.frame_count == 1


@pytest.mark.kept(lambda dtype: dtype == torch.float32)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlp_starts_as_exactly_the_mean_when_compiled(dtype):
    compress = Compression(NSAConfig(), 2, 24, "mlp", dtype=dtype)
    mean = Compression(NSAConfig(), 2, 24, "mean")
    x = torch.randn(1, 2, 75, 24, dtype=dtype)
    compiled = torch.compile(lambda x: (compress(x), mean(x)), fullgraph=True)
    assert torch.equal(*compiled(x))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_parameters_serve_half_precision_input(kind):
    compress = randomized(Compression(SMALL, 2, 8, kind))
    x = torch.randn(1, 2, 40, 8)
    half = compress(x.bfloat16())
    assert half.dtype == torch.bfloat16
    assert oracle.relative_error(half.detach().float(), compress(x).detach()) < 2**-6


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_keeps_the_dtype_of_the_input(kind):
    compress = randomized(Compression(SMALL, 2, 8, kind))
    x = torch.randn(1, 2, 40, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got = compress(x)
    assert got.dtype == torch.float32
    assert oracle.relative_error(got.detach(), compress(x).detach()) < 2**-6


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_then_reset(kind):
    compress = Compression(NSAConfig(), 2, 8, kind, device="meta")
    assert compress(torch.empty(1, 2, 100, 8, device="meta")).shape == (1, 2, 5, 8)
    compress = compress.to_empty(device="cpu")
    compress.reset_parameters()
    x = torch.randn(1, 2, 100, 8)
    want = oracle.compress_mean(x, NSAConfig())
    assert oracle.relative_error(compress(x).detach(), want) < 1e-6


def test_kind_comes_from_the_config_unless_given():
    config = NSAConfig(compression="linear")
    assert Compression(config, 2, 8).kind == "linear"
    assert Compression(config, 2, 8, "mean").kind == "mean"
    assert "kind='linear', num_kv_heads=2, head_dim=8" in repr(Compression(config, 2, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 8, "max"), "kind is 'max'; it must be one of mean, weighted, linear, mlp"),
        ((0, 8), "num_kv_heads=0 must be at least 1"),
        ((2, 0), "head_dim=0 must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Compression(NSAConfig(), *arguments)


@pytest.mark.parametrize("shape", [(2, 40, 8), (1, 3, 40, 8), (1, 2, 40, 4)])
def test_bad_shapes(shape):
    compress = Compression(NSAConfig(), 2, 8)
    with pytest.raises(ValueError, match=r"x has shape .*; expected \(batch, num_kv_heads=2, "):
        compress(torch.randn(shape))


def test_bad_dtype():
    with pytest.raises(TypeError, match=r"x has dtype torch\.int64; expected a floating point"):
        Compression(NSAConfig(), 2, 8)(torch.ones(1, 2, 40, 8, dtype=torch.int64))


@pytest.mark.parametrize("kind", KINDS)
def test_selective_checkpointing_may_save_matrix_products(kind):
    compress = Compression(NSAConfig(), 2, 8, kind)
    x = torch.randn(1, 2, 100, 8, requires_grad=True)

    def contexts():
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    out = checkpoint(compress, x, use_reentrant=False, context_fn=contexts)
    parameters = [x, *compress.parameters()]
    found = torch.autograd.grad(out.square().sum(), parameters)
    expected = torch.autograd.grad(compress(x).square().sum(), parameters)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def pair(kind: CompressionKind, dtype: torch.dtype = torch.float32) -> list[Compression]:
    """φ of keys and of values, of the same sizes."""
    config = NSAConfig(compression=kind)
    return [randomized(Compression(config, 2, 8, dtype=dtype)) for _ in range(2)]


def separately(
    compress_key: Compression, compress_value: Compression, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    return compress_key(key), compress_value(value)


def number_of_calls(*modules: Compression) -> list[int]:
    """How often each is called as a module from now on, counted in the list."""
    calls = [0] * len(modules)
    for i, module in enumerate(modules):
        original = module.forward

        def forward(x: Tensor, i: int = i, original=original) -> Tensor:
            calls[i] += 1
            return original(x)

        module.forward = forward
    return calls


def values_and_gradients(function, modules: list[Compression], inputs: list[Tensor]):
    outputs = function(*modules, *inputs)
    torch.manual_seed(1)
    wrt = [*inputs, *(p for module in modules for p in module.parameters())]
    gradients = torch.autograd.grad(outputs, wrt, [torch.randn_like(x) for x in outputs])
    return [x.detach() for x in (*outputs, *gradients)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 47, 48, 200])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5)])
def test_both_at_once_are_each_by_itself(kind, num_tokens, dtype, tolerance):
    modules = pair(kind, dtype)
    inputs = [
        torch.randn(3, num_tokens, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(2)
    ]
    want = values_and_gradients(separately, modules, inputs)
    found = values_and_gradients(compress_both, modules, inputs)
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        assert a.is_contiguous() == b.is_contiguous()
        assert torch.equal(a, b) or oracle.relative_error(a, b) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [32, 33, 47, 200])
@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_both_at_once_err_in_half_precision_as_each_does(kind, num_tokens, parameters):
    modules = pair(kind, parameters)
    inputs = [torch.randn(3, 2, num_tokens, 8).bfloat16() for _ in range(2)]
    for found, module, x in zip(compress_both(*modules, *inputs), modules, inputs, strict=True):
        want = by_definition(module, x)
        errors = [
            oracle.relative_error(y.detach().double()[:, :, : want.shape[2]], want)
            for y in (found, module(x))
        ]
        assert found.dtype == torch.bfloat16
        assert errors[0] <= 2 * errors[1]


@pytest.mark.kept(lambda dtype, compiled: not compiled or dtype == torch.bfloat16)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [False, True])
def test_both_at_once_start_as_exactly_the_mean(dtype, compiled):
    config = NSAConfig(compression="mlp")
    modules = [Compression(config, 2, 24, dtype=dtype) for _ in range(2)]
    mean = Compression(config, 2, 24, "mean")
    inputs = [torch.randn(1, 2, 161, 24, dtype=dtype) for _ in range(2)]

    def run(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        return *compress_both(*modules, key, value), mean(key), mean(value)

    key, value, mean_key, mean_value = (torch.compile(run) if compiled else run)(*inputs)
    assert torch.equal(key, mean_key)
    assert torch.equal(value, mean_value)


@pytest.mark.parametrize("kind", LEARNED)
def test_every_parameter_of_both_has_a_gradient_at_the_start(kind):
    modules = [Compression(NSAConfig(compression=kind), 2, 8) for _ in range(2)]
    out = compress_both(*modules, *(torch.randn(2, 2, 100, 8) for _ in range(2)))
    torch.stack(out).backward(torch.randn(2, *out[0].shape))
    for module in modules:
        assert all((x.grad != 0).float().mean() > 0.99 for x in module.parameters())


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_a_block_of_both_depends_on_its_own_tokens_only(kind):
    config = NSAConfig(6, 2, 8, 4, compression=kind)
    modules = [randomized(Compression(config, 2, 3, dtype=torch.float64)) for _ in range(2)]
    x = torch.randn(1, 2, 17, 3, dtype=torch.float64)
    before = compress_both(*modules, x, x)
    for token in range(17):
        changed = x.clone()
        changed[:, :, token] = float("nan")
        of_values = compress_both(*modules, x, changed)
        assert torch.equal(of_values[0], before[0])
        moved = (of_values[1] != before[1]).any(-1)[0, 0].tolist()
        assert moved == [2 * i <= token < 2 * i + 6 for i in range(6)]


@pytest.mark.kept(lambda kind: kind in ("weighted", "mlp"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens_first", [True, False])
def test_two_graphs_serve_every_length_of_both(kind: str, tokens_first: bool) -> None:
    config = NSAConfig(8, 4, 16, 4, compression=kind)
    modules = nn.ModuleList(Compression(config, 2, 16) for _ in range(2))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phi = modules

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return compress_both(*self.phi, x, 2 * x)

    inputs = [torch.randn(3, 2, length, 16) for length in (64, 63, 60, 77, 96)]
    if tokens_first:
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert count_graphs(Both(), [(x,) for x in inputs]).graphs == 2


@pytest.mark.exhaustive
def test_both_at_once_compile_to_half_the_matrix_products():
    modules = pair("mlp")

    def products(function) -> list[int]:
        inputs = [torch.randn(1, 200, 2, 8).transpose(1, 2).requires_grad_() for _ in range(2)]

        def run() -> None:
            outputs = torch.compile(function, fullgraph=True)(*modules, *inputs)
            torch.stack(outputs).square().sum().backward()

        with torch._inductor.config.patch(force_disable_caches=True):
            _, codes = run_and_get_code(run)
        return [code.count("extern_kernels.") for code in codes]

    found = products(compress_both)
    assert found == [2, 4]  # the position embedding has none of its own
    assert products(separately) == [2 * number for number in found]


def test_branches_are_the_tensor_itself_or_views_of_it_when_compiled():
    x = torch.randn(2, 5, 3, 4).transpose(1, 2).requires_grad_()
    assert all(branch is x for branch in branched(x))

    def run(x: Tensor) -> tuple[Tensor, ...]:
        a, b = branched(x)
        return a, b, a.square().sum() + (b**3).sum()

    *views, total = torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    assert all(torch.equal(view, x) and view.stride() == x.stride() for view in views)
    (found,) = torch.autograd.grad(total, x)
    torch.testing.assert_close(found, 2 * x + 3 * x**2)


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "kv_heads"), [*zip(GEOMETRIES, (4, 1, 4, 4), strict=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_both_compiled_are_both_in_float64(kind, sizes, kv_heads, dtype):
    """Outputs and the gradient of every parameter: Inductor on CUDA has its own passes."""
    torch._dynamo.reset()
    config = geometry(*sizes)
    made = [randomized(Compression(config, kv_heads, 16, kind, dtype=dtype)) for _ in range(2)]
    exact = [Compression(config, kv_heads, 16, kind, dtype=torch.float64) for _ in range(2)]
    for module, like in zip(exact, made, strict=True):
        module.load_state_dict({name: x.double() for name, x in like.state_dict().items()})
    inputs = [torch.randn(2, 5 * sizes[0] + 3, kv_heads, 16, dtype=dtype) for _ in range(2)]

    def results(modules, inputs, function):
        leaves = [x.detach().requires_grad_() for x in inputs]
        outs = function(*modules, *(x.transpose(1, 2) for x in leaves))
        parameters = [x for module in modules for x in module.parameters()]
        ups = [torch.linspace(-1, 2, x.numel()).reshape(x.shape).to(x) for x in outs]
        return [*outs, *torch.autograd.grad(outs, [*leaves, *parameters], ups)]

    want = results(exact, [x.double() for x in inputs], separately)
    on_device = [module.cuda() for module in made], [x.cuda() for x in inputs]
    eager = results(*on_device, separately)
    got = results(*on_device, torch.compile(compress_both, fullgraph=True))
    for i, (x, y, z) in enumerate(zip(got, eager, want, strict=True)):
        assert_close(f"result {i}", x, to_float64(z), y, dtype)


def test_only_plain_modules_that_are_alike_are_computed_at_once():
    key, value = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    modules = pair("mlp")
    found = compress_both(*modules, key, value)
    want = separately(*modules, key, value)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want, strict=True))
    calls = number_of_calls(*modules)
    again = compress_both(*modules, key, value)
    assert calls == [1, 1]
    assert all(torch.equal(a, b) for a, b in zip(again, want, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_hooks_of_each_run(compiled, which):
    modules = pair("mlp")
    seen: list[torch.Size] = []
    modules[which].register_forward_hook(lambda module, args, out: seen.append(out.shape))
    modules[which].register_forward_hook(lambda module, args, out: 0 * out)
    run = torch.compile(compress_both, backend="aot_eager") if compiled else compress_both
    found = run(*modules, torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8))
    assert seen == [(1, 2, 5, 8)]
    assert [bool((x == 0).all()) for x in found] == [which == 0, which == 1]


def test_parametrizations_of_each_count():
    modules = pair("mlp")
    nn.utils.parametrize.register_parametrization(modules[1], "output_weight", Doubled())
    key, value = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 8)
    found = compress_both(*modules, key, value)
    assert all(
        torch.equal(a, b) for a, b in zip(found, separately(*modules, key, value), strict=True)
    )


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_keys_and_values_of_other_sizes_and_kinds():
    config = NSAConfig(compression="mlp")
    x, wide = torch.randn(1, 2, 100, 8), torch.randn(1, 2, 100, 12)
    for other, value in (
        (Compression(config, 2, 12), wide),
        (Compression(config, 2, 8, "linear"), x),
        (Compression(config, 2, 8, dtype=torch.bfloat16), x),
        (Compression(NSAConfig(16, 16, 64, compression="mlp"), 2, 8), x),
    ):
        phi = Compression(config, 2, 8)
        found = compress_both(phi, other, x, value)
        want = separately(phi, other, x, value)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_bad_shapes_of_both():
    modules = pair("mlp")
    for key, value in ((7, 8), (8, 7), (7, 7)):
        inputs = (torch.randn(1, 2, 100, dim) for dim in (key, value))
        with pytest.raises(ValueError, match=r"x has shape \(1, 2, 100, 7\); expected"):
            compress_both(*modules, *inputs)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_selective_checkpointing_of_both(kind):
    modules = pair(kind)
    inputs = [torch.randn(1, 2, 100, 8, requires_grad=True) for _ in range(2)]
    saved = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default]

    def kept(*args):
        return checkpoint(
            *(compress_both, *args),
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(saved),
        )

    found = values_and_gradients(kept, modules, inputs)
    want = values_and_gradients(compress_both, modules, inputs)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
