"""The core at an offset: against the float64 oracle, and against the branches one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from nsa_flex import NSAConfig, attention, nsa_attention
from nsa_flex.backends.branch import Inputs
from reference import oracle, played_cudnn
from reference.accuracy import assert_close, to_float64
from reference.fused_ends import ends_of, watched_epilogue
from reference.interpreter import INTERPRETED, interpreted, kernels, only_outside
from reference.modes import deterministic_algorithms

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.compressed import cudnn, cudnn_op
from nsa_flex.fallback_kernels.compressed.fold import range_rows_view
from nsa_flex.fallback_kernels.fused import fwd_epilogue as epilogue
from nsa_flex.fallback_kernels.fused import operators as core
from nsa_flex.fallback_kernels.fused import route
from nsa_flex.fallback_kernels.fused.compressed_past import PastKeys
from nsa_flex.fallback_kernels.fused.operators import CoreResults, core_attention
from nsa_flex.fallback_kernels.launch import plans
from nsa_flex.fallback_kernels.selected import config as selected_plan

PAPER = NSAConfig()
NARROW = NSAConfig(8, 4, 16, 4, window_size=20)  # a window that does not hold the local blocks
WIDE = NSAConfig(8, 4, 16, 5, window_size=37)  # and one that does

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="CUDA has tests of its own below")

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call: `queries` from position `offset` on, of so many keys."""

    queries: int
    offset: int
    keys: int
    config: NSAConfig = WIDE
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    own: bool = False
    documents: tuple[int, ...] = ()  # where they begin

    def document_start(self, device: str = "cpu") -> Tensor | None:
        """int32 (B, queries): of each query's document."""
        if not self.documents:
            return None
        starts = torch.tensor(self.documents, dtype=torch.int32)
        place = torch.arange(self.offset, self.offset + self.queries, dtype=torch.int32)
        start = starts[torch.searchsorted(starts, place, right=True) - 1]
        return start.expand(self.batch, -1).contiguous().to(device)

    def inputs(self, dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Tensor]:
        """The six tensors of the core, and two more if the window has keys of its own."""
        blocks = max(1, self.config.num_compressed_blocks(self.keys))
        sizes = [(self.heads, self.queries, self.head_dim)]
        sizes += [(self.kv_heads, n, self.head_dim) for n in (self.keys, blocks)]
        sizes += [(self.kv_heads, n, self.value_dim) for n in (self.keys, blocks)]
        q, k, ck, v, cv = (
            torch.randn(self.batch, n, heads, dim, device=device, dtype=dtype).transpose(1, 2)
            for heads, n, dim in sizes
        )
        gates = torch.randn(self.batch, self.heads, self.queries, 3, device=device)
        gates[:, 0, ::3] = 0  # any real number is a gate
        own = [torch.randn_like(x) for x in (k, v)] if self.own else []
        return [q, k, v, ck, cv, gates.to(dtype), *own]

    def poisoned(self, inputs: list[Tensor]) -> list[Tensor]:
        """As from a cache: what no query sees holds NaN."""
        inputs = [x.clone() for x in inputs]
        end = self.offset + self.queries
        for i in (1, 2, *range(6, len(inputs))):
            inputs[i][:, :, end:] = float("nan")
        for i in (3, 4):
            inputs[i][:, :, self.config.num_compressed_blocks(end) :] = float("nan")
        return inputs


def attend(case: Case, inputs: list[Tensor], **options: Any) -> CoreResults:
    q, k, v, ck, cv, gates, *own = inputs
    options = {"config": case.config, "scale": 0.3, "query_offset": case.offset} | options
    options["document_start"] = case.document_start(q.device.type)
    return core_attention(q, k, v, ck, cv, *(own or (k, v)), gates, **options)


def hold(case: Case, inputs: list[Tensor], results: CoreResults) -> None:
    """Choice, values and log-sum-exps, in float32."""
    arrays, config = [to_float64(x) for x in inputs], case.config
    more: dict[str, Any] = {"scale": 0.3, "offset": case.offset}
    start = case.document_start()
    more["document_start"] = None if start is None else start.numpy()
    more |= dict(zip(("sliding_key", "sliding_value"), arrays[6:], strict=False))
    assert results.blocks is not None
    blocks = results.blocks.cpu().numpy()
    scores = oracle.forward(*arrays[:6], config, **more).scores
    starts = more["document_start"]
    assert oracle.choice_excess(blocks, scores, config, case.offset, starts) <= 1e-5
    want = oracle.forward(*arrays[:6], config, **more, blocks=blocks)
    terms = sum_of_branches(want, arrays[5])
    assert_close("output", results.out, want.out, None, torch.float32, least=terms / 4)
    scores = largest_scores(arrays, case, more["scale"])
    for name in oracle.BRANCHES:
        got = getattr(results, f"{name}_lse")
        assert_close(name, got, want.lse[name], None, torch.float32, least=scores / 4)


