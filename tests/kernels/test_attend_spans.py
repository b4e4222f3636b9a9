"""What a rank attends of its part of a cache by kernels, against PyTorch operations in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.decoding import Stored
from nsa_flex.parallel.decoding import OperationParts
from nsa_flex.parallel.parts import LN2, Part
from reference.interpreter import DEVICE, INTERPRETED, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex.parallel.decode_kernels import KernelParts, unsupported_reason

SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
WIDE = NSAConfig(16, 8, 16, 5, window_size=40)

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """A part `rank` of `tokens` tokens; positions of the queries in whole rows."""

    config: NSAConfig = SMALL
    group: int = 4
    rank: int = 1
    tokens: int = 256  # a whole tile of compressed keys
    positions: tuple[int, ...] = (300, 511, 17, 256)
    dims: tuple[int, int] = (16, 16)
    num_sets: int = 1
    dtype: torch.dtype = torch.float32


CASES = {
    "middle": Case(),
    "first part": Case(rank=0, positions=(5, 60, 255, 700, 258), group=3),
    "no whole tile": Case(tokens=176, positions=(180, 360, 353, 170), group=1, config=WIDE),
    "G 16, keys of each branch": Case(group=16, num_sets=3, positions=(400,), dims=(24, 16)),
    "no window": Case(config=replace(SMALL, branches=("selected",))),
    "blocks in chunks": Case(tokens=4096, positions=(5000,), group=2),
    "many rows": Case(positions=(300, 400, 500) * 14, group=2),
}


def problem(case: Case, dtype: torch.dtype) -> tuple[Tensor, Stored, Part]:
    torch.manual_seed(7)
    config, rows = case.config, len(case.positions)

    def tensor(heads: int, tokens: int, dim: int) -> Tensor:
        x = torch.randn(rows, heads, tokens, dim).to(case.dtype)
        return x.to(DEVICE, dtype)

    slots, blocks = case.tokens + config.select_block_size, case.tokens // config.compress_stride
    heads, (dim, value_dim) = 2 * case.num_sets, case.dims
    compressed = [tensor(2, blocks, dim), tensor(2, blocks, value_dim)]
    if not config.has("compressed"):
        compressed[1] = compressed[1][:, :, :1].clone()
    stored = Stored(
        *(tensor(heads, slots, dim), tensor(heads, slots, value_dim), *compressed),
        torch.tensor(case.positions, dtype=torch.int32, device=DEVICE),
    )
    query = tensor(2 * case.group, 1, dim)
    part = Part(case.rank * case.tokens, case.tokens, 3 * case.tokens)
    return query, stored, part


@kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_parts(case: Case) -> None:
    config = case.config
    query, stored, part = problem(case, case.dtype)
    assert unsupported_reason(query, stored, config) in (
        None,
        "the decode kernels need a CUDA device, got cpu",
    )
    found = KernelParts(query, stored, part, config, 0.3)
    exact = OperationParts(*problem(case, torch.float64), config, 0.3)
    (out, lse), tail = found.compressed()
    (want_out, want_lse), want_tail = exact.compressed()
    if config.has("compressed"):
        close(out, want_out)
    close(lse, want_lse)
    close(tail, want_tail)

    # As if other ranks had seen as much, and the one before something that overlaps.
    whole = (want_lse + 0.7).masked_fill(want_lse == float("-inf"), 1.0)
    edge = (torch.rand_like(tail) * 0.1).log2() + whole.float()[..., None] / LN2
    ranks = [
        x.sort(-1, descending=True).values
        for x in (found.candidates(whole.float(), edge), exact.candidates(whole, edge.double()))
    ]
    size = config.select_block_size
    total = part.total // size
    last = stored.lengths[:, None, None, None] // size
    blocks, want = (torch.where(x >= 0, total - 1 - (x & 0xFFFFFFFF), total) for x in ranks)
    blocks, want = (torch.where(x <= last, x, total) for x in (blocks, want))  # none behind
    assert torch.equal(blocks, want)
    bits = (torch.where(blocks < total, x >> 32, 0).int() for x in ranks)
    got, expected = (x.view(torch.float32) for x in bits)
    close(got, expected)

    # Every third is of another part.
    blocks[..., ::3] = (part.base + part.tokens) // size % total
    blocks = blocks.int()
    got, expected = found.local(blocks), exact.local(blocks)
    assert len(got) == 1 + config.has("sliding")
    for ours, theirs in zip(got, expected, strict=True):
        close(ours.out, theirs.out)
        close(ours.lse, theirs.lse)


def close(found: Tensor, expected: Tensor) -> None:
    """Sums of hundreds of float32 terms of size 1."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-5, atol=2e-5)


@kernels
def test_refused_by_name() -> None:
    query, stored, _ = problem(Case(), torch.float32)
    two = query.expand(-1, -1, 2, -1)
    assert unsupported_reason(two, stored, SMALL) == (
        "2 new tokens a row; the kernels of a sharded cache take one"
    )
    near = NSAConfig(8, 8, 16, 4, window_size=20)
    short = stored._replace(key=stored.key[:, :, :80])
    assert unsupported_reason(query, short, SMALL) == (
        "a part has 4 blocks; the kernels rank at least 5"
    )
    assert "other than two strides" in str(unsupported_reason(query, stored, near))
    assert INTERPRETED or unsupported_reason(query, stored, SMALL) is None
    window = replace(SMALL, branches=("compressed", "sliding"))
    assert unsupported_reason(query, stored, window) == "there is no selected branch"
