"""The largest score of each block: the kernel beside PyTorch, and `indexer_topk` runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reference.interpreter import DEVICE, LOW_PRECISION, interpreted, kernels

pytest.importorskip("triton")
from nsa_flex import indexer, indexer_topk
from nsa_flex.fallback_kernels.topk import block_max

DTYPES = [torch.float32, *LOW_PRECISION]

test_kernels_under_the_interpreter = interpreted(__file__)


def exact(
    query: Tensor, key: Tensor, position: Tensor, start: Tensor | None, block_size: int
) -> Tensor:
    of_row = (None if start is None else start.cpu(), block_size)
    return indexer._block_max(query.cpu().double(), key.cpu().double(), position.cpu(), *of_row)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "queries", "keys", "dim", "block_size"),
    [
        (1, 1, 1, 1, 1, 16, 16),
        (2, 3, 1, 37, 90, 24, 16),
        (1, 4, 2, 130, 130, 64, 32),
        (1, 4, 1, 70, 300, 128, 128),
        (1, 1, 1, 3, 140, 8, 64),
    ],
)
def test_of_each_block(
    dtype: torch.dtype,
    batch: int,
    heads: int,
    key_heads: int,
    queries: int,
    keys: int,
    dim: int,
    block_size: int,
) -> None:
    query = torch.randn(batch, queries, heads, dim).to(DEVICE, dtype).transpose(1, 2)
    key = torch.randn(batch, key_heads, keys, dim).to(DEVICE, dtype)
    position = torch.arange(keys - queries, keys, dtype=torch.int32, device=DEVICE)
    position = position.expand(batch, -1).contiguous()
    found = block_max.block_max(query, key, position, None, block_size)
    want = exact(query, key, position, None, block_size)
    # Sums of products of half precision are exact to float32's rounding.
    torch.testing.assert_close(found.cpu().double(), want, rtol=1e-5, atol=1e-4)


@kernels
def test_of_documents_and_offsets() -> None:
    query = torch.randn(2, 2, 80, 16, device=DEVICE)
    key = torch.randn(2, 1, 120, 16, device=DEVICE)
    first = torch.tensor([[0] * 32 + [32] * 16 + [48] * 32], dtype=torch.int32, device=DEVICE)
    start = first.repeat(2, 1) + torch.tensor([[0], [16]], dtype=torch.int32, device=DEVICE)
    place = torch.arange(80, dtype=torch.int32, device=DEVICE)
    position = torch.stack([place, place + 16])
    found = block_max.block_max(query, key, position, start, 16)
    want = exact(query, key, position, start, 16)
    torch.testing.assert_close(found.cpu().double(), want, rtol=1e-5, atol=1e-4)


@kernels
def test_the_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    run = block_max.block_max
    monkeypatch.setattr(
        block_max, "block_max", lambda *args: calls.append(args[0].shape[2]) or run(*args)
    )
    monkeypatch.setattr(indexer, "MAX_SCORES", 40 * 2 * 7)
    query, key = torch.randn(1, 2, 100, 16), torch.randn(1, 1, 100, 16)
    found = indexer_topk(query.to(DEVICE), key.to(DEVICE), block_size=16, num_blocks=3)
    assert calls == [40, 40, 20]
    want = indexer_topk(query.double(), key.double(), block_size=16, num_blocks=3)
    assert torch.equal(found.cpu(), want)


@kernels
def test_what_the_kernel_does_not_take() -> None:
    def reason(*shape: int, dtype: torch.dtype = torch.float32, block_size: int = 128) -> str:
        found = block_max.unsupported_reason(
            torch.empty(shape, dtype=dtype, device=DEVICE), block_size
        )
        assert found is not None
        return found

    assert "float64" in reason(1, 1, 1, 16, dtype=torch.float64)
    assert "head dim" in reason(1, 1, 1, 257)
    assert "256 keys" in reason(1, 1, 1, 16, block_size=256)
    assert "65536 heads" in reason(65536, 1, 0, 16)


@pytest.mark.gpu
@pytest.mark.large
def test_past_two_to_the_31_scores() -> None:
    """Rows of 131072 tokens of 4 heads: offsets of scores and of keys need 64 bits."""
    query = torch.randn(1, 4, 1 << 17, 128, device="cuda", dtype=torch.bfloat16)
    key = torch.randn(20, 1, 1 << 17, 128, device="cuda", dtype=torch.bfloat16)[-1:]
    found = indexer_topk(query, key)
    last = indexer_topk(query[:, :, -64:], key)
    assert torch.equal(found[:, :, -64:], last)
