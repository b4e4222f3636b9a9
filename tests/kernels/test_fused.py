"""The core as one operator: with cuDNN played by PyTorch in the interpreter, whole on CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa_flex import NSAConfig, nsa_attention
from reference import oracle
from reference.accuracy import assert_close, leaf, limit, to_float64
from reference.fused_ends import ends_of, watched_epilogue
from reference.interpreter import INTERPRETED, interpreted, kernels, only_outside
from reference.modes import deterministic_algorithms
from reference.played_cudnn import causal, causal_gradients

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.common.launches import intercepting_launches
from nsa_flex.fallback_kernels.compressed import cudnn as core_compressed
from nsa_flex.fallback_kernels.compressed.fold import fold_of, range_rows_view
from nsa_flex.fallback_kernels.fused import operators as core
from nsa_flex.fallback_kernels.fused import route
from nsa_flex.fallback_kernels.fused.operators import core_attention
from nsa_flex.fallback_kernels.launch import direct, plans
from nsa_flex.fallback_kernels.selected import config as selected_plan
from nsa_flex.fallback_kernels.selected.block_union import build_block_unions
from nsa_flex.fallback_kernels.selected.config import PARTIAL_BYTES
from nsa_flex.fallback_kernels.sliding import config as sliding_config
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, Tiles

PAPER = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
WINDOWED = NSAConfig(8, 4, 16, 5, window_size=37)  # holds the local blocks of every query
TILED = NSAConfig(16, 16, 16, 4, 0, 1, window_size=20, selection="tiled_top_k")
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", "tiled_top_k")
# The branches one by one, on the same kernels but for the sliding one.
APART = {"compressed": "sdpa", "selected": "triton", "sliding": "fa2"}
INPUTS = ("query", "key", "value", "compressed_key", "compressed_value", "gates")


@pytest.fixture(autouse=True)
def _not_short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of long rows, at small lengths; test_short.py has those of the shortest."""
    monkeypatch.setattr(route, "is_short", lambda *_: False)
    monkeypatch.setattr(route, "MASKED_DIM_BACKWARD", 0)
    monkeypatch.setattr(route, "RANGES_TOKENS", 0)
    monkeypatch.setattr(route, "RANGES_ROW", 0)
    plans.forget_plans()
    yield
    plans.forget_plans()


