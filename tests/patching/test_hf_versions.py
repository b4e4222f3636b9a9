"""What transformers changed from version to version, on whichever is installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import and_masks, causal_mask_function, or_masks

import nsa_flex
from nsa_flex.cache import LayerCache
from nsa_flex.patching import hf_versions
from nsa_flex.patching.hf_versions import CACHE, is_custom_mask
from patching.tiny_models import NSA, tiny_model, tokens

IDS = tokens(1, 40)
IS_RENAMED = CACHE == "cache"  # since 5.24
GREEDY = {"do_sample": False, "max_new_tokens": 6}


def patched() -> Any:
    return nsa_flex.patch(tiny_model(), NSA)


def holds_nsa(cache: Any) -> bool:
    return all(isinstance(layer, LayerCache) for layer in cache.layers)


@pytest.mark.parametrize("part", ["model", "decoder"])
@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_a_cache_by_either_name(part: str, name: str) -> None:
    model = patched()
    called = model if part == "model" else model.model
    with torch.no_grad():
        expected = called(IDS, use_cache=False)[0][:, 30:]
        cache = transformers.DynamicCache(config=model.config)
        called(IDS[:, :30], **{name: cache})
        found = called(IDS[:, 30:], **{name: cache})
    assert found.past_key_values is cache
    assert found[CACHE] is cache
    assert holds_nsa(cache)
    torch.testing.assert_close(found[0], expected)


@pytest.mark.parametrize("name", sorted({CACHE, "past_key_values"}))
def test_generate_takes_a_cache_by_either_name(name: str) -> None:
    model = patched()
    cache = nsa_flex.NSACache(model)
    found = model.generate(IDS, **{name: cache}, **GREEDY, return_dict_in_generate=True)
    assert found.past_key_values is cache
    assert cache.get_seq_length() == 45
    assert torch.equal(found.sequences, model.generate(IDS, use_cache=False, **GREEDY))


def test_generation_while_a_model_trains_with_checkpoints() -> None:
    """Before 5.24 layers that would checkpoint lose the cache, and dense tokens go wrong."""
    model = patched()
    expected = model.generate(IDS, use_cache=False, **GREEDY)
    model.train().gradient_checkpointing_enable()
    if IS_RENAMED:
        assert torch.equal(model.generate(IDS, **GREEDY), expected)
    else:
        with pytest.raises(ValueError, match="a cache with gradient checkpointing: leave"):
            model.generate(IDS, **GREEDY)


def test_a_cache_in_a_call_that_checkpoints() -> None:
    model = patched().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="a cache with gradient checkpointing: leave the cache"):
        model(IDS, **{CACHE: nsa_flex.NSACache(model)})


@pytest.mark.skipif(
    not getattr(StaticLayer, "is_croppable", False), reason="transformers refuses static caches"
)
def test_guesses_are_taken_back_from_a_static_cache_of_transformers() -> None:
    model = patched()
    how = {"cache_implementation": "static", "assistant_model": tiny_model(), **GREEDY}
    found = model.generate(IDS, **how, return_dict_in_generate=True)
    assert torch.equal(found.sequences, model.generate(IDS, use_cache=False, **GREEDY))
    assert holds_nsa(found.past_key_values)


def test_tokens_are_taken_back_beside_static_sliding_layers_that_keep_all() -> None:
    model = nsa_flex.patch(tiny_model("qwen2-sliding", sliding_window=64), NSA)
    cache = nsa_flex.NSACache(model, max_length=60)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits[:, 30:]
        model(IDS[:, :35], **{CACHE: cache})
        if getattr(StaticLayer, "is_croppable", False):
            cache.crop(-5)
        else:
            with pytest.raises(
                ValueError, match="SlidingWindowLayer of the cache cannot crop: it"
            ):
                cache.crop(-5)
            return
        found = model(IDS[:, 30:], **{CACHE: cache}).logits
    torch.testing.assert_close(found, expected)


def test_a_mask_function_that_looks_ahead_inside_another() -> None:
    ahead = or_masks(causal_mask_function, lambda *places: torch.tensor(True))
    assert is_custom_mask(ahead)
    assert is_custom_mask(and_masks(ahead, causal_mask_function))
    assert not is_custom_mask(and_masks(causal_mask_function, causal_mask_function))
    assert not is_custom_mask(None)


@pytest.mark.skipif(not IS_RENAMED, reason="the overlay is outermost")
def test_image_tokens_that_look_ahead_in_packed_documents_are_refused() -> None:
    config = patched().config
    places = torch.arange(8)[None] % 4
    with pytest.raises(ValueError, match=r"custom mask function .* is not supported"):
        transformers.masking_utils.create_causal_mask(
            config,
            torch.zeros(1, 8, 32),
            None,
            None,
            position_ids=places,
            block_sequence_ids=torch.zeros(1, 8, dtype=torch.long),
        )


def test_a_decoder_of_a_version_to_come_is_called_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_versions, "CACHE", "memory")
    model = tiny_model()
    message = (
        rf"^the attention of LlamaAttention in transformers {transformers.__version__} is not one "
        r"that this version of nsa_flex knows: LlamaModel\.forward has no memory$"
    )
    with pytest.raises(ValueError, match=message):
        nsa_flex.patch(model, NSA)
    assert not any("nsa" in name for name, _ in model.named_modules())


class PagedAttentionCache(nn.Module):
    """As an engine without allocators makes it."""


def test_an_engine_that_was_set_up_before_the_patch() -> None:
    with pytest.raises(ValueError, match="has a PagedAttentionCache, which keeps no compressed"):
        patched().model(IDS, cache=PagedAttentionCache())
