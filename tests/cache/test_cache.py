"""NSA's cache of one layer: any chunks give what one call gives; rows, crops and bad use."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nsa_flex import Compression, LayerCache, NSAAttention, NSACache, NSAConfig
from nsa_flex.cache.columns import count_within
from patching.tiny_models import NSA, relative_error

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


def test_the_check_for_room_passes_opcheck() -> None:
    torch.library.opcheck(count_within, (torch.tensor(40), 2, 42))


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


@given(data=st.data(), static=st.booleans())
def test_rows_can_be_taken_back_reordered_and_repeated(data: st.DataObject, static: bool) -> None:
    layer = layer_of()
    cache = layer.new_cache(max_length=400 if static else None)
    rows = torch.empty(2, 0, 32, dtype=torch.float64)
    for _ in range(data.draw(st.integers(2, 6), label="operations")):
        length = rows.shape[1]
        operation = data.draw(
            st.sampled_from(["add", "add", "crop", "reorder", "repeat", "reset"])
        )
        if operation == "crop":
            count = data.draw(st.integers(0, length), label="taken back")
            rows = rows[:, : length - count]
            cache.crop(-count)
        elif operation == "reorder":
            order = torch.randint(len(rows), (len(rows),))
            rows = rows[order]
            cache.reorder_cache(order)
        elif operation == "repeat" and len(rows) < 5:
            rows = rows.repeat_interleave(2, 0)
            cache.batch_repeat_interleave(2)
        elif operation == "reset":
            rows = rows[:, :0]
            cache.reset()
        if cache.is_initialized and len(rows) != cache.batch_size:
            cache = layer.new_cache()  # nothing was in it when rows were repeated
            rows = rows[:, :0]
        new = torch.randn(len(rows), data.draw(st.integers(1, 40)), 32, dtype=torch.float64)
        rows = torch.cat((rows, new), 1)
        found = layer(new, cache=cache)
        assert relative_error(found, layer(rows)[:, -new.shape[1] :]) < FLOAT64_LIMIT
        assert int(cache.get_seq_length()) == rows.shape[1]


def test_memory_is_what_the_page_says() -> None:
    config = replace(NSA, compression="mean")
    layer = NSAAttention(32, 4, 2, value_head_dim=6, config=config)
    static, growing = layer.new_cache(max_length=1000), layer.new_cache()
    assert static.memory().total == 0
    with torch.no_grad():
        for length in (600, 1, 300):
            x = torch.randn(3, length, 32)
            layer(x, cache=static)
            layer(x, cache=growing)
    a_token = 3 * 2 * (8 + 6) * 4  # B · Hkv · (D + Dv) · 4 bytes
    num_blocks = config.num_compressed_blocks(1000)
    memory = static.memory()
    assert (memory.raw, memory.compressed) == (1000 * a_token, num_blocks * a_token)
    assert memory.other == 3 * 4 + 8
    assert memory.total == memory.raw + memory.compressed + memory.other
    assert growing.memory().raw <= a_token * (1.25 * 901 + 320)
    assert str(NSACache(layer)) == "NSACache(1 layers, 0 bytes)"


def test_a_growing_cache_copies_each_token_a_few_times() -> None:
    layer = NSAAttention(16, 2, 1, config=NSA, head_dim=4)
    cache = layer.new_cache()
    key = torch.randn(1, 1, 25, 4)
    copied = capacity = 0
    for _ in range(400):
        with torch.no_grad():
            cache.update(key, key)
        if cache.capacity != capacity:
            copied, capacity = copied + capacity, cache.capacity
    assert cache.get_seq_length() == 10000
    assert copied < 5 * 10000
    assert torch.equal(cache.buffers.key[:, :, 9975:10000], key)


def test_update_alone_is_what_a_transformers_layer_does() -> None:
    layer = layer_of()
    for max_length in (None, 64):
        cache = layer.new_cache(max_length=max_length)
        assert cache.get_seq_length() == 0
        assert cache.get_max_length() == (-1 if max_length is None else 64)
        key, value = (torch.randn(2, 2, 50, dim, dtype=torch.float64) for dim in (8, 6))
        for part in (slice(0, 20), slice(20, 21), slice(21, 50)):
            keys, values = cache.update(key[:, :, part], value[:, :, part])
            assert torch.equal(keys, key[:, :, : part.stop])
            assert torch.equal(values, value[:, :, : part.stop])
            assert int(cache.get_seq_length()) == part.stop
        assert cache.get_mask_sizes(3) == (53 if max_length is None else 64, 0)
        want = layer.compress_value(value)
        assert relative_error(cache.buffers.compressed_value[:, :, : want.shape[2]], want) < 1e-14


@pytest.mark.parametrize("kind", ["mean", "weighted", "linear", "mlp"])
def test_a_block_is_compressed_with_its_last_token_and_not_before(kind: Any) -> None:
    layer = layer_of(replace(NSA, compression=kind))
    cache = layer.new_cache(max_length=30)
    key, value = (torch.randn(1, 2, 30, dim, dtype=torch.float64) for dim in (8, 6))
    for place in range(30):
        cache.update(key[:, :, place : place + 1], value[:, :, place : place + 1])
        written = cache.buffers.compressed_key.abs().sum((0, 1, 3)) > 0
        num_blocks = NSA.num_compressed_blocks(place + 1)
        assert written.tolist() == [i < num_blocks for i in range(6)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda layer, cache, x: layer(x[:, :20], cache=cache),
            r"holds 30 of at most max_length=40",
        ),
        (lambda layer, cache, x: layer(x[:1, :5], cache=cache), "x has 1 rows, the cache holds 2"),
        (
            lambda layer, cache, x: copy.deepcopy(layer).float()(x[:, :5].float(), cache=cache),
            "dtype torch.float64, the new tokens have dtype torch.float32",
        ),
        (
            lambda layer, cache, x: copy.deepcopy(layer).to("meta")(
                x[:, :5].to("meta"), cache=cache
            ),
            "x is on meta, the cache on cpu: move one",
        ),
        (
            lambda layer, cache, x: layer_of(num_kv_heads=4)(x[:, :5], cache=cache),
            r"are not those of this cache's layer: 2 heads of 8 and 6",
        ),
        (
            lambda layer, cache, x: layer(x[:1, :5], cache=cache, cu_seqlens=torch.tensor([0, 5])),
            "cu_seqlens and cache were both given",
        ),
        (
            lambda layer, cache, x: copy.deepcopy(layer).requires_grad_(True)(
                x[:, :5], cache=cache
            ),
            "carries no gradients",
        ),
        (lambda layer, cache, x: cache.crop(-31), "past the start: the cache holds 30 tokens"),
        (lambda layer, cache, x: cache.crop(1), "pass a negative number"),
        (
            lambda layer, cache, x: cache.update(x[0], x[0]),
            r"must be \(batch, heads, tokens, dim\)",
        ),
    ],
)
def test_bad_use_is_named_and_changes_nothing(call: Any, message: str) -> None:
    layer = layer_of()
    cache, x = layer.new_cache(max_length=40), torch.randn(2, 40, 32, dtype=torch.float64)
    layer(x[:, :30], cache=cache)
    before = copy.deepcopy(cache)
    with pytest.raises(ValueError, match=message):
        call(layer, cache, x)
    assert all(map(torch.equal, cache.buffers.tensors, before.buffers.tensors))
    assert torch.equal(cache.lengths, before.lengths)
    found = layer(x[:, 30:], cache=cache)
    assert relative_error(found, layer(x)[:, 30:]) < FLOAT64_LIMIT


def test_a_length_below_one_is_no_length() -> None:
    with pytest.raises(ValueError, match="max_length=0 must be at least 1, or None to grow"):
        layer_of().new_cache(max_length=0)


def test_blocks_and_log_sum_exps_of_cached_tokens() -> None:
    layer = layer_of()
    x = torch.randn(2, 60, 32, dtype=torch.float64)
    mask = torch.arange(60) >= torch.tensor([[0], [13]])
    _, want = layer(x, attention_mask=mask, return_aux=True)
    cache = layer.new_cache()
    for part in (slice(0, 30), slice(30, 31), slice(31, 60)):
        real = mask[:, part]
        _, aux = layer(x[:, part], attention_mask=real, cache=cache, return_aux=True)
        keep = real[:, None].expand(-1, 2, -1)
        assert torch.equal(aux.blocks[keep], want.blocks[:, :, part][keep])
        keep = real[:, None].expand(-1, 4, -1)
        for found, whole in zip(aux.lse, want.lse, strict=True):
            torch.testing.assert_close(found[keep], whole[:, :, part][keep])


@pytest.mark.parametrize("max_length", [None, 120])
def test_chunks_go_through_nsa_attention_at_an_offset_that_the_host_knows(
    max_length: int | None, offsets: list[Any]
) -> None:
    """An int, where no row has padding; what comes as a step goes elsewhere."""
    layer = layer_of()
    x = torch.randn(2, 110, 32, dtype=torch.float64)
    cache = layer.new_cache(max_length=max_length)
    found = in_chunks(layer, x, [40, 24, 1, 16, 29], cache=cache)
    assert [(type(each), each) for each in offsets] == [(int, 0), (int, 40), (int, 81)]
    assert relative_error(found, layer(x)) < FLOAT64_LIMIT


def test_chunks_of_rows_with_padding_have_offsets_on_the_device(offsets: list[Any]) -> None:
    """One a row: the tokens of the row so far, which the host does not wait for."""
    layer = layer_of()
    x = torch.randn(2, 80, 32, dtype=torch.float64)
    mask = torch.arange(80) >= torch.tensor([[0], [13]])
    in_chunks(layer, x, [40, 40], mask, layer.new_cache())
    assert offsets[0] == 0
    assert torch.equal(offsets[1], torch.tensor([40, 27]))


@pytest.mark.parametrize("max_length", [None, 60])
def test_what_was_forgotten_does_not_come_back(max_length: int | None) -> None:
    """NaN of one request in the memory of the next: 0 times NaN is NaN."""
    layer = layer_of(NSA)
    cache, x = layer.new_cache(max_length=max_length), torch.randn(1, 40, 32).double()
    with torch.no_grad():
        layer(torch.full_like(x, float("nan")), cache=cache)
        cache.reset()
        found = [layer(x[:, :20], cache=cache), layer(x[:, 20:21], cache=cache)]
        torch.testing.assert_close(torch.cat(found, 1), layer(x[:, :21]))


def test_arguments_that_are_no_sizes() -> None:
    phi = [Compression(NSA, 2, 8) for _ in range(2)]
    for length in (1.5, True, "3"):
        with pytest.raises(TypeError, match="max_length must be an int, got"):
            LayerCache(*phi, max_length=length)
    with pytest.raises(ValueError, match="num_sets=2 must be 1, or 3"):
        LayerCache(*phi, num_sets=2)
    for other in (Compression(NSA, 4, 8), Compression(NSAConfig(), 2, 8)):
        with pytest.raises(ValueError, match="φ of keys and of values differ"):
            LayerCache(phi[0], other)
    with pytest.raises(TypeError, match="tokens_to_remove must be an int, got float"):
        LayerCache(*phi).crop(-1.5)
    assert LayerCache(*phi, max_length=np.int64(5)).max_length == 5


def test_rows_repeated_between_masked_calls() -> None:
    layer = layer_of(NSA)
    cache, x, y = (
        layer.new_cache(),
        torch.randn(1, 20, 32).double(),
        torch.randn(2, 3, 32).double(),
    )
    mask = torch.ones(1, 20)
    mask[:, :4] = 0
    with torch.no_grad():
        layer(x, attention_mask=mask, cache=cache)
        cache.batch_repeat_interleave(2)
        found = layer(y, attention_mask=torch.ones(2, 3), cache=cache)
        alone = torch.cat((x[:, 4:].expand(2, -1, -1), y), 1)
        torch.testing.assert_close(found, layer(alone)[:, 16:])
    cache.crop(-4)
    assert cache.lengths.tolist() == [15, 15]


@pytest.mark.parametrize("max_length", [None, 60])
def test_a_compiled_layer_takes_a_cache_from_a_file(max_length: int | None) -> None:
    layer, x = layer_of(NSA), torch.randn(2, 41, 32).double()
    cache = layer.new_cache(max_length=max_length)
    with torch.no_grad():
        layer(x[:, :40], cache=cache)
        cache = pickle.loads(pickle.dumps(cache))
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x[:, 40:], cache=cache), layer(x)[:, 40:])


def test_keys_are_those_of_the_tokens_and_not_of_the_room() -> None:
    layer, x = layer_of(), torch.randn(2, 30, 32, dtype=torch.float64)
    cache = layer.new_cache()
    assert cache.keys is None
    in_chunks(layer, x, [20, 1, 9], cache=cache)
    assert cache.capacity > 30
    assert (cache.keys.shape, cache.values.shape) == ((2, 2, 30, 8), (2, 2, 30, 6))
    key, value = layer._project(x, torch.arange(30))[1:]
    assert relative_error(cache.keys, key) < FLOAT64_LIMIT
    assert relative_error(cache.values, value) < FLOAT64_LIMIT
    cache.crop(-4)
    assert cache.keys.shape[2] == 26
    static = layer.new_cache(max_length=40)
    in_chunks(layer, x, [30], cache=static)
    assert static.keys.shape[2] == static.capacity == 40


def test_keys_of_padded_rows_lie_in_their_columns() -> None:
    layer, x = layer_of(rope_theta=None), torch.randn(3, 30, 32, dtype=torch.float64)
    real = torch.arange(30) >= torch.tensor([[7], [0], [25]])
    real = real & ~((torch.arange(30) >= 24) & torch.tensor([[True], [False], [False]]))
    cache = layer.new_cache()
    in_chunks(layer, x, [20, 10], real.long(), cache)
    expected = layer._project(x, torch.arange(30))[1].masked_fill(~real[:, None, :, None], 0)
    assert relative_error(cache.keys, expected) < FLOAT64_LIMIT


@pytest.mark.parametrize("max_length", [None, 800])
def test_a_cache_of_inference_mode_goes_on_outside(max_length: int | None) -> None:
    layer, x = layer_of(), torch.randn(2, 600, 32, dtype=torch.float64)
    expected, mask = layer(x), torch.ones(2, 300)
    cache = layer.new_cache(max_length=max_length)
    with torch.inference_mode():
        in_chunks(layer, x[:, :300], [20, 280], mask, cache)  # it grows
        twin = copy.deepcopy(cache)
        cache.batch_select_indices(torch.tensor([1, 0]))
    cache.reorder_cache(torch.tensor([1, 0]))
    for each in (cache, twin):
        with torch.no_grad():
            found = in_chunks(layer, x[:, 300:], [1, 299], cache=each)
        assert relative_error(found, expected[:, 300:]) < FLOAT64_LIMIT
        each.crop(-10)
        each.reset()