test_kernels_under_the_interpreter = interpreted(__file__)


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="on CUDA cuDNN plays itself, in half precision")
@pytest.mark.kept(
    lambda length, options, ranges_tokens: (
        "least_ctas" not in options and (length in (1, 13, 34, 35, 37)) == (ranges_tokens == 0)
    )
)
@pytest.mark.parametrize("ranges_tokens", [0, 128], ids=["fold", "ranges"])
@pytest.mark.parametrize(
    ("length", "batch", "config", "options"),
    [
        (1, 1, SMALL, {}),
        (8, 2, SMALL, {}),
        (13, 2, WINDOWED, {}),
        (29, 1, SMALL, {"own": True}),
        (34, 1, WINDOWED, {"own": True, "value_dim": 32}),
        (67, 1, WINDOWED, {"heads": 6, "value_dim": 32}),
        (37, 2, WINDOWED, {"heads": 2, "deterministic": True}),
        (117, 1, TILED, {}),
        (67, 1, WINDOWED, {"heads": 12, "least_ctas": 1}),
        (67, 1, WINDOWED, {"heads": 12, "least_ctas": 24}),
        (70, 1, SMALL, {"heads": 2, "tiles": Tiles(16, 16, 4, 1)}),
        (70, 1, SMALL, {"heads": 2, "tiles": Tiles(32, 16, 4, 2)}),
        (35, 1, SMALL, {"heads": 12, "tiles": Tiles(16, 16, 4, 1)}),
    ],
)
def test_results_and_gradients(
    length: int,
    batch: int,
    config: NSAConfig,
    options: dict[str, Any],
    ranges_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Odd lengths, a window with and without the local blocks, keys of its own for the window.

    Few tiles of keys have a CTA for each query head, with `least_ctas` for all or some of them.
    `tiles` are those of devices with less shared memory: several of them are on the diagonal.
    """
    if "tiles" in options:
        for name in ("forward_tiles", "dq_tiles", "dkdv_tiles"):
            monkeypatch.setattr(SlidingPlan, name, lambda plan: options["tiles"])
    for module in (sliding_config, selected_plan):
        least = options.get("least_ctas", module.LEAST_CTAS)
        monkeypatch.setattr(module, "LEAST_CTAS", least)
    monkeypatch.setattr(route, "RANGES_TOKENS", ranges_tokens)
    monkeypatch.setattr(core_compressed, "causal", causal)
    monkeypatch.setattr(core_compressed, "causal_gradients", causal_gradients)
    heads, kv_heads, dim, value_dim = options.get("heads", 4), 2, 16, options.get("value_dim", 16)
    blocks = max(1, config.num_compressed_blocks(length))
    sizes = [(heads, length, dim), (kv_heads, length, dim), (kv_heads, length, value_dim)]
    sizes += [(kv_heads, blocks, dim), (kv_heads, blocks, value_dim)]
    inputs = [leaf((batch, *size), torch.float32, "cpu") for size in sizes]
    gates = torch.randn(batch, heads, length, 3)  # any real number is a gate
    gates[:, 0, ::3] = 0
    inputs.append(gates.requires_grad_(True))
    own = {}
    if options.get("own"):
        own = {
            name: leaf((batch, *size), torch.float32, "cpu")
            for name, size in zip(("sliding_key", "sliding_value"), sizes[1:3], strict=True)
        }
    q, k, v, ck, cv, gates = inputs
    of_window = tuple(own.values()) or (k, v)
    with deterministic_algorithms(options.get("deterministic", False)):
        results = core_attention(q, k, v, ck, cv, *of_window, gates, config=config, scale=0.3)
        grad = torch.randn_like(results.out)
        grads = torch.autograd.grad(results.out, [*inputs, *own.values()], grad)
    arrays = [to_float64(x) for x in inputs]
    more = {"scale": 0.3} | {name: to_float64(x) for name, x in own.items()}
    scores = oracle.forward(*arrays, config, **more).scores
    assert oracle.choice_excess(results.blocks.numpy(), scores, config) <= 1e-5
    more["blocks"] = results.blocks.numpy()
    want = oracle.forward(*arrays, config, **more)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)
    wanted = oracle.backward(*arrays, config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    for name, got in zip([*INPUTS, *own], grads, strict=True):
        expected = getattr(wanted, name)
        assert_close(name, got, expected, None, torch.float32, least=least)


@kernels
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.skipif(not INTERPRETED, reason="on CUDA cuDNN plays itself, in half precision")
@pytest.mark.parametrize(
    ("length", "batch", "value_dim", "union_limit"),
    [(1, 1, 16, 0), (18, 2, 16, 0), (66, 1, 32, 9)],
    ids=["one token", "batch", "windows and unions"],
)
def test_one_kernel_ends_the_forward_without_gradients(
    length: int, batch: int, value_dim: int, union_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_compressed, "causal", causal)
    watched = watched_epilogue(monkeypatch, union_limit)
    heads, kv_heads, blocks = 4, 2, WINDOWED.num_compressed_blocks(length)
    sizes = [(heads, length, 16), (kv_heads, length, 16), (kv_heads, length, value_dim)]
    sizes += [(kv_heads, max(1, blocks), 16), (kv_heads, max(1, blocks), value_dim)]
    inputs = [torch.randn(batch, *size) for size in sizes]
    inputs.append(torch.randn(batch, heads, length, 3))  # any real number is a gate
    inputs[-1][:, 0, ::3] = 0
    q, k, v, ck, cv, gates = inputs
    results = core_attention(q, k, v, ck, cv, k, v, gates, config=WINDOWED, scale=0.3)
    assert watched.call_count == 1
    arrays = [to_float64(x) for x in inputs]
    want = oracle.forward(*arrays, WINDOWED, scale=0.3, blocks=results.blocks.numpy())
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)
    apart = core_attention(q, k, v, ck, cv, k.clone(), v, gates, config=WINDOWED, scale=0.3)
    assert watched.call_count == 1, "keys of its own for the window need the window's own scores"
    assert_close("apart", apart.out, want.out, None, torch.float32)


FORWARD = [
    "ranges_fwd",
    "topk_scores",
    "topk_select",
    "block_union",
    "index_count",
    "index_starts",
    "index_scatter",
    "selected_fwd_partial",
    "selected_fwd_combine",
    "selected_fwd_union",
    "fused_sliding_epilogue",
]
BACKWARD = [
    "fused_bwd_gates",
    "ranges_bwd_dq",
    "ranges_bwd_dkdv",
    "fused_bwd_dq",
    "selected_bwd_dkdv_initial_local",
    "selected_bwd_dkdv",
    "selected_bwd_dq",
    "fused_bwd_dkdv",
    "add_splits",
]


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="counts what this thread launches")
def test_launches_of_a_step_of_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes some microseconds of a step that has hundreds."""
    monkeypatch.setattr(route, "RANGES_TOKENS", 133)
    blocks = WINDOWED.num_compressed_blocks(133)
    sizes = [(4, 133, 16), *[(2, 133, 16)] * 2, *[(2, blocks, 16)] * 2, (4, 133, 3)]
    query, key, value, *compressed, gates = (
        leaf((1, *size), torch.float32, "cpu") for size in sizes
    )
    inputs = [query, key, value, *compressed, gates]
    seen: list[str] = []

    def note(jitted: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(jitted.fn.__name__.removesuffix("_kernel"))
        return jitted.run(*args, grid=grid, warmup=False, **kwargs)

    def forbid(*_: Any) -> None:
        pytest.fail("a launch of its own for zeros")

    monkeypatch.setattr(Tensor, "zero_", forbid)
    monkeypatch.setattr(torch, "zeros", forbid)
    with intercepting_launches(note):
        out = core_attention(
            *(query, key, value, *compressed, key, value, gates), config=WINDOWED, scale=0.3
        ).out
        forward = seen.copy()
        seen.clear()
        torch.autograd.grad(out, inputs, torch.randn_like(out))
    assert (forward, seen) == (FORWARD, BACKWARD)


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="on CUDA every test of the operator makes such calls")
@pytest.mark.kept(lambda return_blocks: return_blocks)
@pytest.mark.parametrize("return_blocks", [True, False])
def test_plain_calls_have_the_gradients_of_the_operator(
    return_blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round the dispatch, and with the output alone where nothing else was asked for."""
    monkeypatch.setattr(route, "RANGES_TOKENS", 64)
    shapes = [(4, 37), (2, 37), (2, 37), (2, SMALL.num_compressed_blocks(37))]
    inputs = [leaf((1, *shape, 16), torch.float32, "cpu") for shape in [*shapes, shapes[-1]]]
    q, k, v, ck, cv = inputs
    gates = torch.rand(1, 4, 37, 3, requires_grad=True)
    options: dict[str, Any] = {"config": SMALL, "scale": 0.3, "return_blocks": return_blocks}
    with deterministic_algorithms():
        found = []
        for plain in (False, True):
            monkeypatch.setattr(direct, "is_plain", lambda x, plain=plain: plain)
            results = core_attention(q, k, v, ck, cv, k, v, gates, **options)
            assert (results.blocks is not None) == return_blocks
            assert (results.selected_lse is not None) == return_blocks
            grads = torch.autograd.grad(results.out, [*inputs, gates], torch.ones_like(q))
            found.append([results.out, *grads])
            with torch.no_grad():
                again = core_attention(q, k, v, ck, cv, k, v, gates, **options)
            torch.testing.assert_close(again.out, results.out)
    for by_operator, plainly in zip(*found, strict=True):
        assert torch.equal(by_operator, plainly)


@kernels
@pytest.mark.skipif(not INTERPRETED, reason="on CUDA every backward takes such gradients")
@pytest.mark.kept(lambda ranges_tokens, documents: ranges_tokens == 0 and documents)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("ranges_tokens", [0, 128], ids=["two operators", "one operator"])
def test_a_gradient_of_any_strides(
    ranges_tokens: int, documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as it lies, and what is computed is the same to the bit."""
    monkeypatch.setattr(route, "RANGES_TOKENS", ranges_tokens)
    monkeypatch.setattr(core_compressed, "causal", causal)
    monkeypatch.setattr(core_compressed, "causal_gradients", causal_gradients)
    batch, length, blocks = 2, 23, SMALL.num_compressed_blocks(23)
    sizes = [(2, length, 16), *[(1, length, 16)] * 2, *[(1, blocks, 16)] * 2, (2, length, 3)]
    inputs = [leaf((batch, *size), torch.float32, "cpu") for size in sizes]
    q, k, v, ck, cv, gates = inputs
    start = torch.zeros(batch, length, dtype=torch.int32) if documents else None
    memory = torch.randn(batch, length, 2, 17)
    of_tokens = memory[:, :1, :, :16].contiguous()
    same = {
        "contiguous": memory[..., :16].contiguous().transpose(1, 2),
        "heads first": memory[..., :16].transpose(1, 2).contiguous(),
        "columns first": memory[..., :16].permute(3, 2, 1, 0).contiguous().permute(3, 1, 2, 0),
        "padded": memory[..., :16].transpose(1, 2),
    }
    repeated = of_tokens.expand(batch, length, 2, 16).transpose(1, 2)

    def gradients(grad: Tensor) -> tuple[Tensor, ...]:
        out = core_attention(
            q, k, v, ck, cv, k, v, gates, config=SMALL, scale=0.3, document_start=start
        ).out
        return torch.autograd.grad(out, inputs, grad)

    with deterministic_algorithms():
        expected = gradients(same["contiguous"])
        for name, grad in same.items():
            for found, wanted in zip(gradients(grad), expected, strict=True):
                assert torch.equal(found, wanted), name
        copied = repeated.transpose(1, 2).contiguous().transpose(1, 2)
        for found, wanted in zip(gradients(repeated), gradients(copied), strict=True):
            assert torch.equal(found, wanted)


@only_outside
@pytest.mark.parametrize(("block", "stride"), [(32, 16), (8, 8), (8, 2), (1, 1)])
def test_parts_hold_every_query_that_sees_a_block_once(block: int, stride: int) -> None:
    reach = block - 1
    for length in (*range(1, 3 * block + 5), 1000, 1 << 14, (1 << 14) + 1, (1 << 15) + 13):
        tokens = torch.arange(length)[None, :, None, None]
        seen = []
        for part in fold_of(length, block, stride).ranges:
            if part.is_empty:
                continue
            rows = range_rows_view(tokens, part, reach, stride)[0, :, :, 0]  # [rows, width]
            sees = (rows - reach) // stride + 1  # blocks, of which row j has to see j + 1
            assert (sees == torch.arange(1, part.rows + 1)[:, None]).all()
            seen.append(rows.flatten())
        places = torch.cat(seen) if seen else torch.empty(0, dtype=torch.long)
        assert places.sort().values.tolist() == list(range(reach, length))


def test_long_rows_are_cut_into_more_parts() -> None:
    short, long = (fold_of(length, 32, 16).ranges for length in (1 << 14, 1 << 15))
    assert [part.width for part in short] == [1, 15, 0, 0]
    assert [part.width for part in long] == [1, 5, 5, 5]


def inputs_of(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, value_dim: int, **options: Any
) -> list[Tensor]:
    dtype, config = options.get("dtype", torch.bfloat16), options.get("config", PAPER)
    blocks = max(1, config.num_compressed_blocks(length))
    sizes = [(heads, length, dim), (kv_heads, length, dim), (kv_heads, length, value_dim)]
    sizes += [(kv_heads, blocks, dim), (kv_heads, blocks, value_dim)]
    tensors = [leaf((batch, *size), dtype, "cuda") for size in sizes]
    # Any real number is a gate.
    gates = torch.randn(batch, heads, length, 3, device="cuda").to(dtype)
    gates[:, 0, ::3] = 0
    return [*tensors, gates.requires_grad_(True)]


def run(inputs: list[Tensor], backend: Any, config: NSAConfig) -> tuple[Any, list[Tensor]]:
    out, aux = nsa_attention(*inputs, config=config, backend=backend, return_aux=True)
    torch.manual_seed(0)
    grads = torch.autograd.grad(out, inputs, torch.randn_like(out), allow_unused=True)
    zeros = (torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True))
    return (out, aux), list(zeros)


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1, 17, 31, 32, 33, 47, 48, 49, 63, 65, 500, 1111])
@pytest.mark.parametrize("batch", [1, 3])
def test_is_the_branches_apart(length: int, batch: int) -> None:
    inputs = inputs_of(batch, 8, 2, length, 64, 64)
    (out, aux), grads = run(inputs, "auto", PAPER)
    (want, want_aux), want_grads = run(inputs, APART, PAPER)
    assert torch.equal(aux.blocks, want_aux.blocks)
    for got, lse in zip(aux.lse, want_aux.lse, strict=True):
        torch.testing.assert_close(got, lse, rtol=1e-4, atol=1e-3)
    floor = rounding_of_a_zero(inputs)
    for got, expected in zip([out, *grads], [want, *want_grads], strict=True):
        error = (got.float() - expected.float()).norm()
        assert error < 2**-6 * expected.float().norm() + floor


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("length", [1, 33, 500, 2048])
def test_calls_of_few_tokens_take_range_attention(
    length: int, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a body, recorded and replayed: what cuDNN computes."""
    inputs = inputs_of(batch, 8, 2, length, 64, 64)
    (want, want_aux), want_grads = run(inputs, "auto", PAPER)
    monkeypatch.setattr(route, "RANGES_TOKENS", batch * length)
    plans.forget_plans()
    floor = rounding_of_a_zero(inputs)
    for _ in range(4):
        (out, aux), grads = run(inputs, "auto", PAPER)
        assert (aux.blocks == want_aux.blocks).float().mean() > 0.999
        torch.testing.assert_close(
            aux.lse.compressed, want_aux.lse.compressed, rtol=1e-4, atol=1e-3
        )
        for got, expected in zip([out, *grads], [want, *want_grads], strict=True):
            error = (got.float() - expected.float()).norm()
            assert error < 2**-6 * expected.float().norm() + floor
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run(inputs, "auto", PAPER)
    names = {event.name for event in trace.events()}
    assert {"ranges_fwd_kernel", "ranges_bwd_dq_kernel", "ranges_bwd_dkdv_kernel"} <= names


def rounding_of_a_zero(inputs: list[Tensor]) -> float:
    """Norm that a gradient of q or k may have where it is 0, as it is at S = 1.

    `dO v^T` and `delta` are equal then, and each a float32 sum in an order of its own: what is
    left of their difference is a last place of |dO| |v|, times k or q and the scale.
    """
    q, k, v, *_ = (x.detach().float() for x in inputs)
    largest = max(x.norm(dim=-1).max() for x in (q, k)) * v.norm(dim=-1).max()
    size_of_grad = q[..., 0].numel() ** 0.5 * v.shape[-1] ** 0.5
    return float(torch.finfo(torch.float32).eps * q.shape[-1] ** -0.5 * largest * size_of_grad)


@pytest.mark.gpu
def test_auto_runs_the_operator_and_its_kernels() -> None:
    inputs = inputs_of(1, 8, 2, 300, 64, 64)
    run(inputs, "auto", PAPER)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        run(inputs, "auto", PAPER)
    names = {event.name for event in trace.events()}
    operators = ("forward", "backward_gates", "backward_branches")
    assert {f"nsa_flex::core_{name}" for name in operators} <= names
    assert "aten::_scaled_dot_product_cudnn_attention" in names


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "config"),
    [
        (16, 128, 64, PAPER),
        (2, 64, 128, PAPER),
        (6, 80, 80, SMALL),
        (32, 32, 32, SMALL),
        (32, 64, 64, NSA_1B),
    ],
    ids=["D128-64", "D64-128", "G3-D80", "G16-D32", "NSA-1B"],
)
def test_other_shapes_and_memory(heads: int, dim: int, value_dim: int, config: NSAConfig) -> None:
    inputs = inputs_of(2, heads, 2, 333, dim, value_dim, config=config, dtype=torch.float16)
    strange = [x.detach().contiguous().requires_grad_(True) for x in inputs]  # (B, H, S, D)
    wide = [torch.cat([x.detach()] * 2, 2)[:, :, : x.shape[2]] for x in inputs]
    apart = APART if dim == value_dim else APART | {"sliding": "flex"}
    want, want_grads = run(inputs, apart, config)
    for variant in (strange, [x.requires_grad_(True) for x in wide]):
        got, grads = run(variant, "auto", config)
        pairs = zip([got[0], *grads], [want[0], *want_grads], strict=True)
        for x, y in pairs:
            assert (x.float() - y.float()).norm() / y.float().norm() < 2**-8


@pytest.mark.gpu
def test_keys_of_its_own_for_the_window() -> None:
    inputs = inputs_of(2, 8, 2, 200, 64, 64)
    own = [leaf(x.shape, x.dtype, "cuda") for x in inputs[1:3]]
    results = []
    for backend in ("auto", APART):
        out = nsa_attention(
            *inputs, config=PAPER, backend=backend, sliding_key=own[0], sliding_value=own[1]
        )
        torch.manual_seed(0)
        results.append([out, *torch.autograd.grad(out, [*inputs, *own], torch.randn_like(out))])
    for got, want in zip(*results, strict=True):
        assert (got.float() - want.float()).norm() / want.float().norm() < 2**-6


@pytest.mark.gpu
@pytest.mark.parametrize("differentiable", [True, False])
def test_opcheck(differentiable: bool) -> None:
    q, k, v, ck, cv, gates = inputs_of(2, 8, 2, 100, 64, 64)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for own in ((k, v), (None, None)):
        arguments = (q, k, v, ck, cv, gates, *own, 0.1, PAPER.counts, differentiable, True)
        torch.library.opcheck(
            torch.ops.nsa_flex.core_forward.default, arguments, test_utils=checks
        )
        if differentiable:
            results = [x.detach() for x in core.core_forward(*arguments)]
            grad = torch.randn_like(results[0])
            tensors = [x.detach() for x in (q, k, v, ck, cv, gates, *own) if x is not None]
            backward = (grad, tensors, results[1:], 0.1, PAPER.counts, True)
            torch.library.opcheck(core.core_backward, backward, test_utils=checks)
            of_gates = (grad, tensors, results[1:], 0.1, PAPER.counts, None)
            torch.library.opcheck(core.core_backward_gates, of_gates, test_utils=checks)
            _, signed, stats, *_ = core.core_backward_gates(*of_gates)
            kept = [results[i] for i in (1, 2, 3, 5, 7, 8)]
            of_call = (*kept, 0.1, PAPER.counts, True, None)
            of_branches = (signed, stats, None, None, None, tensors, *of_call)
            torch.library.opcheck(core.core_backward_branches, of_branches, test_utils=checks)


@pytest.mark.gpu
def test_equal_bits_where_torch_is_deterministic() -> None:
    """All kernels of this package; a compressed gate of 0 leaves out cuDNN's gradients."""
    inputs = inputs_of(2, 8, 2, 1500, 64, 64)
    with torch.no_grad():
        inputs[5][..., 0] = 0
    with deterministic_algorithms():
        (out, aux), grads = run(inputs, "auto", PAPER)
        for _ in range(3):
            (again, again_aux), more = run(inputs, "auto", PAPER)
            assert torch.equal(aux.blocks, again_aux.blocks)
            for a, b in zip([out, *grads], [again, *more], strict=True):
                assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph() -> None:
    inputs = inputs_of(1, 8, 2, 1000, 64, 64)
    grad_out = torch.randn_like(inputs[0])

    def step() -> list[Tensor]:
        out = nsa_attention(*inputs, config=PAPER)
        return [out, *torch.autograd.grad(out, inputs, grad_out)]

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs[:3]:
            x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(captured, step(), strict=True):
        # Float atomics, and cuDNN's, add in no fixed order.
        assert (got.float() - want.float()).norm() < 2**-7 * want.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dim", "value_dim", "length", "config"),
    [
        (8, 64, 64, 333, PAPER),
        (32, 128, 128, 1500, PAPER),
        (2, 128, 128, 700, PAPER),
        (8, 128, 128, 2077, replace(PAPER, num_selected_blocks=24, num_local_blocks=3)),
        (4, 128, 128, 1100, replace(PAPER, num_initial_blocks=0, window_size=200)),
        (2, 128, 64, 700, PAPER),
        (6, 64, 128, 333, PAPER),
        (32, 64, 64, 1500, PAPER),
        (2, 64, 64, 700, replace(PAPER, num_initial_blocks=0, window_size=200)),
        (6, 128, 128, 900, PAPER),
        (14, 64, 64, 1300, PAPER),
        (24, 96, 96, 700, PAPER),
        (8, 80, 80, 1100, PAPER),
        (10, 40, 40, 700, PAPER),
    ],
    ids=[
        *("G4", "G16-D128", "G1-D128", "G4-D128", "G2-D128", "G1-D128-64", "G3-D64-128"),
        *("G16-D64", "G1-D64", "G3-D128", "G7-D64", "G12-D96", "G4-D80", "G5-D40"),
    ],
)
def test_one_kernel_at_the_end_or_two(
    heads: int, dim: int, value_dim: int, length: int, config: NSAConfig
) -> None:
    """One for Hopper at equal dims, with gradients too; keys of its own make them two."""
    inputs = inputs_of(2, heads, 2, length, dim, value_dim)
    own = {"sliding_key": inputs[1].clone(), "sliding_value": inputs[2].clone()}
    options: dict[str, Any] = {"config": config, "return_aux": True}
    (want, want_aux), want_kernels = ends_of(inputs, **options, **own)
    assert want_kernels == {"fused_sliding_epilogue_kernel"}
    (saving, saving_aux), saving_kernels = ends_of(inputs, **options)
    with torch.no_grad():
        (out, aux), kernels = ends_of(inputs, **options)
        again = nsa_attention(*inputs, config=config)
    hopper = dim == value_dim and gluon_unsupported_reason(inputs[0].device) is None
    # Groups of three leave rows of a tile empty, which the other kernel has no use for.
    is_full = heads // 2 in (1, 4, 16)
    assert saving_kernels == {
        "fused_fwd_epilogue_sm90_kernel" if hopper else "fused_sliding_epilogue_kernel"
    }
    one = "fused_fwd_epilogue_sm90_kernel" if hopper else "fused_fwd_epilogue_kernel"
    assert kernels == {one if hopper or is_full else "fused_sliding_epilogue_kernel"}
    assert torch.equal(out, again)
    for got, got_aux in ((out, aux), (saving, saving_aux)):
        assert torch.equal(got_aux.blocks, want_aux.blocks)
        assert (got.float() - want.float()).norm() / want.float().norm() < 2**-8
        for lse, want_lse in zip(got_aux.lse, want_aux.lse, strict=True):
            torch.testing.assert_close(lse, want_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize(
    ("heads", "length", "config", "union_limit"),
    [
        (2, 700, PAPER, 0),
        (6, 1500, PAPER, 0),
        (14, 1500, PAPER, 64),
        (8, 2077, replace(PAPER, num_selected_blocks=24, num_local_blocks=3), 0),
        (8, 2077, replace(PAPER, num_selected_blocks=24, num_local_blocks=3), 64),
        (8, 1100, replace(PAPER, num_selected_blocks=10), 64),
        (32, 1500, replace(PAPER, num_initial_blocks=0, num_selected_blocks=5), 0),
        (32, 1500, replace(PAPER, num_initial_blocks=0, num_selected_blocks=5), 64),
        (16, 1000, replace(PAPER, num_selected_blocks=3), 64),
    ],
    ids=[
        "all fit",
        "G3, lists",
        "G7, unions",
        "20 free, lists",
        "20 free, unions",
        "7 free, unions",
        "3 free, lists",
        "3 free, unions",
        "none free, unions",
    ],
)
def test_branches_that_the_end_saves(
    heads: int,
    length: int,
    config: NSAConfig,
    union_limit: int,
    dim: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The output, and gradients that need every branch by itself, against the two kernels."""
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", union_limit)
    inputs = inputs_of(2, heads, 2, length, dim, dim)
    own = [x.detach().clone().requires_grad_() for x in inputs[1:3]]
    out, aux = nsa_attention(*inputs, config=config, return_aux=True)
    want = nsa_attention(*inputs, config=config, sliding_key=own[0], sliding_value=own[1])
    upstream = torch.randn_like(out)
    got = [out, *torch.autograd.grad(out, inputs, upstream)]
    *grads, key, value = torch.autograd.grad(want, [*inputs, *own], upstream)
    grads[1], grads[2] = grads[1] + key, grads[2] + value
    for name, x, y in zip(("out", *INPUTS), got, [want, *grads], strict=True):
        error = (x.float() - y.float()).norm() / y.float().norm()
        assert error < 2**-7, (name, error)
    assert aux.blocks.shape[-1] == config.num_selected_blocks
    counts = (config.select_block_size, config.num_initial_blocks, config.num_local_blocks, 0)
    plan = selected_plan.SelectedPlan.of(*inputs[:3], aux.blocks.shape[3], *counts)
    assert bool((build_block_unions(plan, aux.blocks).sizes >= 0).any()) == (union_limit > 0)


@pytest.mark.large
@pytest.mark.gpu
def test_a_million_tokens_forward() -> None:
    """Sampled rows, by the definition over their own window, blocks and compressed keys."""
    length, heads, kv_heads, dim = (1 << 20) - 5, 4, 1, 64
    config = NSAConfig()
    q, k, v = (
        torch.randn(1, length, h, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for h in (heads, kv_heads, kv_heads)
    )
    ck, cv = (x.unfold(2, 32, 16).mean(-1) for x in (k, v))
    gates = torch.rand(1, heads, length, 3, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        out, aux = nsa_attention(q, k, v, ck, cv, gates, config=config, return_aux=True)
    for t in (0, 31, 1000, length // 2, length - 1):
        seen = max(0, (t - 31 + 16) // 16)
        chosen = aux.blocks[0, 0, t]
        tokens = (chosen[chosen >= 0, None] * 64 + torch.arange(64, device="cuda")).flatten()
        tokens = tokens[tokens <= t]
        window = torch.arange(max(0, t - 511), t + 1, device="cuda")
        everything = torch.arange(seen, device="cuda")
        want = torch.zeros(heads, dim, dtype=torch.float64, device="cuda")
        keys = ((ck, cv, everything), (k, v, tokens), (k, v, window))
        for c, (key, value, index) in enumerate(keys):
            if len(index):
                logits = q[0, :, t].double() @ key[0, 0, index].double().T * dim**-0.5
                branch = logits.softmax(-1) @ value[0, 0, index].double()
                want += gates[0, :, t, c, None].double() * branch
        error = (out[0, :, t].double() - want).norm() / want.norm()
        assert error < 2**-7, f"row {t}: {error:.1e}"


@pytest.mark.large
@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(1, 2**18 + 77), (2, 2**17 + 77)])
def test_training_with_offsets_past_two_to_the_31(batch: int, length: int) -> None:
    """64 heads of 128: gradients that the last row of the batch causes, its last tokens too."""
    inputs = inputs_of(batch, 64, 2, length, 128, 128)
    assert inputs[0].numel() > 2**31
    out, aux = nsa_attention(*inputs, config=PAPER, return_aux=True)
    half = 2**17 // batch
    rows = torch.tensor(
        [40, 5000, half + 5, 2 * half - 1, 2 * half + 1, length - 1], device="cuda"
    )
    grad_out = torch.zeros_like(out)
    grad_out[-1:, :, rows] = torch.randn_like(grad_out[-1:, :, rows])
    got = [x[-1:] for x in torch.autograd.grad(out, inputs, grad_out)]
    upstream, out = grad_out[-1:, :, rows], out[-1:, :, rows].detach()
    del grad_out
    q, k, v, ck, cv, gates = (x[-1:].detach() for x in inputs)
    few = (q[:, :, rows], k, v, ck, cv, gates[:, :, rows])
    chosen = aux.blocks[-1:, :, rows]
    want, eager = (sampled(few, chosen, rows, upstream, t) for t in (torch.float64, q.dtype))
    got[0], got[5] = got[0][:, :, rows], got[5][:, :, rows]
    for name, ours, exact, plain in zip(("out", *INPUTS), [out, *got], want, eager, strict=True):
        error, allowed = ((x.double() - exact).norm() / exact.norm() for x in (ours, plain))
        assert error <= limit(float(allowed), q.dtype), (name, error, allowed)


def sampled(
    inputs: tuple[Tensor, ...], blocks: Tensor, rows: Tensor, upstream: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Output at `rows` by the definition in `dtype`, and gradients of all `inputs`.

    Queries, gates and `blocks` are those of the rows. Keys are gathered, so that it fits.
    """
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    q, k, v, ck, cv, gates = leaves
    queries, weights = (x[0].unflatten(0, (k.shape[1], -1)) for x in (q, gates))
    offsets = torch.arange(PAPER.select_block_size, device=q.device)
    outs = []  # of the heads of one group at one row, [G, Dv] each
    for i, t in enumerate(rows.tolist()):
        window = torch.arange(max(0, t - PAPER.window_size + 1), t + 1, device=q.device)
        seen = torch.arange(PAPER.num_compressed_blocks(t + 1), device=q.device)
        for head in range(k.shape[1]):
            chosen = blocks[0, head, i]
            tokens = chosen[chosen >= 0, None].long() * len(offsets) + offsets
            index = (seen, tokens[tokens <= t], window)
            branches = []
            for key, value, which in zip((ck, k, k), (cv, v, v), index, strict=True):
                logits = queries[head, :, i] @ key[0, head, which].mT * q.shape[-1] ** -0.5
                branches.append(logits.softmax(-1) @ value[0, head, which])
            outs.append((torch.stack(branches, 1) * weights[head, :, i, :, None]).sum(1))
    out = torch.stack(outs).unflatten(0, (len(rows), -1)).flatten(1, 2).transpose(0, 1)[None]
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(dtype))]


