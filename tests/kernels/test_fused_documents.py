"""The core on packed documents: against the float64 oracle, and against each document alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.documents import align_packed
from reference import oracle
from reference.accuracy import assert_close, leaf, to_float64
from reference.fused_ends import ends_of, watched_epilogue
from reference.interpreter import INTERPRETED, interpreted, kernels
from reference.modes import deterministic_algorithms

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.fused import operators as core
from nsa_flex.fallback_kernels.fused import route
from nsa_flex.fallback_kernels.fused.bwd_gates import gated_sum_gradients
from nsa_flex.fallback_kernels.fused.operators import CoreResults, core_attention
from nsa_flex.fallback_kernels.selected import config as selected_plan

PAPER = NSAConfig()
NARROW = NSAConfig(8, 4, 16, 4, window_size=20)  # a window that does not hold the local blocks
WIDE = NSAConfig(8, 4, 16, 5, window_size=37)  # and one that does
TILED = NSAConfig(16, 16, 16, 4, 0, 1, window_size=20, selection="tiled_top_k")
LARGE = NSAConfig(8, 8, 32, 4, window_size=70)  # blocks as large as the key tiles of float32
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
INPUTS = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
# The branches one by one, on other kernels.
APART = {"compressed": "triton", "selected": "triton", "sliding": "flex"}

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="CUDA has tests of its own below")


@pytest.fixture(autouse=True)
def _not_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of long documents, at small lengths; test_short.py has the others."""
    monkeypatch.setattr(route, "is_short", lambda *_: False)
    if INTERPRETED:
        monkeypatch.setattr(route, "masks_backward", lambda *_: False)
        monkeypatch.setattr(route, "masks_forward", lambda *_: False)


