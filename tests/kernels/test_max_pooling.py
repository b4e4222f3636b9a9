"""The fused selection by max-pooled scores, as InfLLM-V2's, against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from reference import infllm_v2, oracle
from reference.interpreter import DEVICE, LOW_PRECISION, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex import NSAConfig, topk_blocks
from nsa_flex.fallback_kernels.topk import interface as topk
from nsa_flex.selection import coarse_keys

SMALL = NSAConfig(8, 4, 16, 5, 1, 3, selection="max_pool")
APART = NSAConfig(4, 4, 16, 4, 1, 2, selection="max_pool")
WIDE = NSAConfig(16, 4, 16, 4, 1, 2, selection="max_pool")  # each token in four windows
BARE = NSAConfig(8, 4, 16, 3, 0, 1, selection="max_pool")  # the kernels mask keys
PUBLISHED = NSAConfig(32, 16, 64, 96, 1, 33, selection="max_pool")
MANY = NSAConfig(4, 4, 4, 128, 1, 2, selection="max_pool")

test_kernels_under_the_interpreter = interpreted(__file__)


@dataclass(frozen=True)
class Case:
    """Sizes of one call: queries are the last of `keys` tokens."""

    config: NSAConfig = SMALL
    group: int = 2
    queries: int = 6
    keys: int = 170
    dim: int = 16
    dtype: torch.dtype = torch.float32
    coarse: int = 4
    document: int | None = None  # tokens of each

    @property
    def past(self) -> int:
        return self.keys - self.queries

    @property
    def starts(self) -> np.ndarray | None:
        if self.document is None:
            return None
        return (np.arange(self.past, self.keys) // self.document * self.document)[None]


def exact_scores(case: Case, query: Tensor, key: Tensor, coarse_key: Tensor) -> np.ndarray:
    """Of all blocks, (Hkv, Sq, blocks): windows that a query does not see count 0."""
    config, place = case.config, np.arange(case.past, case.keys)
    first = np.zeros_like(place) if case.starts is None else case.starts[0]
    q, k, c = (x[0].double().cpu().numpy() for x in (query, key, coarse_key))

    def logits(windows: np.ndarray, factor: int) -> np.ndarray:  # (Hkv, G, Sq, windows)
        start = np.arange(windows.shape[1]) * factor * config.compress_stride
        seen = start + factor * config.compress_block_size - 1 <= place[:, None]
        seen &= start >= first[:, None]
        grouped = q.reshape(len(k), -1, *q.shape[1:])
        products = np.einsum("hgsd,hnd->hgsn", grouped, windows) * case.dim**-0.5
        return np.where(seen, products, -np.inf)

    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.logaddexp.reduce(logits(c, case.coarse), -1, keepdims=True)
        p = np.exp(logits(k, 1) - lse)
    p = np.where(np.isinf(lse), 0, p).sum(1)
    sizes = infllm_v2.Sizes(
        kernel_size=config.compress_block_size,
        kernel_stride=config.compress_stride,
        block_size=config.select_block_size,
    )
    return np.maximum(infllm_v2.max_pooled(p, config.num_select_blocks(case.keys), sizes), 0)


def inputs(case: Case) -> tuple[Tensor, Tensor]:
    """Query and compressed keys of two KV heads, memory (B, S, H, D)."""
    windows = max(1, case.config.num_compressed_blocks(case.keys))
    sizes = ((case.queries, 2 * case.group), (windows, 2))
    query, key = (torch.randn(1, *size, case.dim, device=DEVICE) for size in sizes)
    return query.to(case.dtype).transpose(1, 2), key.to(case.dtype).transpose(1, 2)


def choice(case: Case, query: Tensor, key: Tensor, coarse_key: Tensor | None) -> Tensor:
    starts = case.starts
    return topk.select_topk_blocks(
        *(query, key, None),
        torch.arange(case.past, case.keys, device=DEVICE)[None],
        None if starts is None else torch.from_numpy(starts).int().to(DEVICE),
        config=case.config,
        scale=case.dim**-0.5,
        num_blocks=case.config.num_select_blocks(case.keys),
        coarse_key=coarse_key,
        coarse=case.coarse,
    )


def check(case: Case) -> None:
    """The best blocks, but for scores that agree to float32 rounding: see `test_topk`."""
    query, key = inputs(case)
    coarse_key = coarse_keys(key, case.config, case.coarse) if case.coarse > 1 else None
    found = choice(case, query, key, coarse_key)
    scores = exact_scores(case, query, key, key if coarse_key is None else coarse_key)[None]
    best = replace(case.config, selection="top_k")
    excess = oracle.choice_excess(found.cpu().numpy(), scores, best, case.past, case.starts)
    # Relative errors of p are errors of logits, of some units here and of both products.
    assert excess <= 64 * torch.finfo(torch.float32).eps * case.group


@kernels
@pytest.mark.parametrize("coarse", [1, 4])
@pytest.mark.parametrize(
    "config", [SMALL, APART, WIDE, BARE], ids=["small", "apart", "wide", "bare"]
)
def test_sizes(config: NSAConfig, coarse: int) -> None:
    check(Case(config, coarse=min(coarse, config.num_selected_blocks - 1)))


@kernels
@pytest.mark.parametrize("group", [1, 3, 16])
def test_groups(group: int) -> None:
    check(Case(group=group, dtype=LOW_PRECISION[0], dim=64))


@kernels
def test_published_sizes() -> None:
    check(Case(PUBLISHED, group=1, queries=3, keys=110 * 64 + 5, dtype=LOW_PRECISION[0]))


@kernels
@pytest.mark.parametrize("blocks", [140, 1100])
def test_many_free_blocks(blocks: int) -> None:
    """More than lanes that share a row, whose scores are searched whole or by parts."""
    check(Case(MANY, group=1, queries=2, keys=4 * blocks, coarse=1))


@kernels
@pytest.mark.parametrize("coarse", [1, 4])
def test_documents(coarse: int) -> None:
    check(Case(queries=100, keys=300, document=144, coarse=coarse))


@kernels
def test_sums_by_the_coarse_log_sum_exp() -> None:
    """Scores that are no probabilities: with every window alike, the best are the first."""
    case = Case(replace(SMALL, selection="top_k"))
    query, key = inputs(case)
    key.zero_()  # whose products are exactly alike
    found = choice(case, query, key, coarse_keys(key, case.config, 4))
    assert found[0, :, 0].tolist() == [[0, 1, 8, 9, 10]] * 2  # block 0 lacks what comes before it


@pytest.mark.gpu
def test_topk_blocks_runs_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = topk.select_topk_blocks

    def note(*args: Any, **options: Any) -> Tensor:
        calls.append(options["coarse"])
        return run(*args, **options)

    monkeypatch.setattr(topk, "select_topk_blocks", note)
    query, key = torch.randn(1, 4, 150, 16), torch.randn(1, 2, 150, 16)
    found = topk_blocks(query.to(DEVICE), key.to(DEVICE), config=SMALL, coarse=4)
    assert calls == [4]
    sizes = infllm_v2.Sizes()
    want = infllm_v2.selected_blocks(query[0].double().numpy(), key[0].double().numpy(), sizes)
    assert [[set(row) - {-1} for row in head] for head in found[0].tolist()] == want


@kernels
def test_coarse_windows_that_a_query_may_not_see() -> None:
    query, key = inputs(Case())
    with pytest.raises(ValueError, match="coarse is 6, more than the 5 selected blocks"):
        choice(Case(coarse=6), query, key, coarse_keys(key, SMALL, 6))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 16])
def test_long_sequences(group: int) -> None:
    check(Case(PUBLISHED, group, queries=200, keys=40_000, dim=128, dtype=torch.bfloat16))
