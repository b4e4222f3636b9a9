"""The core at an offset: against the float64 oracle, and against the branches one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from reference import oracle
from reference.accuracy import assert_close, to_float64
from reference.fused_ends import ends_of, watched_epilogue
from reference.interpreter import INTERPRETED, kernels, only_outside, run_in_the_interpreter

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.arch import gluon_unsupported_reason
from nsa_flex.fallback_kernels.fused import fwd_epilogue as epilogue
from nsa_flex.fallback_kernels.fused import operators as core
from nsa_flex.fallback_kernels.fused import route
from nsa_flex.fallback_kernels.fused.operators import CoreResults, core_attention
from nsa_flex.fallback_kernels.launch import plans
from nsa_flex.fallback_kernels.selected import config as selected_plan

PAPER = NSAConfig()
NARROW = NSAConfig(8, 4, 16, 4, window_size=20)  # a window that does not hold the local blocks
WIDE = NSAConfig(8, 4, 16, 5, window_size=37)  # and one that does

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="CUDA has tests of its own below")


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


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
    return core_attention(q, k, v, ck, cv, *(own or (k, v)), gates, **options)


def hold(case: Case, inputs: list[Tensor], results: CoreResults) -> None:
    """Choice, values and log-sum-exps, in float32."""
    arrays, config = [to_float64(x) for x in inputs], case.config
    more: dict[str, Any] = {"scale": 0.3, "offset": case.offset}
    more |= dict(zip(("sliding_key", "sliding_value"), arrays[6:], strict=False))
    assert results.blocks is not None
    blocks = results.blocks.cpu().numpy()
    scores = oracle.forward(*arrays[:6], config, **more).scores
    assert oracle.choice_excess(blocks, scores, config, case.offset) <= 1e-5
    want = oracle.forward(*arrays[:6], config, **more, blocks=blocks)
    assert_close("output", results.out, want.out, None, torch.float32)
    for name in ("compressed", "selected", "sliding"):
        assert_close(name, getattr(results, f"{name}_lse"), want.lse[name], None, torch.float32)


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
    apart = [x.clone().requires_grad_(True) for x in inputs]  # with gradients: one by one
    (want, want_aux), found = ends_of(apart, **options)
    assert found == {"gated_sum_fwd_kernel"}
    with torch.no_grad():
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