# One query has few numbers, and each may be next to nothing as a sum of larger ones: two gates of
# opposite sign over one value, the products of one key. Its error is one of these. A sum of the
# 16 products of a head dim errs by 8 last places of their sizes at most, a quarter of the limit,
# and one of three branches by less.


def sum_of_branches(want: oracle.Forward, gates: Any) -> float:
    """Norm of the output as if no branch cancelled another."""
    outputs = (np.abs(want.outputs[name]) for name in oracle.BRANCHES)
    parts = (np.abs(gates[..., c, None]) * x for c, x in enumerate(outputs))
    return float(np.linalg.norm(sum(parts)))


def largest_scores(arrays: list[Any], case: Case, scale: float) -> float:
    """Norm, over queries, of the largest score as if no product cancelled another."""
    key = np.abs(arrays[1][:, :, : case.offset + case.queries])
    key = key.repeat(case.heads // case.kv_heads, axis=1)
    return scale * float(np.linalg.norm((np.abs(arrays[0]) @ key.swapaxes(2, 3)).max(-1)))


CASES = {
    "one query": Case(1, 77, 100),
    "one query, first of all": Case(1, 0, 3, NARROW),
    "the first of a cache": Case(21, 0, 130, heads=4),
    "off every tile": Case(37, 45, 90, NARROW, batch=2, heads=4, kv_heads=2),
    "a head a group": Case(19, 60, 79, heads=1, value_dim=32),
    "groups of three": Case(23, 33, 70, heads=3),
    "groups of six": Case(9, 101, 128, NARROW, heads=6),
    "groups of sixteen": Case(9, 50, 75, heads=16),
    "keys of its own for the window": Case(18, 47, 66, heads=4, own=True, value_dim=32),
    "as many blocks as are chosen": Case(10, 30, 60, NARROW),
}


@kernels
@in_the_interpreter
@pytest.mark.kept(
    lambda name: name not in ("groups of sixteen", "a head a group", "the first of a cache")
)
@pytest.mark.parametrize("name", CASES)
def test_two_kernels_end_the_forward(name: str) -> None:
    case = CASES[name]
    inputs = case.inputs()
    hold(case, inputs, attend(case, case.poisoned(inputs)))


@kernels
@pytest.mark.usefixtures("forget_plans")
@in_the_interpreter
@pytest.mark.kept(lambda case, union_limit: union_limit == (0 if case.queries in (1, 21) else 9))
@pytest.mark.parametrize("union_limit", [0, 9])
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 77, 100),
        Case(1, 0, 3),
        Case(21, 0, 130, heads=4),
        Case(49, 45, 94, batch=2, heads=4, kv_heads=2),
        Case(40, 71, 140, heads=1, value_dim=32),
        Case(9, 50, 75, heads=16),
    ],
    ids=lambda case: f"{case.queries} at {case.offset} of {case.keys}, {case.heads} heads",
)
def test_one_kernel_ends_the_forward(
    case: Case, union_limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watched_epilogue(monkeypatch, union_limit)
    inputs = case.inputs()
    hold(case, inputs, attend(case, case.poisoned(inputs)))
    assert watched.call_count == 1


@kernels
@in_the_interpreter
def test_branches_that_cancel_leave_an_error_of_their_sum() -> None:
    """A thousandth is left of two terms; 12 last places of these are still too many."""
    case = CASES["one query, first of all"]
    inputs = case.inputs()
    inputs[5][:] = torch.tensor([0.0, 1.0, -0.999])
    results = attend(case, case.poisoned(inputs))
    hold(case, inputs, results)
    planted = results.out + 12 * 2 * torch.finfo(torch.float32).eps * inputs[2][:, :, :1]
    with pytest.raises(AssertionError, match="output: error"):
        hold(case, inputs, results._replace(out=planted))


@kernels
@in_the_interpreter
def test_offset_zero_of_all_tokens_is_the_plain_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "is_short", lambda *_: False)
    case = Case(70, 0, 70, heads=4, kv_heads=2)
    inputs = case.inputs()
    got, want = attend(case, inputs), attend(case, inputs, query_offset=None)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.usefixtures("forget_plans")
