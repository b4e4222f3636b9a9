"""`indexer_topk`: against NumPy, for rows, offsets and documents; its kernel; what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa_flex import indexer, indexer_topk
from reference import minimax_m3 as reference


def tensors(batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor]:
    query = torch.randn(batch, heads, queries, 8, dtype=torch.float64)
    return query, torch.randn(batch, 1, keys, 8, dtype=torch.float64)


def sets(blocks: Tensor) -> list[list[set[int]]]:
    """Of one row (H, Sq, n): left-packed, no block twice."""
    for of_query in blocks.reshape(-1, blocks.shape[-1]).tolist():
        kept = [block for block in of_query if block >= 0]
        assert of_query[: len(kept)] == kept
        assert len(set(kept)) == len(kept)
    return [[set(row) - {-1} for row in head] for head in blocks.tolist()]


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (1, 70), (37, 37), (100, 130), (16, 16), (65, 65)]
)
@pytest.mark.parametrize(("num_blocks", "num_local"), [(1, 1), (3, 1), (4, 2), (50, 1), (2, 0)])
def test_rows(queries, keys, num_blocks, num_local, monkeypatch):
    monkeypatch.setattr(indexer, "MAX_SCORES", 2000)  # several chunks
    query, key = tensors(2, 3, queries, keys)
    blocks = indexer_topk(
        query, key, block_size=16, num_blocks=num_blocks, num_local_blocks=num_local
    )
    assert blocks.dtype == torch.int32
    assert blocks.shape == (2, 3, queries, min(num_blocks, -(-keys // 16)))
    for row in range(2):
        expected = reference.selected_blocks(
            query[row].numpy(), key[row, 0].numpy(), 16, num_blocks, num_local
        )
        assert sets(blocks[row]) == expected


def test_the_own_block_comes_first():
    query, key = tensors(1, 2, 200, 200)
    blocks = indexer_topk(query, key, block_size=16, num_blocks=4)
    assert torch.equal(blocks[0, :, :, 0], (torch.arange(200) // 16).expand(2, 200).int())


def test_offsets_of_the_device():
    query, key = tensors(2, 2, 20, 90)
    offset = torch.tensor([70, 33])
    blocks = indexer_topk(query, key, block_size=16, num_blocks=3, query_offset=offset)
    for row, first in enumerate(offset.tolist()):
        alone = indexer_topk(
            query[row : row + 1], key[row : row + 1, :, : first + 20], block_size=16, num_blocks=3
        )
        assert sets(blocks[row]) == sets(alone[0])


def test_documents_are_alone():
    query, key = tensors(1, 2, 112, 112)
    start = torch.tensor([0] * 48 + [48] * 16 + [64] * 48)[None]
    blocks = indexer_topk(query, key, block_size=16, num_blocks=2, document_start=start)
    for first, end in ((0, 48), (48, 64), (64, 112)):
        part = slice(first, end)
        alone = indexer_topk(query[:, :, part], key[:, :, part], block_size=16, num_blocks=2)
        shifted = torch.where(alone >= 0, alone + first // 16, -1)
        assert sets(blocks[0, :, part]) == sets(shifted[0])


def test_it_compiles_whole_for_any_length():
    lengths = []

    def counted(graph: Any, _: Any) -> Any:
        lengths.append(1)
        return graph

    compiled = torch.compile(indexer_topk, fullgraph=True, dynamic=True, backend=counted)
    for length in (40, 90, 91):
        query, key = tensors(1, 2, length, length)
        expected = indexer_topk(query, key, block_size=16, num_blocks=3)
        assert torch.equal(compiled(query, key, block_size=16, num_blocks=3), expected)
    assert len(lengths) == 1


def test_scores_are_float32_under_autocast():
    query, key = tensors(1, 2, 200, 200)
    expected = indexer_topk(query, key, block_size=16, num_blocks=3)
    with torch.autocast("cpu", torch.bfloat16):
        found = indexer_topk(query, key, block_size=16, num_blocks=3)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["block_size", "num_blocks", "num_local_blocks"])
def test_counts_are_ints(name):
    query, key = tensors(1, 2, 20, 20)
    with pytest.raises(TypeError, match=f"{name} must be an int, got float"):
        indexer_topk(query, key, **{"block_size": 16, name: 16.0})


def test_no_gradient():
    query, key = tensors(1, 2, 20, 20)
    query.requires_grad_()
    assert not indexer_topk(query, key, block_size=16).requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.randn(2, 20, 8)}, "must be"),
        ({"key": torch.randn(1, 3, 20, 8)}, "multiple"),
        ({"key": torch.randn(1, 1, 20, 4)}, "same batch size and head dim"),
        ({"key": torch.randn(1, 1, 20, 8).half()}, "key is torch.float16, query torch.float32"),
        ({"block_size": 24}, "power of two"),
        ({"num_local_blocks": 17}, "num_local_blocks=17"),
        ({"num_blocks": 0, "num_local_blocks": 0}, "num_blocks=0"),
        ({"query_offset": 30}, "query_offset=30"),
    ],
)
def test_refused(change, message):
    call = {"query": torch.randn(1, 2, 20, 8), "key": torch.randn(1, 1, 20, 8), **change}
    with pytest.raises(ValueError, match=message):
        indexer_topk(**call)
