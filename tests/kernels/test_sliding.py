"""The sliding branch on Triton kernels against the float64 oracle, and the tiles of its window."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa_flex.backends import triton as backend
from nsa_flex.backends.branch import Branch
from nsa_flex.config import NSAConfig
from reference import oracle
from reference.accuracy import assert_close, eager_attention, leaf, to_float64
from reference.interpreter import DEVICE, LOW_PRECISION, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan

HALF = LOW_PRECISION[-1]
NAMES = ("out", "grad_query", "grad_key", "grad_value")

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call; see `inputs`."""

    group: int = 4
    length: int = 50
    window: int = 20
    kv_heads: int = 1
    batch: int = 1
    block: int = 64

    @property
    def config(self) -> NSAConfig:
        sizes = NSAConfig(compress_block_size=8, compress_stride=8, select_block_size=self.block)
        return replace(sizes, window_size=self.window)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value with memory (B, S, H, D), ready for gradients."""
        heads = (self.kv_heads * self.group, self.kv_heads, self.kv_heads)
        q, k, v = (leaf((self.batch, each, self.length, 16), HALF, DEVICE) for each in heads)
        return q, k, v


def attend(
    case: Case, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return backend.sliding(Branch(q, k, v, case.config, 0.25, document_start=starts))


def check(case: Case, starts: np.ndarray | None = None) -> None:
    """Values, gradients and the log-sum-exp against the oracle."""
    q, k, v = case.inputs()
    grad_out = torch.randn_like(q)
    given = None if starts is None else torch.from_numpy(starts).to(DEVICE)
    out, lse = attend(case, q, k, v, given)
    got = [out, *torch.autograd.grad(out, (q, k, v), grad_out, retain_graph=True)]
    again = torch.autograd.grad(out, (q, k, v), grad_out)
    assert all(torch.equal(a, b) for a, b in zip(again, got[1:], strict=True))
    mask = oracle.sliding_mask(case.length, case.length, case.config, 0, starts)
    arrays = [to_float64(x) for x in (q, k, v)]
    want, want_lse, _ = oracle.branch(*arrays, mask, 0.25)
    exact = [want, *oracle.branch_backward(*arrays, mask, 0.25, to_float64(grad_out))]
    plain = eager_attention(q, k, v, torch.from_numpy(mask).to(q.device), 0.25)
    theirs = [plain, *torch.autograd.grad(plain, (q, k, v), grad_out)]
    # A gradient of q or k is a difference of terms of dO's size: 0 where a query sees one key.
    for name, ours, right, eager in zip(NAMES, got, exact, theirs, strict=True):
        least = 0.25 * np.sqrt(right.size) if name in NAMES[1:3] else 0.0
        assert_close(name, ours, right, eager, HALF, least=least)
    # The logits are float32 sums of D products of numbers around 1, times 1 / sqrt(D).
    np.testing.assert_allclose(to_float64(lse), want_lse, rtol=1e-5, atol=1e-5)


@kernels
@pytest.mark.kept(lambda group, size: (group, size) in ((3, 8), (1, 64)))
@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("size", [8, 64])
def test_documents(group: int, size: int) -> None:
    """Packed documents are computed as if alone, from values to gradients, lse included."""
    case = Case(group=group, length=300, window=90, kv_heads=2, batch=2, block=size)
    last = 300 // size
    edges = np.array([[1, 2, last // 2, last], [0, 1, 1, last]]) * size  # empty, short, long ones
    token = np.arange(case.length)
    starts = [np.r_[0, row][np.searchsorted(row, token, side="right")] for row in edges]
    check(case, np.stack(starts).astype(np.int32))


@kernels
@pytest.mark.kept(lambda window: window in (1, 17, 64, 89, 10**12))
@pytest.mark.parametrize("window", [1, 16, 17, 64, 65, 89, 90, 10**12])
def test_windows(window: int) -> None:
    check(Case(group=1, length=90, window=window))


@kernels
@pytest.mark.parametrize("length", [1, 2, 16, 64, 65])
def test_lengths(length: int) -> None:
    # Few rows err by chance, ours and eager's alike: a batch makes enough of them to compare.
    check(Case(length=length, window=30, group=2, batch=max(1, 64 // length)))


@pytest.mark.parametrize("kilobytes", [64, 99, 163, 227])
@pytest.mark.parametrize("dim", [32, 128, 256])
def test_tiles_fit_the_device(kilobytes: int, dim: int) -> None:
    """What stays and one of what streams past, of the smallest tiles at least."""
    plan = SlidingPlan(1, 4, 1, 4096, dim, dim, 2, kilobytes << 10)
    for tiles in (plan.forward_tiles(), plan.dq_tiles(), plan.dkdv_tiles()):
        held, streamed = sorted((tiles.block_m, tiles.block_n))
        assert (held + tiles.stages * streamed) * 2 * plan.row_width // 2 <= kilobytes << 10
        assert min(tiles.block_m, tiles.block_n) >= 16


def test_float32_tiles_of_wide_heads_fit_99_kilobytes() -> None:
    """With the weights between them: as compiled they ask for so much."""
    tiles = SlidingPlan(1, 4, 1, 4096, 256, 256, 4, 99 << 10).dkdv_tiles()
    numbers = (tiles.block_n + tiles.stages * tiles.block_m) * 512 + tiles.block_m * tiles.block_n
    assert 4 * numbers + 2048 <= 99 << 10
    assert SlidingPlan(1, 4, 1, 4096, 256, 256, 4).dkdv_tiles().block_n == 32


@kernels
def test_later_tokens_change_nothing() -> None:
    case = Case()
    q, k, v = (x.detach() for x in case.inputs())
    before, _ = attend(case, q, k, v)
    for x in (q, k, v):
        x[:, :, 37:] = torch.randn_like(x[:, :, 37:])
    after, _ = attend(case, q, k, v)
    assert torch.equal(before[:, :, :37], after[:, :, :37])
    assert not torch.equal(before[:, :, 37:], after[:, :, 37:])


@kernels
def test_another_document_may_be_large() -> None:
    """Nothing of it reaches a document that shares its tiles, whatever becomes of its own rows."""
    case = Case(group=2, length=64, window=64, block=32)
    q, k, v = case.inputs()
    start = torch.arange(64, dtype=torch.int32, device=DEVICE)[None] // 32 * 32

    def run(key: Tensor, value: Tensor) -> list[Tensor]:
        rows = [x[:, :, 32:] for x in attend(case, q, key, value, start)]
        gradients = torch.autograd.grad(rows[0].sum() + rows[1].sum(), (q, key, value))
        return [*rows, *(x[:, :, 32:] for x in gradients)]

    first = (torch.arange(64, device=DEVICE) < 32)[:, None]
    large = torch.finfo(HALF).max
    key, value = (x.detach().clone().masked_fill(first, large).requires_grad_() for x in (k, v))
    for plain, found in zip(run(k, v), run(key, value), strict=True):
        assert torch.equal(plain, found)
