"""Layers of a transformers cache exchanged for NSA's: their memory, and all of them or none."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.cache import LayerCache
from nsa_flex.patching import hf_cache
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

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


def test_a_cache_goes_on_after_another_patch(model: nn.Module) -> None:
    """If empty, and without memory for blocks of another size."""
    cache, ids = nsa_flex.NSACache(model), tokens(2, 40)
    growing, static = nsa_flex.NSACache(model), nsa_flex.NSACache(model, max_length=40)
    for each in (growing, static):
        step(model, ids[:, :3], each)
    nsa_flex.unpatch(model)
    sizes = {"compress_block_size": 16, "compress_stride": 8, "select_block_size": 16}
    moved(nsa_flex.patch(model, dataclasses.replace(NSA, **sizes)))
    step(model, ids[:, :30], cache)
    found = step(model, ids[:, 30:], cache)
    assert relative_error(found, model(ids, use_cache=False).logits[:, 30:]) < 1e-12
    for each in (growing, static):
        each.reset()
    step(model, ids[:, :30], growing)
    assert relative_error(step(model, ids[:, 30:], growing), found) < 1e-12
    with pytest.raises(ValueError, match="another NSAConfig"):
        step(model, ids, static)


def test_a_growing_cache_that_was_reset_takes_another_batch(model: nn.Module) -> None:
    cache, ids = nsa_flex.NSACache(model.double()), tokens(3, 40)
    step(model, ids[:2], cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    step(model, ids[:, :30], cache)
    found = step(model, ids[:, 30:], cache)
    assert relative_error(found, model(ids, use_cache=False).logits[:, 30:]) < 1e-12


def test_a_padded_cache_is_refused_by_a_model_without_nsa(model: nn.Module) -> None:
    ids, mask = tokens(2, 20), torch.ones(2, 20, dtype=torch.int64)
    mask[1, :7] = 0
    for cache in (nsa_flex.NSACache(model), nsa_flex.NSACache(model, max_length=40)):
        with torch.no_grad():
            model(ids, attention_mask=mask, past_key_values=cache)
            dense = copy.deepcopy(model)
            nsa_flex.unpatch(dense)
            with pytest.raises(ValueError, match="padded batch, which only a patched model reads"):
                dense(ids[:, :4], past_key_values=cache)


def test_rows_of_a_static_cache_beside_unpatched_layers_are_refused_whole() -> None:
    model = nsa_flex.patch(tiny_model(), NSA, filter_fn=lambda layer, _: layer.layer_idx == 0)
    cache, ids = nsa_flex.NSACache(model, max_length=40), tokens(2, 20)
    step(model, ids[:, :10], cache)
    with pytest.raises(ValueError, match="layer 1 is not patched, and its StaticLayer has no"):
        cache.batch_select_indices(torch.tensor([1]))
    with pytest.raises(ValueError, match="layer 1 is not patched, and its StaticLayer has no"):
        cache.batch_repeat_interleave(2)
    found = step(model, ids[:, 10:], cache)
    assert relative_error(found, model(ids, use_cache=False).logits[:, 10:]) < 1e-5


def test_gradients_of_what_compresses_over_a_cache_are_refused(model: nn.Module) -> None:
    cache, ids = nsa_flex.NSACache(model), tokens(1, 40)
    step(model, ids[:, :30], cache)
    model.requires_grad_(False)
    model.model.layers[-1].self_attn.nsa.compress_key.requires_grad_(True)
    with pytest.raises(ValueError, match="carries no gradients"):
        model(ids[:, 30:], past_key_values=cache)


def test_a_mask_goes_on_after_compiled_calls_that_told_nothing_of_padding(
    model: nn.Module,
) -> None:
    ids, mask = tokens(2, 24), torch.ones(2, 24, dtype=torch.int64)
    mask[1, :3] = mask[0, 10:12] = 0
    found = []
    for middle in (model, torch.compile(model, backend="eager")):
        cache = nsa_flex.NSACache(model, max_length=32)
        with torch.no_grad():
            for call, begin, end in ((model, 0, 10), (middle, 10, 16), (model, 16, 24)):
                told = {"attention_mask": mask[:, :end], "past_key_values": cache}
                logits = call(ids[:, begin:end], **told).logits
        found.append(logits)
    assert relative_error(found[1], found[0]) < 1e-5


def test_a_mask_that_hides_as_many_other_tokens_is_refused(model: nn.Module) -> None:
    cache, ids, mask = nsa_flex.NSACache(model), tokens(2, 20), torch.ones(2, 23)
    mask[1, :2] = 0
    other = mask.roll(1, 1)
    with torch.no_grad():
        model(ids, attention_mask=mask[:, :20], past_key_values=cache)
        with pytest.raises(RuntimeError, match="hides or shows other cached tokens"):
            model(ids[:, :3], attention_mask=other, past_key_values=cache)
        model(ids[:, :3], attention_mask=mask, past_key_values=copy.deepcopy(cache))


def test_a_cache_from_a_file_goes_on(model: nn.Module) -> None:
    """Its φ is a copy of the model's: compared once, then the model's own."""
    cache, ids = nsa_flex.NSACache(moved(model)), tokens(2, 40)
    step(model, ids[:, :30], cache)
    cache = pickle.loads(pickle.dumps(cache))
    assert cache.layers[0].compress_key is not model.model.layers[0].self_attn.nsa.compress_key
    found = step(model, ids[:, 30:], cache)
    assert relative_error(found, model(ids, use_cache=False).logits[:, 30:]) < 1e-12
    assert cache.layers[0].compress_key is model.model.layers[0].self_attn.nsa.compress_key


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, "selected", "repeated", "reordered"])
def test_cropping_takes_back_padding_as_padding(
    model: nn.Module, kind: str, rows: str | None
) -> None:
    """Columns, as transformers' own caches do: rows that end with padding lose fewer tokens."""
    ids, mask = tokens(2, 40), torch.ones(2, 40, dtype=torch.int64)
    mask[0, :3], mask[1, 25:] = 0, 0
    real = [ids[0, 3:30], ids[1, :25]]
    cache = cache_of(moved(model), kind)
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=cache)
    if rows == "selected":
        cache.batch_select_indices(torch.tensor([1]))
        real = real[1:]
    elif rows == "repeated":
        cache.batch_repeat_interleave(2)
        real = [real[0], real[0], real[1], real[1]]
    elif rows == "reordered":
        cache.reorder_cache(torch.tensor([1, 0]))
        real = real[::-1]
    following = tokens(len(real), 6)
    step(model, following, cache)
    for layer in cache.layers:
        layer.crop(-16)  # the six, and ten columns before
    found = step(model, following, cache)
    for row, before in enumerate(real):
        alone = torch.cat((before, following[row]))[None]
        with torch.no_grad():
            expected = model(alone, use_cache=False).logits[:, len(before) :]
        assert relative_error(found[row : row + 1], expected) < 1e-12


