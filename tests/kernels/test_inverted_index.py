"""Running sums of the inverted index: one CTA's or several against PyTorch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from reference.interpreter import DEVICE, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.selected import inverted_index

test_kernels_under_the_interpreter = interpreted(__file__)


class Sizes(NamedTuple):
    """What the running sums take of a plan."""

    phases: int
    num_csr_rows: int


@kernels
@pytest.mark.parametrize("phases", [1, 3, 4, 16])
@pytest.mark.parametrize("rows", [1, 700, 5000])
@pytest.mark.parametrize("one_cta", [True, False])
def test_starts_by_kernels_and_by_pytorch(
    phases: int, rows: int, one_cta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inverted_index, "ONE_CTA_COUNTERS", 1 << 30 if one_cta else 0)
    monkeypatch.setattr(inverted_index, "TOTALS_TILE", 16)  # several, with the most CTAs
    plan: Any = Sizes(phases, rows)
    counts = torch.randint(0, 50, (2 * phases * rows,), dtype=torch.int32, device=DEVICE)
    starts, work_tile_starts = inverted_index._starts_of_counts(plan, counts, 64)
    expected = inverted_index._starts(counts)
    assert torch.equal(starts, expected)
    assert torch.equal(work_tile_starts, inverted_index._work_tile_starts(plan, expected, 64))
