"""Range attention against the float64 oracle: documents, offsets, windows, empty ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.interpreter import (
    DEVICE,
    INTERPRETED,
    LOW_PRECISION,
    interpreted,
    kernels,
    only_outside,
)

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.common.tiles import tile_width
from nsa_flex.fallback_kernels.ranges import config
from nsa_flex.fallback_kernels.ranges.bounds import bounds
from nsa_flex.fallback_kernels.ranges.bwd import seeing_queries
from nsa_flex.fallback_kernels.ranges.interface import ranged_attention

HALF = LOW_PRECISION[-1]
NAMES = ("out", "grad_query", "grad_key", "grad_value")

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call; the ranges are given apart."""

    group: int = 2
    queries: int = 50
    keys: int = 50
    head_dim: int = 16
    value_dim: int = 16
    kv_heads: int = 1
    batch: int = 1
    dtype: torch.dtype = HALF

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


def staircase(case: Case, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random ranges that never go back, some of them empty: (B, Sq) each."""
    generator = np.random.default_rng(seed)
    shape = (case.batch, case.queries)
    first, end = (np.sort(generator.integers(0, case.keys + 1, shape), 1) for _ in range(2))
    return np.minimum(first, end), np.maximum(first, end)


def check(case: Case, first: np.ndarray, end: np.ndarray) -> None:
    """Values, gradients of output and log-sum-exp, by the error rule."""
    heads = case.kv_heads * case.group
    q = leaf((case.batch, heads, case.queries, case.head_dim), case.dtype, DEVICE)
    k = leaf((case.batch, case.kv_heads, case.keys, case.head_dim), case.dtype, DEVICE)
    v = leaf((case.batch, case.kv_heads, case.keys, case.value_dim), case.dtype, DEVICE)
    grad_out = torch.randn(*q.shape[:3], case.value_dim).to(q)
    ranges = (torch.from_numpy(x.astype(np.int32)).to(DEVICE) for x in (first, end))
    out, lse = ranged_attention(q, k, v, *ranges, scale=case.scale)
    again = torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)
    got = [out, *torch.autograd.grad(out, (q, k, v), grad_out)]
    for a, b in zip(again, got[1:], strict=True):
        assert torch.equal(a, b)  # nothing races: equal inputs give equal bits

    key = np.arange(case.keys)
    mask = ((key >= first[..., None]) & (key < end[..., None]))[:, None]  # [B, 1, Sq, Sk]
    arrays = [to_float64(x) for x in (q, k, v)]
    want_out, want_lse, _ = oracle.branch(*arrays, mask, case.scale)
    upstream = to_float64(grad_out)
    want = [want_out, *oracle.branch_backward(*arrays, mask, case.scale, upstream)]
    plain_out = eager_attention(q, k, v, torch.from_numpy(mask).to(DEVICE), case.scale)
    plain = [plain_out, *torch.autograd.grad(plain_out, (q, k, v), grad_out)]
    for name, ours, exact, theirs in zip(NAMES, got, want, plain, strict=True):
        least = case.scale * np.sqrt(exact.size) if name in NAMES[1:3] else 0.0
        assert_close(name, ours, exact, theirs, case.dtype, least=least)
    np.testing.assert_allclose(to_float64(lse), want_lse, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.kept(lambda group: group in (1, 3, 16))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 8, 16, 24])
def test_groups(group: int) -> None:
    case = Case(group=group, queries=40, keys=70)
    check(case, *staircase(case, group))


@kernels
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 200), (200, 1), (129, 257), (64, 128)])
def test_lengths(queries: int, keys: int) -> None:
    case = Case(queries=queries, keys=keys, kv_heads=2)
    check(case, *staircase(case))


@kernels
@pytest.mark.parametrize("dtype", [*LOW_PRECISION, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(16, 16), (64, 64), (80, 80), (96, 40), (192, 128), (8, 24)]
)
def test_head_dims_and_dtypes(head_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    case = Case(head_dim=head_dim, value_dim=value_dim, dtype=dtype, batch=2)
    check(case, *staircase(case))


@kernels
def test_batch_rows_have_ranges_of_their_own_or_share_them() -> None:
    case = Case(batch=3, kv_heads=2)
    check(case, *staircase(case))
    check(case, *(x[:1] for x in staircase(case)))


@kernels
def test_empty_ranges_give_zero_and_minus_infinity() -> None:
    case = Case(queries=300, keys=20)
    nowhere = np.full((1, 300), 7)
    q = leaf((1, 2, 300, 16), HALF, DEVICE)
    k, v = (leaf((1, 1, 20, 16), HALF, DEVICE) for _ in range(2))
    bound = torch.from_numpy(nowhere.astype(np.int32)).to(DEVICE)
    out, lse = ranged_attention(q, k, v, bound, bound, scale=case.scale)
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert (gradient == 0).all()
    check(case, nowhere, nowhere)


@kernels
def test_what_no_range_holds_may_be_large() -> None:
    q, k, v = (leaf((1, 1, 64, 16), HALF, DEVICE) for _ in range(3))
    first = torch.arange(64, dtype=torch.int32, device=DEVICE)[None] // 32 * 32
    end = (first + 16).clamp(max=64)  # nobody sees keys 16 ... 31 and 48 ... 63
    hidden = torch.arange(64, device=DEVICE) % 32 >= 16

    def run(key: Tensor, value: Tensor) -> list[Tensor]:
        out, lse = ranged_attention(q, key, value, first, end, scale=0.25)
        return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (q, key, value))]

    large = torch.finfo(HALF).max
    key, value = (
        x.detach().clone().masked_fill(hidden[:, None], large).requires_grad_() for x in (k, v)
    )
    for plain, found in zip(run(k, v), run(key, value), strict=True):
        assert torch.equal(plain, found)


@kernels
def test_gradients_of_the_log_sum_exp() -> None:
    q, k, v = (leaf((1, 2, 40, 16), torch.float32, DEVICE) for _ in range(3))
    end = torch.arange(1, 41, dtype=torch.int32, device=DEVICE)[None]
    first = (end - 9).clamp(min=0)
    _, lse = ranged_attention(q, k, v, first, end, scale=0.25)
    found = torch.autograd.grad(lse.sin().sum(), (q, k))
    key = torch.arange(40, device=DEVICE)
    mask = (key >= first[0, :, None]) & (key < end[0, :, None])
    logits = (0.25 * q.double() @ k.double().mT).masked_fill(~mask, float("-inf"))
    wanted = torch.autograd.grad(logits.logsumexp(-1).sin().sum(), (q, k))
    for ours, exact in zip(found, wanted, strict=True):
        assert oracle.relative_error(to_float64(ours), to_float64(exact)) < 1e-5


@kernels
def test_strides_are_free() -> None:
    tensors = [leaf((2, 3, 16, 40), HALF, DEVICE).transpose(2, 3) for _ in range(3)]
    end = torch.arange(1, 41, dtype=torch.int32, device=DEVICE)[None]
    found = ranged_attention(*tensors, end - 1, end, scale=1.0)
    plain = ranged_attention(*(x.contiguous() for x in tensors), end - 1, end, scale=1.0)
    assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@kernels
@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_float32_tiles_fit_registers(dim: int) -> None:
    """Sums of more than 16 numbers a thread made ptxas spill, for up to 47 s a kernel."""
    q = torch.empty(1, 8, 4096, dim, device=DEVICE)
    plan = config.RangesPlan.of(q, q, q)
    for tiles, rows in (
        *((plan.fwd, plan.fwd.block_m), (plan.bwd_dq, plan.bwd_dq.block_m)),
        (plan.bwd_dkdv, plan.bwd_dkdv.block_n // 2),  # of dK and of dV
    ):
        assert rows * tile_width(dim) <= 16 * 32 * tiles.warps


@kernels
@pytest.mark.parametrize(("splits", "query_splits"), [(1, 1), (4, 1), (4, 8)])
def test_query_heads_of_a_group_together_and_apart(
    splits: int, query_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the queries of a head in parts, some of which are empty."""
    monkeypatch.setattr(config, "MIN_CTAS", 1 if splits == 1 else 2**20)
    monkeypatch.setattr(config, "LEAST_QUERIES", 50 // query_splits)
    config._plan.cache_clear()
    case = Case(group=4, kv_heads=2)
    q = torch.empty(1, 8, 50, 16, dtype=HALF, device=DEVICE)
    k = torch.empty(1, 2, 50, 16, dtype=HALF, device=DEVICE)
    plan = config.RangesPlan.of(q, k, k)
    assert (plan.head_splits, plan.query_splits) == (splits, query_splits)
    check(case, *staircase(case))
    config._plan.cache_clear()


@kernels
@settings(max_examples=6 if INTERPRETED else 40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    queries=st.integers(1, 150),
    keys=st.integers(1, 150),
    batch=st.integers(1, 2),
)
def test_any_ranges_that_do_not_go_back(seed: int, queries: int, keys: int, batch: int) -> None:
    # In float32: what may go wrong here is which keys are seen, and that shows there best.
    case = Case(queries=queries, keys=keys, batch=batch, dtype=torch.float32)
    check(case, *staircase(case, seed))


@kernels
@pytest.mark.parametrize("offset", [0, 5, "a row"])
@pytest.mark.parametrize("packed", [False, True])
def test_bounds_are_those_of_the_definition(offset: int | str, packed: bool) -> None:
    """Of compressed keys and of the window, on every token of documents and behind a past."""
    batch, tokens, block, stride, window = 2, 1030, 8, 4, 20
    past = torch.tensor([0, 64]) if offset == "a row" else torch.full((batch,), offset)
    position = past[:, None] + torch.arange(tokens)
    start = position // 112 * 112 if packed else torch.zeros_like(position)
    num_blocks = (int(position.max()) + 1 - block) // stride + 1
    document = start.int().to(DEVICE) if packed else None
    offsets = past.to(DEVICE) if offset == "a row" else None
    places = (tokens, 0 if offset == "a row" else offset, offsets, document)
    query = torch.empty(batch, 1, tokens, 16, device=DEVICE)
    for sizes in ([num_blocks, block, stride], [window]):
        first, end = (x.expand(batch, -1).cpu() for x in bounds(query, *places, sizes))
        if len(sizes) == 1:
            key_first = key_last = torch.arange(int(position.max()) + 1)
            behind = position[..., None] - window
        else:
            key_first = torch.arange(num_blocks) * stride
            key_last = key_first + block - 1
            behind = torch.full_like(position, -1)[..., None]
        seen = (key_first >= start[..., None]) & (key_last <= position[..., None])
        seen &= key_first > behind
        key = torch.arange(seen.shape[2])
        assert torch.equal(seen, (key >= first[..., None]) & (key < end[..., None]))
        assert (first.diff() >= 0).all()
        assert (end.diff() >= 0).all()


def test_queries_that_see_a_tile_of_keys() -> None:
    case = Case(queries=90, keys=100, batch=2)
    first, end = staircase(case)
    ranges = [torch.from_numpy(x.astype(np.int32)) for x in (first, end)]
    found = seeing_queries(*ranges, 100, 32).numpy()
    for row in range(2):
        for tile in range(4):
            keys = np.arange(32 * tile, min(32 * tile + 32, 100))
            sees = ((keys >= first[row, :, None]) & (keys < end[row, :, None])).any(1)  # [Sq]
            begin, behind = found[row, :, tile]
            wanted = np.flatnonzero(sees)
            assert not len(wanted) or (begin <= wanted[0] and wanted[-1] < behind)
            assert behind - begin <= len(wanted) + (first == end)[row].sum()


@only_outside
def test_other_devices_are_refused() -> None:
    q = torch.zeros(1, 2, 8, 16, device="meta")
    bound = torch.zeros(1, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match="the Triton kernels need CUDA tensors, got meta"):
        ranged_attention(q, q, q, bound, bound, scale=1.0)


@kernels
def test_bad_bounds_are_refused() -> None:
    q = torch.zeros(2, 2, 8, 16, dtype=HALF, device=DEVICE)
    bound = torch.zeros(2, 8, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=r"end_key is torch.int64 \(2, 8\); it must be int32"):
        ranged_attention(q, q, q, bound, bound.long(), scale=1.0)
    with pytest.raises(ValueError, match=r"first_key is torch.int32 \(2, 7\)"):
        ranged_attention(q, q, q, bound[:, :7], bound, scale=1.0)
    with pytest.raises(ValueError, match="scale is 0"):
        ranged_attention(q, q, q, bound, bound, scale=0)


@kernels
def test_operators_pass_opcheck() -> None:
    q, k, v = (leaf((1, 2, 20, 16), HALF, DEVICE) for _ in range(3))
    end = torch.arange(1, 21, dtype=torch.int32, device=DEVICE)[None]
    torch.library.opcheck(torch.ops.nsa_flex.ranges_forward, (q, k, v, end - 1, end, 0.5))