test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call. ends: where the documents of each batch row end, in blocks, but the last.

    The last block of the row is cut off in the middle.
    """

    ends: tuple[tuple[int, ...], ...]
    config: NSAConfig
    blocks: int = 5
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    own: bool = False
    deterministic: bool = False

    @property
    def tokens(self) -> int:
        return self.blocks * self.config.select_block_size - 3

    def starts(self) -> np.ndarray:
        """int32 (B, S): first key of each token's document."""
        token = np.arange(self.tokens)
        edges = (np.array(row, dtype=int) * self.config.select_block_size for row in self.ends)
        starts = (np.r_[0, x][np.searchsorted(x, token, side="right")] for x in edges)
        return np.stack(list(starts)).astype(np.int32)

    def inputs(self, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The six tensors of the core, and two more if the window has keys of its own."""
        blocks = max(1, self.config.num_compressed_blocks(self.tokens))
        sizes = [(self.heads, self.tokens, self.head_dim)]
        sizes += [(self.kv_heads, n, self.head_dim) for n in (self.tokens, blocks)]
        sizes += [(self.kv_heads, n, self.value_dim) for n in (self.tokens, blocks)]
        q, k, ck, v, cv = (leaf((len(self.ends), *size), dtype, "cpu") for size in sizes)
        gates = torch.randn(len(self.ends), self.heads, self.tokens, 3)  # any real number is one
        gates[:, 0, ::3] = 0
        tensors = [q, k, v, ck, cv, gates.to(dtype).requires_grad_(True)]
        own = [leaf(x.shape, dtype, "cpu") for x in (k, v)] if self.own else []
        return [*tensors, *own]


def attend(case: Case, inputs: list[Tensor]) -> CoreResults:
    q, k, v, ck, cv, gates, *own = inputs
    start = torch.from_numpy(case.starts()).to(q.device)
    options: dict[str, Any] = {"config": case.config, "scale": 0.3, "document_start": start}
    return core_attention(q, k, v, ck, cv, *(own or (k, v)), gates, **options)


CASES = {
    "one document": Case(((),), NARROW, blocks=2),
    "short ones, an empty one": Case(((1, 1, 2), (0, 3)), NARROW, blocks=4, kv_heads=2),
    "local blocks in the window": Case(((2, 4),), WIDE, heads=4),
    "groups of three": Case(((1, 2),), WIDE, blocks=4, heads=3, value_dim=32),
    "a head a group": Case(((1, 2),), WIDE, blocks=4, heads=1, deterministic=True),
    "keys of its own for the window": Case(((2, 3),), WIDE, blocks=4, own=True, value_dim=32),
    "large blocks": Case(((1, 2),), LARGE, blocks=4, heads=1),
    "tiles of a document": Case(((1,),), TILED, blocks=7),
}


@kernels
@in_the_interpreter
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    with deterministic_algorithms(case.deterministic):
        results = attend(case, inputs)
        grad = torch.randn_like(results.out)
        grads = torch.autograd.grad(results.out, inputs, grad)
    hold(case, inputs, results, grad, grads)


def hold(case: Case, inputs: list[Tensor], results: CoreResults, grad: Tensor, grads: Any) -> None:
    """Choice, values, log-sum-exps and gradients, in float32."""
    arrays, config = [to_float64(x) for x in inputs], case.config
    names = ("sliding_key", "sliding_value") if case.own else ()
    more: dict[str, Any] = {"scale": 0.3, "document_start": case.starts()}
    more |= dict(zip(names, arrays[6:], strict=True))
    blocks = results.blocks.numpy()
    scores = oracle.forward(*arrays[:6], config, **more).scores
    excess = oracle.choice_excess(blocks, scores, config, document_start=case.starts())
    assert excess <= 1e-5
    more["blocks"] = blocks
    want = oracle.forward(*arrays[:6], config, **more)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)
    wanted = oracle.backward(*arrays[:6], config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    for name, got in zip((*INPUTS, *names), grads, strict=True):
        assert_close(name, got, getattr(wanted, name), None, torch.float32, least=least)


@kernels
@pytest.mark.usefixtures("forget_plans")
@in_the_interpreter
@pytest.mark.parametrize("union_limit", [0, 9])
def test_one_kernel_ends_the_forward_without_gradients(
    union_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watched_epilogue(monkeypatch, union_limit)
    case = Case(((1, 2),), WIDE)
    inputs = [x.detach() for x in case.inputs()]
    results = attend(case, inputs)
    assert watched.call_count == 1
    more = {"scale": 0.3, "blocks": results.blocks.numpy(), "document_start": case.starts()}
    want = oracle.forward(*(to_float64(x) for x in inputs), WIDE, **more)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)


@kernels
@in_the_interpreter
@pytest.mark.parametrize(
    ("config", "dtype"), [(NARROW, torch.float16), (WIDE, torch.float32), (LARGE, torch.float32)]
)
def test_another_document_and_gaps_may_be_large(config: NSAConfig, dtype: torch.dtype) -> None:
    """Keys and values beyond a document's last real token change no bit of it.

    In float32 a value's product with dO overflows; the window's kernels then have the local
    blocks. No logit does: a softmax of infinities has no gradient.
    """
    case = Case(((1, 2),), config, blocks=3)
    real = torch.from_numpy(case.starts() == config.select_block_size)[0]  # the second document
    real &= torch.arange(case.tokens) % config.select_block_size < config.select_block_size - 3
    upstream = torch.randn(1, case.heads, case.tokens, case.value_dim) * real[:, None]
    plain = case.inputs(dtype)

    begin = torch.arange(plain[3].shape[2]) * config.compress_stride
    whole = real[begin] & real[begin + config.compress_block_size - 1]

    def run(inputs: list[Tensor]) -> list[Tensor]:
        results = attend(case, inputs)
        grads = torch.autograd.grad(results.out, inputs, upstream.to(dtype))
        of_tokens = (results.out, results.blocks, *grads[:3], grads[5])
        return [*(x[:, :, real] for x in of_tokens), *(x[:, :, whole] for x in grads[3:5])]

    large = [x.detach().clone() for x in plain]
    most = torch.finfo(dtype).max / 4  # three of them, in the gap, have a finite sum
    for x, kept, size in zip(
        large[1:5],
        (real, real, whole, whole),
        (min(1e30, most), most, min(1e30, most), most),
        strict=True,
    ):
        x[:, :, ~kept] = size
    found = run([x.requires_grad_() for x in large])
    for got, want in zip(found, run(plain), strict=True):
        assert torch.equal(got, want)


@kernels
@in_the_interpreter
@settings(max_examples=2, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    seed=st.integers(0, 2**32 - 1),
)
@example(lengths=[0, 1, 7, 0, 17, 0], seed=0)
def test_packed_is_alone(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    total, config = sum(lengths), WIDE
    q, k, v, gates = (
        leaf((1, heads, total, dim), torch.float32, "cpu", grad=False)
        for heads, dim in ((2, 16), (1, 16), (1, 16), (2, 3))
    )
    edges = torch.tensor([0, *np.cumsum(lengths)])
    layout = align_packed(edges, total, config)
    assert layout.start is not None
    aligned = [layout.align(x) for x in (q, k, v, gates)]
    ck, cv = (
        torch.nn.functional.pad(x, (0, 0, 0, max(0, 8 - x.shape[2]))).unfold(2, 8, 4).mean(-1)
        for x in aligned[1:3]
    )
    keys = aligned[1:3]
    results = core_attention(
        *aligned[:3], ck, cv, *keys, aligned[3],
        config=config, scale=0.25, document_start=layout.start,
    )  # fmt: skip
    out = layout.restore(results.out)
    arrays = [to_float64(x) for x in (q, k, v, gates)]
    want = oracle.forward_documents(*arrays, config, lengths, scale=0.25)
    assert_close("output", out, want, None, torch.float32)


@kernels
@in_the_interpreter
def test_a_gate_of_zero_where_no_compressed_block_is_seen() -> None:
    """The log-sum-exp less the gate's logarithm: -inf less -inf would be NaN."""
    rows = [torch.randn(1, 3, 2, 16) for _ in range(4)]
    gates = torch.tensor([0.0, 0.5]).expand(1, 3, 3, 2).transpose(1, 3)
    lse = torch.tensor([-torch.inf, 0.0, 1.0])[None, :, None].expand(1, 3, 2).contiguous()
    _, sums = gated_sum_gradients(*rows, torch.zeros(1, 3, 2), gates, lse.transpose(1, 2))
    want = [[-torch.inf, -torch.inf], [torch.inf, np.log(2)], [torch.inf, 1 + np.log(2)]]
    torch.testing.assert_close(sums.compressed_lse, torch.tensor([want], dtype=torch.float32))


@kernels
@in_the_interpreter
def test_operators_pass_opcheck() -> None:
    case = CASES["one document"]
    *tensors, gates = case.inputs()
    start = torch.from_numpy(case.starts())
    for differentiable in (True, False):
        options = (0.3, case.config.counts, differentiable, True, start)
        arguments = (*tensors, gates, None, None, *options)
        torch.library.opcheck(
            torch.ops.nsa_flex.core_forward.default, arguments, test_utils=CHECKS
        )
        if differentiable:
            results = [x.detach() for x in core.core_forward(*arguments)]
            inputs = [x.detach() for x in (*tensors, gates)]
            backward = (
                torch.randn_like(results[0]),
                inputs,
                results[1:],
                *options[:2],
                True,
                start,
            )
            torch.library.opcheck(core.core_backward, backward, test_utils=CHECKS)
            grad, blocks, lse, selected_lse, sliding_lse, index = (
                torch.randn_like(results[0]),
                *(results[i] for i in (1, 3, 5, 7, 8)),
            )
            of_gates = (grad, inputs, results[1:], *options[:2], start)
            torch.library.opcheck(core.core_backward_gates, of_gates, test_utils=CHECKS)
            _, signed, stats, *_ = core.core_backward_gates(*of_gates)
            kept = (blocks, None, lse, selected_lse, sliding_lse, index)
            for held in (grad, None):
                of_call = (inputs, *kept, *options[:2], True, start)
                of_branches = (signed, stats, None, None, held, *of_call)
                torch.library.opcheck(core.core_backward_branches, of_branches, test_utils=CHECKS)


def on_cuda(
    dims: tuple[int, int], group: int, dtype: torch.dtype, tokens: int, batch: int = 2
) -> tuple[list[Tensor], Tensor]:
    """Inputs of `nsa_attention`, and documents: long ones, one of a block, an empty one."""
    blocks = PAPER.num_compressed_blocks(tokens)
    sizes = [(2 * group, tokens, dims[0])]
    sizes += [(2, n, dim) for dim in dims for n in (tokens, blocks)]
    q, k, ck, v, cv = (leaf((batch, *size), dtype, "cuda") for size in sizes)
    gates = torch.randn(batch, 2 * group, tokens, 3, device="cuda").to(dtype)
    gates[:, 0, ::3] = 0
    edges = torch.tensor([64, 64, tokens // 128 * 64, tokens // 128 * 64 + 64], device="cuda")
    token = torch.arange(tokens, device="cuda")
    bounds = torch.nn.functional.pad(edges, (1, 0))
    start = bounds[torch.searchsorted(edges, token, right=True)].repeat(batch, 1)
    return [q, k, v, ck, cv, gates.requires_grad_(True)], start


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dims", "group", "tokens", "dtype"),
    [
        ((128, 128), 16, 2500, torch.bfloat16),
        ((128, 128), 4, 2500, torch.float16),
        ((128, 128), 1, 1333, torch.bfloat16),
        ((128, 128), 3, 1333, torch.bfloat16),
        ((64, 64), 4, 1333, torch.bfloat16),
        ((80, 80), 2, 700, torch.float16),
        ((192, 128), 4, 700, torch.bfloat16),
        ((256, 256), 2, 700, torch.bfloat16),
        ((64, 64), 2, 700, torch.float32),
    ],
    ids=str,
)
def test_is_the_branches_apart(
    dims: tuple[int, int], group: int, tokens: int, dtype: torch.dtype
) -> None:
    """The same choice, and values and gradients as near as two roundings are."""
    inputs, start = on_cuda(dims, group, dtype, tokens)
    results = []
    for backend in ("auto", APART):
        out, aux = nsa_attention(
            *inputs, config=PAPER, backend=backend, document_start=start, return_aux=True
        )
        torch.manual_seed(0)
        results.append((out, *torch.autograd.grad(out, inputs, torch.randn_like(out))))
        results[-1] += (aux.blocks, *aux.lse)
    (*got, blocks, lse0, lse1, lse2), (*want, want_blocks, want0, want1, want2) = results
    assert torch.equal(blocks, want_blocks)
    for lse, want_lse in ((lse0, want0), (lse1, want1), (lse2, want2)):
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-3)
    for name, x, y in zip(("out", *INPUTS), got, want, strict=True):
        error = (x.float() - y.float()).norm() / y.float().norm()
        assert error < 2**-7, (name, float(error))


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("union_limit", [0, 64])
@pytest.mark.parametrize(("group", "dim"), [(1, 128), (3, 128), (4, 64), (7, 80), (16, 128)])
def test_the_kernel_for_hopper_ends_the_forward(
    group: int, dim: int, union_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without gradients, against the two kernels that keys of its own for the window ask
    for; tiles of lists and of unions.
    """
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", union_limit)
    inputs, start = on_cuda((dim, dim), group, torch.bfloat16, 2500)
    options: dict[str, Any] = {"config": PAPER, "document_start": start}
    own = {"sliding_key": inputs[1].clone(), "sliding_value": inputs[2].clone()}
    want, found = ends_of(inputs, **options, **own)
    assert found == {"fused_sliding_epilogue_kernel"}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, found = ends_of(inputs, **options)
        if gluon_unsupported_reason(out.device) is None:
            assert found == {"fused_fwd_epilogue_sm90_kernel"}
        assert (out.float() - want.float()).norm() < 2**-8 * want.float().norm()


@pytest.mark.gpu
def test_one_graph_for_any_packing() -> None:
    graphs = []

    def count(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module

    def call(*tensors: Tensor) -> Tensor:
        *inputs, start = tensors
        return nsa_attention(*inputs, config=PAPER, document_start=start)

    compiled = torch.compile(call, backend=count, fullgraph=True, dynamic=True)
    for tokens in (700, 701, 1500):
        inputs, start = on_cuda((64, 64), 4, torch.bfloat16, tokens)
        for packing in (start, torch.zeros_like(start)):
            out = compiled(*inputs, packing)
            torch.autograd.grad(out.sum(), inputs)
            assert (out - call(*inputs, packing)).abs().max() < 2**-4
    assert len(graphs) == 1