def test_a_mask_counts_once_its_call_is_through(model: nn.Module) -> None:
    """Not that of a call that failed; and as it was then, whatever becomes of its memory."""
    moved(model)
    cache, ids, mask = transformers.DynamicCache(), tokens(2, 40), torch.ones(2, 40).long()
    mask[1, 25:30] = 0
    with torch.no_grad():
        model(ids[:, :30], attention_mask=mask[:, :30], past_key_values=cache)
        hidden = mask.clone()
        hidden[1, 30:36] = 0
        handle = model.model.layers[1].mlp.register_forward_pre_hook(_fail)
        with pytest.raises(RuntimeError, match="on the way"):
            model(ids[:, 30:36], attention_mask=hidden[:, :36], past_key_values=cache)
        handle.remove()
        model(ids[:, 30:36], past_key_values=cache)
        mask.fill_(1)
    for layer in cache.layers:
        layer.crop(-8)
        assert layer.lengths.tolist() == [28, 25]


def _fail(*_: Any) -> None:
    raise RuntimeError("on the way")


@pytest.mark.parametrize("max_length", [None, 60])
def test_a_refused_crop_leaves_all_layers(max_length: int | None) -> None:
    model = moved(nsa_flex.patch(tiny_model("qwen2-sliding"), NSA))
    cache, ids = nsa_flex.NSACache(model, max_length=max_length), tokens(2, 50)
    step(model, ids[:, :40], cache)
    with pytest.raises(ValueError, match=r"a \w+SlidingWindowLayer of the cache cannot crop"):
        cache.crop(-5)
    found = step(model, ids[:, 40:], cache)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 40:]
    assert relative_error(found, expected) < 1e-12


