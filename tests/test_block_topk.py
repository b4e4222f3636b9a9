"""`topk_blocks`: against NumPy for both poolings and log-sum-exps, rows, offsets and documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention, selection, topk_blocks
from nsa_flex.selection import choose_blocks
from reference import infllm_v2 as reference

SIZES = reference.Sizes()


def config_of(sizes: reference.Sizes) -> NSAConfig:
    return NSAConfig(
        sizes.kernel_size,
        sizes.kernel_stride,
        sizes.block_size,
        num_selected_blocks=sizes.num_blocks,
        num_initial_blocks=sizes.init_blocks,
        num_local_blocks=sizes.forced_local,
    )


def tensors(group: int, queries: int, keys: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    query = torch.randn(batch, 2 * group, queries, 16, dtype=torch.float64)
    return query, torch.randn(batch, 2, keys, 16, dtype=torch.float64)


def sets(blocks: Tensor) -> list[list[set[int]]]:
    """Of one row (H, Sq, n): ascending, no block twice, -1 behind."""
    for of_query in blocks.reshape(-1, blocks.shape[-1]).tolist():
        kept = [block for block in of_query if block >= 0]
        assert of_query == [*kept, *[-1] * (len(of_query) - len(kept))]
        assert kept == sorted(set(kept))
    return [[set(row) - {-1} for row in head] for head in blocks.tolist()]


@pytest.mark.parametrize("group", [1, 2, 3, 16])
@pytest.mark.parametrize("coarse", [1, 4])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (150, 150), (3, 170), (1, 161)])
def test_max_pooling(group, coarse, queries, keys, monkeypatch):
    monkeypatch.setattr(selection, "MAX_SCORES", 60000)  # several chunks
    sizes = replace(SIZES, coarse=coarse)
    query, key = tensors(group, queries, keys, batch=2)
    options: dict[str, Any] = {"config": config_of(sizes), "pooling": "max", "coarse": coarse}
    blocks = topk_blocks(query, key, **options)
    assert blocks.dtype == torch.int32
    assert blocks.shape == (2, 2, queries, 5)
    for row in range(2):
        expected = reference.selected_blocks(query[row].numpy(), key[row].numpy(), sizes)
        assert sets(blocks[row]) == expected


@pytest.mark.parametrize(
    "sizes",
    [
        reference.Sizes(4, 4, 0, 16, 16, 2),  # windows side by side
        reference.Sizes(16, 4, 2, 16, 0, 4),  # windows that overlap four times, no local block
        reference.Sizes(16, 8, 1, 16, 16, 2, coarse=2),
    ],
)
def test_other_sizes(sizes):
    query, key = tensors(2, 200, 200)
    blocks = topk_blocks(query, key, config=config_of(sizes), pooling="max", coarse=sizes.coarse)
    assert sets(blocks[0]) == reference.selected_blocks(query[0].numpy(), key[0].numpy(), sizes)


def test_published_sizes_force_34_blocks_of_96():
    """MiniCPM4's: 1 initial, 33 local, 62 scored."""
    sizes = reference.Sizes(32, 16, 1, 64, 2048, 64)
    query, key = tensors(1, 2, 64 * 120 + 40)
    blocks = topk_blocks(query, key, config=config_of(sizes), pooling="max", coarse=4)
    assert blocks.shape[-1] == 96
    found = sets(blocks[0])
    assert found == reference.selected_blocks(query[0].numpy(), key[0].numpy(), sizes)
    for of_head in found:
        for chosen in of_head:
            assert len(chosen) == 96
            assert {0, *range(120 - 32, 121)} <= chosen


@pytest.mark.parametrize("rule", ["top_k", "tiled_top_k"])
def test_by_sums_it_is_the_choice_of_nsa(rule):
    config = NSAConfig(8, 4, 16, 4, 0, 1, selection=rule)
    query, key = tensors(3, 120, 120)
    number = config.num_compressed_blocks(120)
    compressed = torch.randn(1, 2, number, 16, dtype=torch.float64)
    expected = choose_blocks(
        query,
        compressed,
        config=config,
        scale=0.3,
        num_blocks=8,
        positions=torch.arange(120)[None],
    )
    blocks = topk_blocks(query, key, config=config, compressed_key=compressed, scale=0.3)
    assert torch.equal(blocks, expected)


def test_nsa_with_max_pooling():
    """The same rule inside the whole layer."""
    config = replace(config_of(SIZES), selection="max_pool")
    query, key = tensors(2, 120, 120)
    compressed = torch.randn(1, 2, config.num_compressed_blocks(120), 16, dtype=torch.float64)
    gates = torch.rand(1, 4, 120, 3, dtype=torch.float64)
    inputs = (query, key, key, compressed, compressed, gates)
    _, aux = nsa_attention(*inputs, config=config, return_aux=True)
    expected = topk_blocks(query, key, config=config, compressed_key=compressed)
    assert torch.equal(aux.blocks, expected)
    by_sums = topk_blocks(
        query, key, config=config_of(SIZES), compressed_key=compressed, pooling="sum"
    )
    assert not torch.equal(expected, by_sums)


