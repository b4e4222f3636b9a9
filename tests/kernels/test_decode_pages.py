"""The decode kernels over pages against the float64 oracle."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from nsa_flex.compression import what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.paging import LayerPages, rows_per_page
from reference import oracle
from reference.accuracy import to_float64
from reference.interpreter import DEVICE, INTERPRETED, LOW_PRECISION, interpreted, kernels
from reference.launches import SUBSETS, decode_kernels_of, launched

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.decode import config as decode_plan
from nsa_flex.fallback_kernels.decode import pages as decode_pages

SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
DENSE = NSAConfig(16, 4, 16, 5, window_size=40)  # each token in four compressed blocks
ALIKE = NSAConfig(16, 16, 16, 4, window_size=1)  # l = d = l'
PUBLISHED = NSAConfig()
# Products of float32 that the interpreter and TF32-free kernels round once.
FLOAT32_LIMIT = 64 * torch.finfo(torch.float32).eps

test_kernels_under_the_interpreter = interpreted(__file__)


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other."""
    if INTERPRETED:
        monkeypatch.setattr(decode_plan, "TARGET_CTAS", 2)
        monkeypatch.setattr(decode_plan, "MAX_CTAS", 3)


@dataclass(frozen=True)
class Case:
    """Requests of so many tokens, the query's own the last of each."""

    config: NSAConfig = SMALL
    lengths: tuple[int, ...] = (150, 3, 61)
    page_size: int = 16
    kv_heads: int = 2
    group: int = 2
    dim: int = 16
    dtype: torch.dtype = torch.float32


def error(case: Case) -> float:
    """Relative, of all requests, against the oracle on the same rounded numbers."""
    random.seed(torch.initial_seed())
    config, heads = case.config, case.kv_heads * case.group
    needed = [-(-length // case.page_size) for length in case.lengths]
    order = random.sample(range(sum(needed) + 3), sum(needed) + 3)
    rows = rows_per_page(case.page_size, config)
    memory = torch.full((len(order) * 2 * rows, case.kv_heads, case.dim), float("nan"))
    memory = memory.to(DEVICE, case.dtype)  # what no request wrote must not be read
    pages = LayerPages.carve(memory, rows, 2 * rows, case.page_size, config)
    width = max(needed)
    table = torch.full((len(needed), width), order[-1], dtype=torch.int64)
    expected, queries, gates = [], [], []
    for row, (length, count) in enumerate(zip(case.lengths, needed, strict=True)):
        table[row, :count] = torch.tensor([order.pop(0) for _ in range(count)])
        q, g = torch.randn(heads, 1, case.dim), torch.rand(heads, 1, len(config.branches))
        k, v = torch.randn(2, case.kv_heads, length, case.dim)
        q, g, k, v = (x.to(DEVICE, case.dtype)[None] for x in (q, g, k, v))
        token = torch.arange(length, device=DEVICE)
        slots = pages.slots(table[row : row + 1].to(DEVICE), token[None])
        flat = type(slots)(slots.page[0], slots.offset[0])
        pages.store(k[0].transpose(0, 1), v[0].transpose(0, 1), flat)
        ck, cv = (
            torch.from_numpy(oracle.compress_mean(to_float64(x), config)).to(DEVICE, case.dtype)
            for x in (k, v)
        )
        last = slice(config.compress_block_size - 1, None, config.compress_stride)
        ends = type(slots)(flat.page[last], flat.offset[last])
        rows = (None if x is None else x[0].transpose(0, 1) for x in what_is_read(config, ck, cv))
        if config.compresses:
            pages.store_compressed(*rows, ends)
        inputs = (to_float64(x) for x in (q, k, v, ck, cv))
        every = oracle.every_gate(to_float64(g), config.branches)
        expected.append(oracle.forward(*inputs, every, config).out)
        queries.append(q)
        gates.append(g)
    found = decode_pages.attend(
        torch.cat(queries),
        *pages,
        torch.cat(gates),
        table.to(DEVICE),
        torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) - 1,
        config=config,
        scale=case.dim**-0.5,
    )
    return oracle.relative_error(to_float64(found), np.concatenate(expected))


CASES = {
    "small": Case(),
    "pages of one block": Case(page_size=4, lengths=(37, 70)),
    "pages that cut blocks": Case(page_size=12, lengths=(100, 33)),
    "pages of many blocks": Case(page_size=64),
    "dense": Case(config=DENSE),
    "alike": Case(config=ALIKE),
    "one head a group": Case(group=1, kv_heads=3, lengths=(90,)),
    "no power of two": Case(dim=24, lengths=(90, 20)),
}


@kernels
@pytest.mark.parametrize("name", CASES)
def test_requests_are_each_alone(name: str) -> None:
    assert error(CASES[name]) < FLOAT32_LIMIT


@kernels
@pytest.mark.parametrize("branches", SUBSETS, ids="+".join)
def test_absent_branches_run_no_kernels(branches: Any) -> None:
    with launched() as names:
        assert error(Case(config=replace(SMALL, branches=branches))) < FLOAT32_LIMIT
    assert names == decode_kernels_of(branches, stores=False)


@kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
def test_in_low_precision(dtype: torch.dtype) -> None:
    assert error(Case(dtype=dtype, dim=32)) < 2 * torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_published_sizes(dtype: torch.dtype) -> None:
    lengths = (9000, 1, 31, 32, 600, 4097, 257)
    case = Case(PUBLISHED, lengths, page_size=256, kv_heads=8, group=4, dim=128, dtype=dtype)
    assert error(case) < 2 * torch.finfo(dtype).eps
    assert error(replace(case, page_size=48)) < 2 * torch.finfo(dtype).eps


@kernels
def test_what_does_not_fit_is_refused() -> None:
    pages = LayerPages.carve(
        torch.zeros(100, 1, 16, device=DEVICE), 0, 20, page_size=8, config=SMALL
    )
    query, gates = torch.zeros(1, 2, 1, 16, device=DEVICE), torch.zeros(1, 2, 1, 3, device=DEVICE)
    table = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    positions = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    options = {"config": SMALL, "scale": 1.0}
    with pytest.raises(ValueError, match=r"positions are torch.int64 \(1,\); expected int32"):
        decode_pages.attend(query, *pages, gates, table, positions.long(), **options)
    with pytest.raises(ValueError, match=r"table is torch\.float32"):
        decode_pages.attend(query, *pages, gates, table.float(), positions, **options)
    with pytest.raises(ValueError, match=r"2 compressed rows; 8 tokens of stride 16 have 0.5"):
        decode_pages.attend(query, *pages, gates, table, positions, config=ALIKE, scale=1.0)