@pytest.mark.gpu
def test_one_graph_for_all_lengths() -> None:
    graphs = []

    def count(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module

    def call(*inputs: Tensor) -> Tensor:
        return nsa_attention(*inputs, config=PAPER)

    compiled = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for length in (300, 301, 512, 70, 1000):
        inputs = inputs_of(1, 8, 2, length, 64, 64)
        torch.autograd.grad(compiled(*inputs).sum(), inputs)
    assert len(graphs) == 1
    inputs = inputs_of(1, 8, 2, 517, 64, 64)
    whole = torch.compile(call, fullgraph=True, dynamic=True)
    assert (whole(*inputs) - call(*inputs)).abs().max() < 2**-4


@pytest.mark.large
@pytest.mark.gpu
def test_peak_memory_of_a_training_step() -> None:
    """Above the inputs, in units of the query: what is saved, the results, and little else.

    That is the end of the forward: all branches, their sum, and one of them twice. The partial
    results of the selection have a buffer of a fixed size besides. `test_core_memory.py` counts
    the backward.
    """
    inputs = inputs_of(1, 32, 2, 1 << 15, 128, 128)
    grad = torch.randn_like(inputs[0])

    def step() -> None:
        out = nsa_attention(*inputs, config=PAPER)
        torch.autograd.grad(out, inputs, grad)

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 6 * inputs[0].nbytes + PARTIAL_BYTES