def test_a_plain_cache_goes_on_under_autocast() -> None:
    model, ids = nsa_flex.patch(tiny_model(), NSA), tokens(2, 50)
    cache = transformers.DynamicCache()
    with torch.autocast("cpu", torch.bfloat16):
        model(ids[:, :30], past_key_values=cache)  # with gradients: the layers stay transformers'
        found = step(model, ids[:, 30:], cache)
        expected = model(ids, use_cache=False).logits[:, 30:]
    assert isinstance(cache.layers[0], LayerCache)
    assert cache.layers[0].dtype == torch.bfloat16
    assert relative_error(found, expected) < 0.03


def _lowered(model: nn.Module) -> None:
    model.config.num_hidden_layers = 2


def _taken_out(model: nn.Module) -> None:
    model.model.layers = model.model.layers[:2]


@pytest.mark.parametrize("shorten", [_lowered, _taken_out])
@pytest.mark.parametrize("own_cache", [False, True])
def test_a_decoder_that_runs_fewer_layers(shorten: Any, own_cache: bool) -> None:
    model, ids = moved(nsa_flex.patch(tiny_model(num_hidden_layers=3), NSA)), tokens(2, 40)
    cache: Any = nsa_flex.NSACache(model) if own_cache else transformers.DynamicCache()
    shorten(model)
    step(model, ids[:, :30], cache)
    found = step(model, ids[:, 30:], cache)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 30:]
    assert relative_error(found, expected) < 1e-12


def test_drafts_by_the_first_layers_are_those_of_all() -> None:
    model, ids = moved(nsa_flex.patch(tiny_model(num_hidden_layers=3), NSA)), tokens(1, 40)
    expected = model.generate(ids, max_new_tokens=8, **GREEDY)
    found = model.generate(ids, max_new_tokens=8, assistant_early_exit=1, **GREEDY)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("padding", [0, 7])
def test_a_cache_made_of_the_keys_and_values_of_another_goes_on(padding: int) -> None:
    model, ids = moved(nsa_flex.patch(tiny_model().eval(), NSA)), tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    cache = transformers.DynamicCache()
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits[:, 50:]
        model(ids[:, :50], attention_mask=mask[:, :50], past_key_values=cache)
        copies = [
            transformers.DynamicCache([(layer.keys, layer.values) for layer in cache.layers]),
            transformers.DynamicCache([tuple(each)[:2] for each in cache]),
        ]
        for each in copies:
            assert each.get_seq_length() == 50
            found = model(ids[:, 50:], attention_mask=mask, past_key_values=each).logits
            assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_inference_mode_goes_on_under_no_grad(kind: str) -> None:
    model, ids = moved(nsa_flex.patch(tiny_model().eval(), NSA)), tokens(1, 60)
    cache = cache_of(model, kind)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    with torch.inference_mode():
        model(ids[:, :40], past_key_values=cache)
    found = [step(model, part, cache) for part in (ids[:, 40:41], ids[:, 41:])]
    assert relative_error(torch.cat(found, 1), expected[:, 40:]) < 1e-12
