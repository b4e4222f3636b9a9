"""The page of many GPUs tells what rows say; a projection is what its closed form says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_flex import NSAConfig
from nsa_flex.bench.report.projection import project
from nsa_flex.parallel import sent_bytes

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
ROWS = json.loads((RESULTS / "context_parallel_h100.json").read_text())
NVLINK = {"H100": 450e9, "H800": 200e9}  # bytes a second that a GPU sends


def row(tokens: int, forward: float, both: float) -> dict[str, Any]:
    times = {"forward_ms": forward, "forward_backward_ms": both}
    return {"heads": "32/8", "ranks": 4, "tokens": tokens, **times}


def test_a_parabola_and_the_bytes_beyond_its_share() -> None:
    """Of thousands of tokens N: N + 2 N² forward, and 4 N + 4 N² with the backward."""
    rows = [row(2**10, 3, 8), row(2**11, 10, 24)]
    found = project(rows, "32/8", 2**12, 4, bytes_per_second=1)
    assert found == pytest.approx((36, 80 - 36))
    four, eight = (sent_bytes(2**12, ranks, 8, 128, config=NSAConfig()) for ranks in (4, 8))
    more = [1e-3 * (y - x / 2) for x, y in zip(four, eight, strict=True)]  # ms at 1 MB a second
    found = project(rows, "32/8", 2**12, 8, bytes_per_second=1e6)
    assert found == pytest.approx((18 + more[0], 22 + more[1]))


@pytest.mark.parametrize("heads", ["64/4", "32/8"])
def test_from_two_ranks_it_is_what_four_took(heads: str) -> None:
    """512k tokens, within 4 %."""
    found = project(ROWS, heads, 2**19, 4, bytes_per_second=NVLINK["H100"], timed=2)
    (took,) = (x for x in ROWS if (x["heads"], x["ranks"], x["tokens"]) == (heads, 4, 2**19))
    assert sum(found) == pytest.approx(took["forward_backward_ms"], rel=0.04)


@pytest.mark.parametrize("heads", ["64/4", "32/8"])
def test_from_shorter_rows_it_is_what_a_million_tokens_took(heads: str) -> None:
    """On four ranks, within 2 %."""
    shorter = [row for row in ROWS if row["tokens"] < 2**20]
    found = project(shorter, heads, 2**20, 4, bytes_per_second=NVLINK["H100"])
    (took,) = (row for row in ROWS if (row["heads"], row["tokens"]) == (heads, 2**20))
    assert sum(found) == pytest.approx(took["forward_backward_ms"], rel=0.02)


def test_rows_that_are_not_there() -> None:
    with pytest.raises(ValueError, match="0 rows of 16/16 heads on 4 ranks; expected 2 lengths"):
        project(ROWS, "16/16", 2**20, 8, bytes_per_second=1e9)


def page() -> str:
    return " ".join((ROOT / "docs" / "guide" / "many-gpus.md").read_text().split())


def test_the_page() -> None:
    told = re.search(r"projects (\d+) ms forward and (\d+) ms backward", page())
    assert told is not None
    found = project(ROWS, "64/4", 2**20, 8, bytes_per_second=NVLINK["H800"])
    assert told.groups() == tuple(f"{x:.0f}" for x in found)


def test_losses_of_the_page() -> None:
    """On four processes they fall to the end, and all forms of parallelism agree."""
    words = r"on four gloo .* fall from (\S+) to (\S+) and differ by at most (\d\.\d+)"
    told = re.search(words, page())
    assert told is not None
    rows = json.loads((RESULTS / "parallel_losses_cpu.json").read_text())
    losses = {name: torch.tensor(form["losses"]) for name, form in rows["forms"].items()}
    assert set(losses) == {"one", "ddp", "fsdp", "cp", "tp", "sp", "fsdp_cp"}
    one = losses["one"]
    assert one[-30:].mean() < one[-60:-30].mean() - 0.05
    gap = max(float((found - one).abs().max()) for found in losses.values())
    assert told.groups() == (f"{one[0]:.2f}", f"{one[-1]:.2f}", f"{gap:.4f}")
