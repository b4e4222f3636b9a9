"""Running sums of the inverted index: one CTA's against PyTorch's."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from reference.interpreter import DEVICE, kernels, only_outside, run_in_the_interpreter

pytest.importorskip("triton")
from nsa_flex.fallback_kernels.selected import inverted_index


@only_outside
def test_kernels_under_the_interpreter(request: pytest.FixtureRequest) -> None:
    """Every test below that does not need a GPU, on the CPU."""
    run_in_the_interpreter(__file__, request.config)


class Sizes(NamedTuple):
    """What the running sums take of a plan."""

    phases: int
    num_csr_rows: int


@kernels
@pytest.mark.parametrize("phases", [1, 3, 4, 16])
@pytest.mark.parametrize("rows", [1, 700, 5000])
def test_starts_by_one_cta_and_by_pytorch(phases: int, rows: int) -> None:
    plan: Any = Sizes(phases, rows)
    counts = torch.randint(0, 50, (2 * phases * rows,), dtype=torch.int32, device=DEVICE)
    starts, work_tile_starts = inverted_index._starts_in_one_cta(plan, counts, 64)
    expected = inverted_index._starts(counts)
    assert torch.equal(starts, expected)
    assert torch.equal(work_tile_starts, inverted_index._work_tile_starts(plan, expected, 64))
