"""NSA's cache of one layer: any chunks give what one call gives; rows, crops and bad use."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import NSA, relative_error
from torch import Tensor

from nsa_flex import NSAAttention, NSAConfig
from nsa_flex.cache import LayerCache, NSACache

# Float64 sums of some hundred terms: last places. What is chosen is the same.
FLOAT64_LIMIT = 64 * torch.finfo(torch.float64).eps
SPREAD = 0.3


def layer_of(config: NSAConfig = NSA, **options: Any) -> NSAAttention:
    """Random weights everywhere, φ and gates too."""
    sizes = {"num_query_heads": 4, "num_kv_heads": 2, "value_head_dim": 6}
    layer = NSAAttention(32, config=config, **sizes | options, dtype=torch.float64)
    with torch.no_grad():
        for part in (layer.compress_key, layer.compress_value, layer.gates):
            for parameter in part.parameters():
                parameter.add_(SPREAD * torch.randn_like(parameter))
    return layer.eval().requires_grad_(False)


def in_chunks(
    layer: NSAAttention,
    x: Tensor,
    chunks: list[int],
    mask: Tensor | None = None,
    cache: LayerCache | None = None,
) -> Tensor:
    """The outputs of x fed to a cache chunk by chunk."""
    cache = layer.new_cache() if cache is None else cache
    masks = [None] * len(chunks) if mask is None else mask.split(chunks, dim=1)
    parts = [
        layer(part, cache=cache, attention_mask=real)
        for part, real in zip(x.split(chunks, dim=1), masks, strict=True)
    ]
    return torch.cat(parts, 1)


@st.composite
def chunkings(draw: st.DrawFn, longest: int = 90) -> list[int]:
    """Lengths of neighbouring chunks, single tokens and prefills among them."""
    sizes = st.one_of(st.just(1), st.integers(1, 16), st.integers(17, 40))
    return draw(st.lists(sizes, min_size=1, max_size=8).filter(lambda s: sum(s) <= longest))


@given(
    chunks=chunkings(),
    kind=st.sampled_from(["mean", "weighted", "linear", "mlp"]),
    separate=st.booleans(),
    static=st.booleans(),
    initial=st.integers(0, 1),
    window=st.sampled_from([1, 5, 12, 200]),
)
def test_any_chunks_are_one_call(
    chunks: list[int], kind: Any, separate: bool, static: bool, initial: int, window: int
) -> None:
    config = replace(NSA, compression=kind, num_initial_blocks=initial, window_size=window)
    layer = layer_of(config, separate_branch_kv=separate)
    x = torch.randn(2, sum(chunks), 32, dtype=torch.float64)
    cache = layer.new_cache(max_length=sum(chunks) if static else None)
    found = in_chunks(layer, x, chunks, cache=cache)
    assert relative_error(found, layer(x)) < FLOAT64_LIMIT
    num_blocks = config.num_compressed_blocks(sum(chunks))
    compressed = cache.buffers.compressed_key
    assert not compressed[:, :, num_blocks:].any()
    key = cache._branch(cache.buffers.key[:, :, : sum(chunks)], 0)
    if num_blocks:
        want = layer.compress_key(key)[:, :, :num_blocks]
        assert relative_error(compressed[:, :, :num_blocks], want) < FLOAT64_LIMIT


@given(chunks=chunkings(), static=st.booleans(), data=st.data())
def test_rows_of_any_lengths_are_each_row_alone(
    chunks: list[int], static: bool, data: st.DataObject
) -> None:
    layer, length = layer_of(), sum(chunks)
    padding = data.draw(st.lists(st.integers(0, length - 1), min_size=3, max_size=3))
    mask = torch.arange(length) >= torch.tensor(padding)[:, None]
    if data.draw(st.booleans(), label="gaps"):
        mask = mask & (torch.rand(3, length) < 0.7)
    x = torch.randn(3, length, 32, dtype=torch.float64)
    cache = layer.new_cache(max_length=length if static else None)
    found = in_chunks(layer, x, chunks, mask, cache)
    assert cache.lengths.tolist() == mask.sum(1).tolist()
    assert not found[~mask].any()
    for row, keep in enumerate(mask):
        if keep.any():
            alone = layer(x[row, keep][None])[0]
            assert relative_error(found[row, keep], alone) < FLOAT64_LIMIT
