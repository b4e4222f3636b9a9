"""Context parallelism through the fused core, whose kernels run in Triton's interpreter."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed.ranks import on_ranks
from distributed.test_context_parallel import Problem

from nsa_flex import NSAConfig, attention
from nsa_flex.parallel import shard_sequence
from reference.interpreter import INTERPRETED, noted_kernels

pytest.importorskip("triton")

# Sums of some dozen float32 terms, in the forward and again in the backward.
ROUNDING = 1e-5


@pytest.mark.exhaustive
def test_chunks_run_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    on_ranks(2, "cpu", tmp_path, chunks)


def chunks(_device: torch.device) -> None:
    """Both chunks of each rank, with gradients, against one process in float64."""
    assert INTERPRETED
    warnings.simplefilter("ignore", RuntimeWarning)  # log2(0), and what masks hide
    config = NSAConfig(8, 4, 16, 4, window_size=20)
    problem = Problem(chunk=32, rows=1, heads=1, group=2, phi="mlp", config=config, dims=(16, 16))
    tensors = [*problem.inputs, problem.grad, *problem.phis.parameters()]
    for x in tensors:
        x.data = x.float().double()
    output, gradients = problem.alone()
    problem.inputs = [x.float() for x in problem.inputs]
    problem.grad = problem.grad.float()
    problem.phis.float()

    ran = noted_kernels()
    attention.is_fused = lambda *_: True  # as on CUDA
    own, found = problem.sharded(dist.group.WORLD)
    # One kernel ends the forward of each chunk; the first chunk of all is short.
    ends = ["fused_sliding_epilogue_kernel"] * 2
    if dist.get_rank() == 0:
        ends[0] = "short_fwd_kernel"
    assert sorted(x for x in ran if x in {"short_fwd_kernel", *ends}) == sorted(ends)
    assert {"topk_select_kernel", "fused_bwd_dq_kernel", "fused_bwd_dkdv_kernel"} <= {*ran}
    for place, (got, want) in enumerate(zip([own, *found], [output, *gradients], strict=True)):
        is_sharded = place <= len(problem.inputs)
        want = shard_sequence(want, dist.group.WORLD, 2) if is_sharded else want
        error = float((got - want).norm() / want.norm())
        assert error < ROUNDING, (place, error)
