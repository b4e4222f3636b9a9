"""Steps over a cache on several ranks by kernels, which run in Triton's interpreter."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import on_ranks

from nsa_flex import Compression, NSAConfig, decoding
from nsa_flex.parallel import ShardedCache
from nsa_flex.parallel import decoding as parallel_decoding
from reference.interpreter import INTERPRETED, noted_kernels

pytest.importorskip("triton")

# Sums of some hundred float32 terms.
ROUNDING = 1e-5
KERNELS = [
    "store_tokens_kernel",
    "decode_compressed_kernel",
    "decode_merge_kernel",
    "decode_topk_kernel",
    "decode_spans_kernel",
    "decode_merge_kernel",
    "decode_merge_kernel",
]
SMALL = NSAConfig(8, 4, 16, 4, window_size=20)
FORCED = NSAConfig(16, 8, 16, 6, num_initial_blocks=2, num_local_blocks=3, window_size=37)


@pytest.mark.exhaustive
def test_steps_by_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_ranks(2, "cpu", tmp_path, steps)


@torch.no_grad()
def steps(_device: torch.device) -> None:
    """Rows that end at and around the edge of the first part, and short ones; against float64."""
    from nsa_flex.parallel import decode_kernels

    assert INTERPRETED
    warnings.simplefilter("ignore", RuntimeWarning)  # log2(0), and what masks hide
    ran = noted_kernels()
    operations, on_cpu = parallel_decoding._parts, decoding.store_unsupported_reason
    part = 176
    lengths = (3, 15, 40, part - 20, part - 1, part, part + 7, part + 33, 2 * part - 2)
    rows = len(lengths)
    for config in (SMALL, replace(SMALL, branches=("selected", "sliding")), FORCED):
        torch.manual_seed(3)
        phis = [Compression(config, 2, 16, "mean") for _ in range(2)]
        prompt = [torch.randn(rows, 2, 2 * part, 16) for _ in range(2)]
        cache, exact = (
            ShardedCache(*phis, dist.group.WORLD, max_length=2 * part) for _ in range(2)
        )
        cache.fill(*prompt, lengths)
        exact.fill(*(x.double() for x in prompt), lengths)
        for _ in range(2):
            new = [torch.randn(rows, heads, 1, 16) for heads in (6, 2, 2)]
            new.append(torch.rand(rows, 6, 1, len(config.branches)))
            ran.clear()
            parallel_decoding._parts = lambda *_: decode_kernels.KernelParts  # as on CUDA
            decoding.store_unsupported_reason = lambda *_: None
            got = cache.step(*new)
            assert ran == KERNELS
            parallel_decoding._parts = operations
            decoding.store_unsupported_reason = on_cpu
            want = exact.step(*(x.double() for x in new))
            error = (got - want).abs().amax((1, 2, 3)) / want.abs().amax((1, 2, 3))
            assert float(error.max()) < ROUNDING, (config, error)