@in_the_interpreter
def test_one_launch_plan_serves_all_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "DEVICES", {"cpu"})
    kept: Any = core.core_forward._init_fn.plans
    recorded, replayed = kept.recorded, kept.replayed
    for offset in (3, 0, 64, 41):
        case = Case(20, offset, 90)
        inputs = case.inputs()
        hold(case, inputs, attend(case, case.poisoned(inputs)))
    assert not kept.problems
    assert (kept.recorded - recorded, kept.replayed - replayed) == (1, 2)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN in the compressed branch, played by PyTorch."""
    monkeypatch.setattr(route, "RANGES_TOKENS", 0)
    monkeypatch.setattr(route, "RANGES_ROW", 0)
    monkeypatch.setattr(route, "LEAST_PAST", 0)
    monkeypatch.setattr(route, "CUDNN_DTYPES", (torch.float32,))
    for module, name in (
        (cudnn, "causal"),
        (cudnn, "causal_gradients"),
        (cudnn_op, "whole"),
        (cudnn_op, "whole_gradients"),
    ):
        monkeypatch.setattr(module, name, getattr(played_cudnn, name))


# The queries are the last tokens of all keys.
LAST = {
    "one query": Case(1, 76, 77),
    "off every tile": Case(37, 45, 82, NARROW, batch=2, heads=4, kv_heads=2),
    "a head a group": Case(19, 60, 79, heads=1, value_dim=32),
    "groups of three": Case(23, 33, 56, heads=3),
    "groups of sixteen": Case(18, 48, 66, heads=16),
    "keys of its own for the window": Case(18, 47, 65, heads=4, own=True, value_dim=32),
    "as many blocks as are chosen": Case(10, 30, 40, NARROW),
    "less past than a window": Case(90, 17, 107, heads=4, kv_heads=2),
    "documents": Case(50, 45, 95, heads=4, kv_heads=2, documents=(0, 16, 48, 64)),
    "documents, batch": Case(37, 32, 69, NARROW, batch=2, heads=3, documents=(16, 48)),
    "documents, keys of its own": Case(30, 20, 50, own=True, value_dim=32, documents=(0, 32)),
    "blocks that do not overlap": Case(40, 67, 107, NSAConfig(16, 16, 16, 4, 0, 1, 20)),
}


@kernels
@in_the_interpreter
@pytest.mark.kept(
    lambda name, by_cudnn, deterministic: (
        deterministic == (name == "off every tile")
        and by_cudnn != (name in ("groups of three", "less past than a window"))
    )
)
@pytest.mark.parametrize("deterministic", [False, True], ids=["atomics", "deterministic"])
@pytest.mark.parametrize("by_cudnn", [True, False], ids=["cudnn", "ranges"])
@pytest.mark.parametrize("name", LAST)
def test_gradients_of_the_last_queries(
    name: str, by_cudnn: bool, deterministic: bool, request: pytest.FixtureRequest
) -> None:
    if by_cudnn:
        request.getfixturevalue("played")
    case = LAST[name]
    inputs = [x.requires_grad_() for x in case.inputs()]
    with deterministic_algorithms(deterministic):
        results = attend(case, inputs, query_offset=None)
        hold(case, inputs, results)
        grad = torch.randn_like(results.out)
        grads = torch.autograd.grad(results.out, inputs, grad)
    assert results.blocks is not None
    arrays = [to_float64(x) for x in inputs]
    more: dict[str, Any] = {"scale": 0.3, "blocks": results.blocks.numpy()}
    more |= dict(zip(("sliding_key", "sliding_value"), arrays[6:], strict=False))
    start = case.document_start()
    more["document_start"] = None if start is None else start.numpy()
    wanted = oracle.backward(*arrays[:6], case.config, to_float64(grad), **more)
    least = 0.1 * float(grad.norm())
    names = ("query", "key", "value", "compressed_key", "compressed_value", "gates")
    for name, got in zip((*names, "sliding_key", "sliding_value"), grads, strict=False):
        assert_close(name, got, getattr(wanted, name), None, torch.float32, least=least)


@kernels
@in_the_interpreter
@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("past", [0, 5, 33, 40])
def test_keys_after_the_last_query_have_no_gradient(
    past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nsa_attention` leaves them out, and the kernels of the core run."""
    case = Case(20, past, 90, heads=4, kv_heads=2)
    inputs = [x.requires_grad_() for x in case.poisoned(case.inputs())]
    q, k, v, ck, cv, gates = inputs
    seen = Inputs(q, k, v, ck, cv, k, v, gates).seen(case.config, past, True)
    assert seen.key.shape[2] == past + 20
    assert seen.sliding_key is seen.key
    results = core_attention(*seen, config=case.config, scale=0.3)
    grads = torch.autograd.grad(results.out, inputs, torch.randn_like(results.out))
    assert all(x.isfinite().all() for x in grads)
    assert not grads[1][:, :, past + 20 :].any()
    assert seen is seen.seen(case.config, past, True)
    assert seen is seen.seen(case.config, torch.tensor([past]), True)


