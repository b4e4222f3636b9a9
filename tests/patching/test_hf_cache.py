"""Layers of a transformers cache exchanged for NSA's: their memory, and all of them or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.cache import LayerCache
from nsa_flex.patching import hf_cache
from patching.tiny_models import NSA, tiny_model, tokens

GREEDY: dict[str, Any] = {"do_sample": False}
KINDS = ["dynamic", "static"]


@pytest.fixture
def model() -> nn.Module:
    return nsa_flex.patch(tiny_model().eval(), NSA)


def cache_of(model: nn.Module, kind: str) -> Any:
    """An empty cache, for 60 tokens if static."""
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=60)


def early(cache: Any) -> Any:
    """The cache, allocated ahead of its first tokens."""
    cache.early_initialization(1, 2, 8, torch.float32, torch.device("cpu"))
    return cache


def filled(cache: Any, num_tokens: int) -> Any:
    """The cache with random tokens in its two layers."""
    for layer in range(2):
        cache.update(torch.randn(1, 2, num_tokens, 8), torch.randn(1, 2, num_tokens, 8), layer)
    return cache


def step(model: nn.Module, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, past_key_values=cache).logits


def watch_memory(cache: Any, monkeypatch: pytest.MonkeyPatch, enough_for: int = 2) -> list[int]:
    """How many of the cache's layers hold memory, each time that one of NSA's allocates.

    Args:
        enough_for: layers of NSA; for the next one memory runs out.
    """
    held: list[int] = []
    formers, initialize = list(cache.layers), LayerCache.lazy_initialization

    def allocate(layer: LayerCache, *args: Any) -> None:
        held.append(sum(former.keys is not None for former in formers))
        if len(held) > enough_for:
            raise torch.OutOfMemoryError("out of memory")
        initialize(layer, *args)

    monkeypatch.setattr(LayerCache, "lazy_initialization", allocate)
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_cache_that_was_allocated_ahead(model: nn.Module, kind: str) -> None:
    ids = tokens(1, 50)
    expected = model.generate(ids, max_new_tokens=4, use_cache=False, **GREEDY)
    cache = early(cache_of(model, kind))
    found = model.generate(ids, max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert torch.equal(found, expected)
    assert all(isinstance(layer, LayerCache) for layer in cache.layers)


def test_the_memory_of_an_empty_static_cache_is_not_kept_beside_nsas(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`generate` allocates it ahead of a chunked prefill."""
    cache = early(cache_of(model, "static"))
    held = watch_memory(cache, monkeypatch)
    hf_cache.adopt(cache, model.model, None)
    assert held == [1, 0]
    assert all(layer.is_initialized for layer in cache.layers)


def test_an_empty_cache_goes_on_after_memory_ran_out(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(1, 50)
    expected = model.generate(ids, max_new_tokens=4, use_cache=False, **GREEDY)
    cache = early(cache_of(model, "static"))
    former = list(cache.layers)
    with monkeypatch.context() as short:
        watch_memory(cache, short, enough_for=1)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, ids, cache)
    assert cache.layers == former
    assert cache.get_seq_length() == 0
    assert not cache.is_initialized
    found = model.generate(ids, max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_stay_where_they_were_when_memory_runs_out(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    cache = filled(cache_of(model, kind), 40)
    former = list(cache.layers)
    before = [x.clone() for layer in former for x in (layer.keys, layer.values)]
    with monkeypatch.context() as short:
        held = watch_memory(cache, short, enough_for=1)
        with pytest.raises(torch.OutOfMemoryError):
            step(model, tokens(1, 1), cache)
    assert held == [2, 2]
    assert cache.layers == former
    after = [x for layer in former for x in (layer.keys, layer.values)]
    assert all(map(torch.equal, after, before))
    assert cache.get_seq_length() == 40
    step(model, tokens(1, 1), cache)
    for layer, key in zip(cache.layers, before[::2], strict=True):
        assert isinstance(layer, LayerCache)
        assert torch.equal(layer.keys[:, :, :40], key[:, :, :40])
        assert layer.lengths.tolist() == [41]


def test_layers_are_asked_together_whether_a_block_is_completed(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a call; a layer that could complete others is asked by itself."""
    asked: list[LayerCache] = []
    ask = LayerCache.may_complete

    def watched(cache: LayerCache, *args: Any) -> bool:
        asked.append(cache)
        return ask(cache, *args)

    monkeypatch.setattr(LayerCache, "may_complete", watched)
    cache, ids = cache_of(model, "dynamic"), tokens(1, 40)
    step(model, ids[:, :20], cache)
    first, second = cache.layers
    asked.clear()
    for position in range(20, 30):
        step(model, ids[:, position : position + 1], cache)
        assert asked == [first]
        asked.clear()
    second.columns.even = False
    step(model, ids[:, 30:31], cache)
    assert asked == [first, second]
    torch.testing.assert_close(
        step(model, ids[:, 31:32], cache)[:, -1], model(ids[:, :32]).logits[:, -1]
    )
