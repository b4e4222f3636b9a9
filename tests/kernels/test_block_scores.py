"""Scores of blocks by sums and maxima: the kernel beside PyTorch, and `topk_blocks` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from reference import infllm_v2 as reference
from reference.interpreter import (
    DEVICE,
    LOW_PRECISION,
    kernels,
    only_outside,
    run_in_the_interpreter,
)

pytest.importorskip("triton")
from nsa_flex import NSAConfig, selection, topk_blocks
from nsa_flex.fallback_kernels.topk import block_scores

DTYPES = [torch.float32, *LOW_PRECISION]
SMALL = NSAConfig(8, 4, 16, 5, 1, 3, selection="max_pool")
SUMS = NSAConfig(8, 4, 16, 5, 1, 3)
PUBLISHED = NSAConfig(32, 16, 64, 96, 1, 33, selection="max_pool")


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


def check(
    config: NSAConfig,
    group: int,
    queries: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    coarse: int,
    starts: list[int] | None = None,
) -> None:
    """Against PyTorch in float64."""
    number = config.num_compressed_blocks(keys)
    query = torch.randn(2, queries, 2 * group, dim).to(dtype).transpose(1, 2)
    key = torch.randn(2, 2, number, dim).to(dtype)
    positions = torch.arange(keys - queries, keys)[None]
    start = None if starts is None else torch.tensor(starts)[None].repeat(2, 1)
    num_blocks = config.num_select_blocks(keys)
    coarse_key = None if coarse == 1 else selection.coarse_keys(key, config, coarse)
    options: tuple[Any, ...] = (config, dim**-0.5, num_blocks, coarse)
    want = selection._scores(
        *(query.double(), key.double(), positions, start, *options),
        None if coarse_key is None else coarse_key.double(),
    )
    moved = [
        None if x is None else x.to(DEVICE) for x in (query, key, positions, start, coarse_key)
    ]
    found = selection._scores_by_kernel(*moved[:4], *options, moved[4])
    # float32 sums of exact products; exp2 of differences of up to some tens.
    torch.testing.assert_close(found.cpu(), want, rtol=2e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coarse", [1, 4])
@pytest.mark.parametrize("config", [SMALL, SUMS], ids=["max", "sum"])
def test_scores(dtype: torch.dtype, coarse: int, config: NSAConfig) -> None:
    check(config, 3, 40, 170, 24, dtype, coarse)


@kernels
@pytest.mark.parametrize("group", [1, 2, 16])
def test_groups(group: int) -> None:
    check(SMALL, group, 20, 300, 16, LOW_PRECISION[0], 4)


@kernels
@pytest.mark.parametrize(
    "config",
    [
        NSAConfig(4, 4, 16, 4, 1, 2, selection="max_pool"),
        NSAConfig(16, 4, 16, 4, 1, 2, selection="max_pool"),
        NSAConfig(16, 4, 16, 4, 1, 2),
        PUBLISHED,
    ],
    ids=["apart", "wide", "wide sums", "published"],
)
def test_sizes(config: NSAConfig) -> None:
    check(config, 2, 9, 700, 64, LOW_PRECISION[0], 1)


@kernels
@pytest.mark.parametrize("coarse", [1, 4])
def test_documents(coarse: int) -> None:
    starts = [0] * 48 + [48] * 16 + [64] * 60
    check(SMALL, 2, 124, 124, 16, torch.float32, coarse, starts)


@kernels
def test_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = block_scores.block_scores
    monkeypatch.setattr(
        block_scores, "block_scores", lambda *args: calls.append(args[0].shape[2]) or run(*args)
    )
    monkeypatch.setattr(selection, "MAX_SCORES", 60 * 2 * 10)
    sizes = reference.Sizes()
    query, key = torch.randn(1, 4, 150, 16), torch.randn(1, 2, 150, 16)
    found = topk_blocks(query.to(DEVICE), key.to(DEVICE), config=SMALL, pooling="max", coarse=4)
    assert calls == [60, 60, 30]
    want = reference.selected_blocks(query[0].double().numpy(), key[0].double().numpy(), sizes)
    chosen = [[set(row) - {-1} for row in head] for head in found[0].tolist()]
    assert chosen == want


@kernels
def test_what_the_kernel_does_not_take() -> None:
    def reason(heads: int, dim: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> str:
        query = torch.empty(batch, heads, 0, dim, dtype=dtype, device=DEVICE)
        found = block_scores.unsupported_reason(query, query[:, :1])
        assert found is not None
        return found

    assert "float64" in reason(1, 16, torch.float64)
    assert "257 is the head dim" in reason(1, 257)
    assert "65 query heads share a KV head" in reason(65, 16)
    assert "65536 KV heads in all batch rows" in reason(1, 16, batch=65536)