@only_outside
@pytest.mark.parametrize(("block", "stride"), [(32, 16), (8, 8), (8, 2), (1, 1)])
def test_queries_see_the_keys_before_them_and_a_fold(block: int, stride: int) -> None:
    config = NSAConfig(block, stride, 64, 4)
    for past in range(block, 3 * block + 5):
        for tokens in (1, stride, 40, 65):
            keys = PastKeys.of(tokens, past, config)
            positions = past + torch.arange(tokens)
            sees = (positions - block + 1) // stride + 1  # blocks of each query
            assert keys.seen == sees[0]
            for part in keys.fold.ranges:
                if part.is_empty:
                    continue
                rows = range_rows_view(sees[None, :, None, None], part, keys.fold.reach, stride)[
                    0, :, :, 0
                ]
                later = torch.arange(1, part.rows + 1)[:, None].expand_as(rows)
                assert torch.equal(rows - keys.seen, later)
            assert (sees[: keys.fold.reach] == keys.seen).all()


@kernels
@in_the_interpreter
def test_the_operator_passes_opcheck_with_gradients() -> None:
    case = Case(13, 21, 34)
    inputs = [x.requires_grad_() for x in case.inputs()]
    options = (0.3, case.config.counts, True, False)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(
        torch.ops.nsa_flex.core_forward.default, (*inputs, None, None, *options), test_utils=checks
    )


@kernels
@in_the_interpreter
def test_the_operator_passes_opcheck() -> None:
    case = Case(13, 21, 40)
    offsets = torch.full((1, 1), case.offset, dtype=torch.int32)
    options = (0.3, case.config.counts, False, False, None, None, True, offsets)
    arguments = (*case.inputs(), None, None, *options)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.nsa_flex.core_forward.default, arguments, test_utils=checks)


ON_CUDA = [
    (1, 128, 300, 701, 1001),
    (2, 128, 1, 1500, 3000),
    (2, 128, 333, 64, 3000),
    (4, 128, 1003, 2049, 4000),
    (6, 128, 257, 1111, 1400),
    (16, 128, 515, 2500, 3015),
    (16, 128, 640, 0, 2000),
    (16, 64, 515, 2501, 3500),
    (7, 80, 257, 1111, 1400),
    (4, 32, 130, 1900, 2100),
]


