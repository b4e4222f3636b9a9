"""Tensors on another GPU than the current one: kernels and launch plans run where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.ranks import TWO_GPUS
from torch import Tensor

from nsa_flex import NSAConfig, indexer_topk, nsa_attention, patch, topk_blocks
from patching.tiny_models import tiny_model
from reference.modes import deterministic_algorithms

pytestmark = [pytest.mark.gpu, TWO_GPUS]
CONFIG = NSAConfig(compression="mlp")


def numbers(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def core(device: str, documents: bool) -> list[Tensor]:
    q, k = (1, 8, 1500, 64), (1, 2, 1500, 64)
    blocks = (1, 2, CONFIG.num_compressed_blocks(1500), 64)
    leaves = [x.to(device).requires_grad_() for x in numbers(q, k, k, blocks, blocks, (*q[:3], 3))]
    start = (torch.arange(1500, device=device) // 640 * 640)[None] if documents else None
    out = nsa_attention(*leaves, config=CONFIG, document_start=start)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def blocks(device: str) -> list[Tensor]:
    query, key = (x.to(device) for x in numbers((1, 4, 900, 64), (1, 1, 900, 64)))
    return [indexer_topk(query, key), topk_blocks(query, key, config=CONFIG, pooling="max")]


def generated(device: str, cache: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    config = NSAConfig(window_size=64, compression="mlp")
    model = patch(tiny_model(), config=config).bfloat16().to(device)
    ids = (torch.arange(300) * 7 % 60)[None].to(device)
    return [model.generate(ids, max_new_tokens=8, cache_implementation=cache, do_sample=False)]


@pytest.mark.parametrize(
    "case",
    [
        lambda device: core(device, documents=False),
        lambda device: core(device, documents=True),
        blocks,
        lambda device: generated(device, None),
        lambda device: generated(device, "static"),
    ],
    ids=["core", "packed", "blocks", "growing", "static"],
)
def test_is_what_the_current_gpu_computes(case: Callable[[str], list[Tensor]]) -> None:
    """Four times: launches are recorded, then replayed."""
    with deterministic_algorithms(), torch.cuda.device(0):
        expected: list[Any] = [x.cpu() for x in case("cuda:0")]
        for _ in range(4):
            for x, y in zip(case("cuda:1"), expected, strict=True):
                torch.testing.assert_close(x.cpu(), y)