def test_coarse_windows_are_means_of_their_keys():
    key = torch.randn(2, 3, 100, 16, dtype=torch.float64)
    config = config_of(SIZES)
    fine = torch.from_numpy(reference.window_means(key.flatten(0, 1).numpy(), 8, 4))
    coarse = selection.coarse_keys(fine.unflatten(0, (2, 3)), config, 4)
    expected = torch.from_numpy(reference.window_means(key.flatten(0, 1).numpy(), 32, 16))
    torch.testing.assert_close(coarse.flatten(0, 1), expected, rtol=0, atol=1e-14)


def test_tokens_after_a_query_change_nothing():
    query, key = tensors(2, 160, 160)
    options: dict[str, Any] = {"config": config_of(SIZES), "pooling": "max", "coarse": 4}
    blocks = topk_blocks(query, key, **options)
    for t in (40, 95, 127):
        changed = key.clone()
        changed[:, :, t + 1 :] += 100 * torch.randn_like(changed[:, :, t + 1 :])
        again = topk_blocks(query, changed, **options)
        assert torch.equal(again[:, :, : t + 1], blocks[:, :, : t + 1])


@pytest.mark.parametrize("offset", [[70, 33], [100, 0]])
def test_offsets_of_the_device(offset):
    query, key = tensors(2, 20, 130, batch=2)
    options: dict[str, Any] = {"config": config_of(SIZES), "pooling": "max", "coarse": 4}
    blocks = topk_blocks(query, key, query_offset=torch.tensor(offset), **options)
    for row, first in enumerate(offset):
        each = slice(row, row + 1)
        alone = topk_blocks(query[each], key[each, :, : first + 20], **options)
        assert torch.equal(blocks[each], alone)


def test_documents_are_alone():
    query, key = tensors(2, 208, 208)
    start = torch.tensor([0] * 112 + [112] * 16 + [128] * 80)[None]
    options: dict[str, Any] = {"config": config_of(SIZES), "pooling": "max", "coarse": 4}
    blocks = topk_blocks(query, key, document_start=start, **options)
    for first, end in ((0, 112), (112, 128), (128, 208)):
        part = slice(first, end)
        alone = topk_blocks(query[:, :, part], key[:, :, part], **options)
        shifted = torch.where(alone >= 0, alone + first // 16, -1)
        assert torch.equal(blocks[:, :, part], shifted)


def test_it_compiles_whole_for_any_length():
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(topk_blocks, fullgraph=True, dynamic=True, backend=counter)
    options: dict[str, Any] = {"config": config_of(SIZES), "pooling": "max", "coarse": 4}
    for length in (140, 190, 191):
        query, key = tensors(2, length, length)
        expected = topk_blocks(query, key, **options)
        assert torch.equal(compiled(query, key, **options), expected)
    assert counter.frame_count == 1


def test_no_gradient():
    query, key = (x.requires_grad_() for x in tensors(1, 90, 90))
    assert not topk_blocks(query, key, config=config_of(SIZES)).requires_grad


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": None}, TypeError, "config must be an NSAConfig, got NoneType"),
        ({"pooling": "mean"}, ValueError, "pooling is 'mean'; it must be sum or max"),
        (
            {"config": NSAConfig(16, 16, 16, 4, 0, 1, selection="tiled_top_k"), "pooling": "max"},
            ValueError,
            "config.selection 'tiled_top_k'",
        ),
        ({"coarse": 0}, ValueError, "coarse=0 must be at least 1"),
        ({"coarse": 1.5}, TypeError, "coarse must be an int, got float"),
        (
            {"coarse": 8, "document_start": torch.zeros(1, 80, dtype=torch.int32)},
            ValueError,
            r"coarse \* compress_stride = 32 must divide select_block_size=16",
        ),
        ({"key": torch.randn(1, 2, 80, 4)}, ValueError, "same batch size and head dim"),
        ({"key": torch.randn(1, 3, 80, 8)}, ValueError, "must be a multiple"),
        ({"query_offset": 30}, ValueError, "query_offset=30"),
        ({"scale": 0.0}, ValueError, "scale is 0.0"),
        (
            {"compressed_key": torch.randn(1, 2, 18, 8)},
            ValueError,
            r"compressed_key has shape \(1, 2, 18, 8\); expected \(1, 2, 19, 8\)",
        ),
    ],
)
def test_refused(change, error, message):
    call: dict[str, Any] = {
        "query": torch.randn(1, 4, 80, 8),
        "key": torch.randn(1, 2, 80, 8),
        "config": config_of(SIZES),
        **change,
    }
    with pytest.raises(error, match=message):
        topk_blocks(**call)