def on_cuda(
    group: int, dim: int, queries: int, offset: int, keys: int, dtype: torch.dtype
) -> tuple[Case, list[Tensor]]:
    heads = {"batch": 2, "heads": 2 * group, "kv_heads": 2}
    case = Case(queries, offset, keys, PAPER, head_dim=dim, value_dim=dim, **heads)
    return case, case.inputs(dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("union_limit", [0, 64])
@pytest.mark.parametrize(
    ("group", "dim", "queries", "offset", "keys"),
    ON_CUDA,
    ids=[f"G{g}-D{d}-{q}-at-{o}-of-{k}" for g, d, q, o, k in ON_CUDA],
)
def test_is_the_branches_apart(
    group: int,
    dim: int,
    queries: int,
    offset: int,
    keys: int,
    union_limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three times: as the body runs, recorded and replayed; what no query sees holds NaN."""
    monkeypatch.setattr(selected_plan, "UNION_LIMIT", union_limit)
    case, inputs = on_cuda(group, dim, queries, offset, keys, torch.bfloat16)
    options: dict[str, Any] = {"query_offset": offset, "backend": "triton"}
    options |= {"config": PAPER, "return_aux": True}
    with torch.no_grad():
        with monkeypatch.context() as patched:
            patched.setattr(attention, "is_fused", lambda *_: False)
            (want, want_aux), found = ends_of(inputs, **options)
        assert found == {"gated_sum_fwd_kernel"}
        inputs = case.poisoned(inputs)
        own = {"sliding_key": inputs[1].clone(), "sliding_value": inputs[2].clone()}
        for _ in range(3):
            (out, aux), found = ends_of(inputs, **options)
            one = "fused_fwd_epilogue_kernel"
            if group in (6, 7):
                one = "fused_sliding_epilogue_kernel"  # whose tiles may have empty rows
            if dim > 32 and gluon_unsupported_reason(out.device) is None:
                one = "fused_fwd_epilogue_sm90_kernel"
            assert found == {one}
            check(out, aux, want, want_aux)
        (out, aux), found = ends_of(inputs, **options, **own)
        assert found == {"fused_sliding_epilogue_kernel"}
        check(out, aux, want, want_aux)


def check(out: Tensor, aux: Any, want: Tensor, want_aux: Any) -> None:
    assert torch.equal(aux.blocks, want_aux.blocks)
    for lse, want_lse in zip(aux.lse, want_aux.lse, strict=True):
        torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=1e-3)
    assert (out.float() - want.float()).norm() < 2**-7 * want.float().norm()


# Group, head dims, queries, and keys before them.
LAST_ON_CUDA = [
    (1, (128, 128), 300, 701),
    (2, (128, 128), 333, 64),
    (3, (80, 80), 257, 1111),
    (4, (128, 128), 1003, 2048),
    (4, (128, 64), 515, 1999),
    (16, (128, 128), 515, 2560),
    (16, (64, 64), 1024, 2501),
    (16, (192, 128), 260, 1280),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("by_cudnn", [True, False], ids=["cudnn", "ranges"])
@pytest.mark.parametrize(
    ("group", "dims", "queries", "past"),
    LAST_ON_CUDA,
    ids=[f"G{g}-D{d[0]}-{d[1]}-{q}-after-{p}" for g, d, q, p in LAST_ON_CUDA],
)
def test_gradients_are_those_of_the_branches_apart(
    group: int,
    dims: tuple[int, int],
    queries: int,
    past: int,
    by_cudnn: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a body, recorded and replayed; and the operator and the kernels of the route run."""
    if by_cudnn:
        for name in ("RANGES_TOKENS", "RANGES_ROW", "LEAST_PAST"):
            monkeypatch.setattr(route, name, 0)
    heads = {"batch": 2, "heads": 2 * group, "kv_heads": 2}
    sizes = {"head_dim": dims[0], "value_dim": dims[1], **heads}
    case = Case(queries, past, past + queries + 64, PAPER, **sizes)
    inputs = [x.requires_grad_() for x in case.inputs(dtype, "cuda")]
    options: dict[str, Any] = {"query_offset": past, "config": PAPER, "return_aux": True}

    def step() -> tuple[Tensor, ...]:
        out, aux = nsa_attention(*inputs, **options)
        torch.manual_seed(0)
        return out, *torch.autograd.grad(out, inputs, torch.randn_like(out)), aux.blocks

    with monkeypatch.context() as patched:
        patched.setattr(attention, "is_fused", lambda *_: False)
        *want, blocks = step()
    allowed = 2**-16 if dtype == torch.float32 else 2**-6
    for _ in range(3):
        *got, chosen = step()
        assert (chosen == blocks).float().mean() > 0.999
        for x, y in zip(got, want, strict=True):
            assert (x.double() - y.double()).norm() <= allowed * y.double().norm()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
    names = {event.name for event in trace.events()}
    assert "nsa_flex::core_forward" in names
    takes_cudnn = by_cudnn and dtype != torch.float32 and max(dims) <= 128
    compressed = "compressed_past_bwd_kernel" if takes_cudnn else "ranges_bwd_dq_kernel"
    assert {compressed, "fused_bwd_dq_kernel", "fused_bwd_dkdv_kernel"} <= names
    is_hopper = gluon_unsupported_reason(inputs[0].device) is None
    if is_hopper and dtype != torch.float32 and dims[0] == dims[1] and past % 64 == 0:
        assert "fused_fwd_epilogue_sm90_kernel" in names
    else:
        assert "fused_sliding_epilogue_kernel" in names


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("past", [701, 1280])
@pytest.mark.parametrize("group", [4, 16])
def test_gradients_of_documents_at_an_offset(
    group: int, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the branches apart: documents begin before the first query, and among the queries."""
    documents = (0, 640, 1408, 1472, 2048)
    case = Case(1024, past, past + 1024, PAPER, 2, 2 * group, 2, 128, 128, documents=documents)
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16, "cuda")]
    start = case.document_start("cuda")

    def step() -> tuple[Tensor, ...]:
        out = nsa_attention(*inputs, config=PAPER, query_offset=past, document_start=start)
        torch.manual_seed(0)
        return out, *torch.autograd.grad(out, inputs, torch.randn_like(out))

    with monkeypatch.context() as patched:
        patched.setattr(attention, "is_fused", lambda *_: False)
        want = step()
    for _ in range(3):
        for x, y in zip(step(), want, strict=True):
            assert (x.double() - y.double()).norm() <= 2**-6 * y.double().norm()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    assert "nsa_flex::core_forward" in {event.name for event in trace.events()}


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("group", [4, 16])
def test_halves_have_the_gradients_of_the_whole(group: int) -> None:
    """Long enough for cuDNN; keys' gradients add up."""
    case = Case(18432, 0, 18432, PAPER, 1, 2 * group, 2, 128, 128)
    inputs = [x.requires_grad_() for x in case.inputs(torch.bfloat16, "cuda")]
    query, key, value, compressed_key, compressed_value, gates = inputs
    torch.manual_seed(0)
    grad = torch.randn_like(query)
    want = nsa_attention(*inputs, config=PAPER)
    wanted = torch.autograd.grad(want, inputs, grad)
    parts = []
    for half in (slice(0, 9216), slice(9216, 18432)):
        parts.append(
            nsa_attention(
                *(query[:, :, half], key, value, compressed_key, compressed_value),
                gates[:, :, half],
                config=PAPER,
                query_offset=half.start,
            )
        )
    got = torch.cat(parts, 2)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        found = torch.autograd.grad(got, inputs, grad)
    assert "compressed_past_bwd_kernel" in {event.name for event in trace.events()}
    for x, y in zip((got, *found), (want, *wanted), strict=True):
        assert (x.double() - y.double()).norm() <= 2**-6 * y.double().norm()


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize(
    ("group", "dim", "config"),
    [
        (1, 128, PAPER),
        (16, 128, PAPER),
        (4, 128, replace(PAPER, num_initial_blocks=0, window_size=200)),
        (16, 64, PAPER),
        (6, 96, PAPER),
    ],
    ids=["G1", "G16", "G4, no initial block", "D64", "G6-D96"],
)
def test_the_kernel_for_hopper_is_its_twin(
    group: int, dim: int, config: NSAConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By rows: a wrong one in a thousand would not show in a norm."""
    case, inputs = on_cuda(group, dim, 771, 1801, 2700, torch.bfloat16)
    case = replace(case, config=config)
    inputs = case.poisoned(inputs)
    with torch.no_grad():
        got = attend(case, inputs)
        monkeypatch.setattr(epilogue, "_sm90_unsupported_reason", lambda *_: "the twin is wanted")
        plans.forget_plans()
        want = attend(case, inputs)
    assert got.blocks is not None
    assert torch.equal(got.blocks, want.blocks)
    error = (got.out.float() - want.out.float()).norm(dim=-1)
    assert (error <= 2**-6 * want.out.float().norm(dim=-1) + 1e-3).all()
    torch.testing.assert_close(got.sliding_lse, want.sliding_lse, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(got.selected_lse, want.selected_lse, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.usefixtures("forget_plans")
@pytest.mark.parametrize("group", [4, 16])
def test_chunks_are_the_whole(group: int) -> None:
    """A prefill in chunks of odd lengths, blocks as the whole chose them."""
    _, inputs = on_cuda(group, 128, 3000, 0, 3000, torch.bfloat16)
    q, k, v, ck, cv, gates = inputs
    with torch.no_grad():
        want = nsa_attention(*inputs, config=PAPER)
        start = 0
        for size in (1, 700, 64, 1000, 999, 236):
            part = slice(start, start + size)
            out = nsa_attention(
                *(q[:, :, part], k, v, ck, cv, gates[:, :, part]),
                config=PAPER,
                query_offset=start,
                backend="triton",
            )
            error = (out.float() - want[:, :, part].float()).norm()
            assert error < 2**-6 * want[:, :, part].float().norm()
            start += size
