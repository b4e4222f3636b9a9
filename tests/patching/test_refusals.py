"""What a layer passes and NSA would ignore is refused by name, at patch or at the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nsa_flex
from nsa_flex.cache.incoming import IncomingBatch
from patching.tiny_models import NSA, tiny_model, tokens

IDS = tokens(2, 40)


def logits(model: nn.Module, ids: Tensor, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **arguments).logits


def with_forward(change: Callable[..., Any], family: str = "llama") -> nn.Module:
    """A patched model whose second attention module calls `change(forward, **arguments)`."""
    model = nsa_flex.patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    attention = model.model.layers[1].self_attn
    former = attention.forward
    attention.forward = lambda **arguments: change(former, **arguments)
    return model


# Masks


def test_a_mask_that_a_module_makes_of_its_own() -> None:
    def own_mask(forward: Any, attention_mask: Any, **rest: Any) -> Any:
        bias = torch.zeros(2, 4, 40, 40)
        return forward(attention_mask=bias, **rest)

    with pytest.raises(ValueError, match="LlamaAttention makes an attention mask of its own"):
        logits(with_forward(own_mask), IDS)


@pytest.mark.parametrize("heads", [1, 4])
def test_a_mask_that_a_decoder_layer_adds_to(heads: int) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(2, heads, 40, 40)}

    model.model.layers[0].register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match=r"given an attention mask of shape \(2, ., 40, 40\)"):
        logits(model, IDS)


def test_a_bias_of_each_head_is_refused_beside_masks_of_the_layers_left_out() -> None:
    chosen = {"filter_fn": lambda module, name: "layers.1" in name}
    model = nsa_flex.patch(tiny_model(), NSA, **chosen)
    logits(model, IDS)

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": torch.zeros(2, 4, 40, 40)}

    model.model.layers[1].register_forward_pre_hook(add, with_kwargs=True)
    with pytest.raises(ValueError, match=r"given an attention mask of shape \(2, 4, 40, 40\)"):
        logits(model, IDS)


# Keyword arguments


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("score_mod", r"a score modification \(score_mod\) is not something that NSA computes"),
        ("position_bias", r"a position bias \(position_bias\)"),
        ("sinks", r"attention sinks \(sinks\)"),
        ("topk_indices", r"keys chosen by an indexer \(topk_indices\)"),
        ("decay", "LlamaAttention passes decay to its attention, which NSA would ignore"),
    ],
)
def test_an_argument_that_a_layer_adds(argument: str, message: str) -> None:
    def add(forward: Any, **arguments: Any) -> Any:
        return forward(**arguments, **{argument: torch.zeros(2)})

    with pytest.raises(ValueError, match=message):
        logits(with_forward(add), IDS)


def test_an_argument_of_the_caller_goes_through() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    assert torch.equal(logits(model, IDS, remark="of the caller"), logits(model, IDS))


def test_a_window_that_the_config_does_not_tell() -> None:
    def narrow(forward: Any, **arguments: Any) -> Any:
        return forward(**arguments, sliding_window=8)

    with pytest.raises(ValueError, match=r"sees a limited context \(sliding_window=8\)"):
        logits(with_forward(narrow), IDS)


# Keys, values, tokens


class Attends:
    """A transformers attention function in the place of NSA's, which it calls by `how`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: Callable[..., Any]) -> None:
        from nsa_flex.patching import hf_attention

        def call(module: nn.Module, *tensors: Any, **named: Any) -> Any:
            return how(hf_attention.attention_forward, module, *tensors, **named)

        functions = hf_attention.AttentionInterface._global_mapping
        monkeypatch.setitem(functions, "nsa_flex", call)


def other_values(attend: Any, module: Any, query: Any, key: Any, value: Any, *rest: Any, **named):
    return attend(module, query, key, value + 1, *rest, **named)


def twice(attend: Any, *arguments: Any, **named: Any):
    attend(*arguments, **named)
    return attend(*arguments, **named)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (other_values, "LlamaAttention attends other keys or values than it put into the cache"),
        (twice, "LlamaAttention attends twice over what it put into the cache once"),
    ],
)
def test_keys_and_values_that_are_not_those_of_the_cache(
    how: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    cache = nsa_flex.NSACache(model)
    logits(model, IDS[:, :9], past_key_values=cache)
    Attends(monkeypatch, how)
    with pytest.raises(ValueError, match=message):
        logits(model, IDS[:, 9:10], past_key_values=cache)
    assert cache.get_seq_length() == 9
    monkeypatch.undo()
    found = logits(model, IDS[:, 9:10], past_key_values=cache)
    torch.testing.assert_close(found, logits(model, IDS[:, :10], use_cache=False)[:, 9:])


def test_a_module_that_is_used_twice_in_a_forward() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    model.model.layers[1].forward = model.model.layers[0].forward
    with pytest.raises(ValueError, match="given keys twice in one forward: a module that is used"):
        logits(model, IDS, past_key_values=nsa_flex.NSACache(model))


def test_keys_that_never_reached_the_cache() -> None:
    def elsewhere(forward: Any, past_key_values: Any, **rest: Any) -> Any:
        return forward(past_key_values=None, **rest)

    model = with_forward(elsewhere)
    with pytest.raises(ValueError, match="attends keys that it did not put into its layer"):
        logits(model, IDS, past_key_values=nsa_flex.NSACache(model))


def test_a_layer_cache_hands_out_once() -> None:
    layer = nsa_flex.patch(tiny_model(), NSA).model.layers[0].self_attn.nsa
    cache, key = layer.new_cache(), torch.randn(1, 2, 5, 8)
    with torch.no_grad():
        cache.expect(IncomingBatch(5))
        stored = cache.update(key, key)
        with pytest.raises(ValueError, match="given keys twice in one forward"):
            cache.update(key, key)
        cache.check_handed_back("Layer", *stored)
        cache.expect(IncomingBatch(5))
        cache.update(key, key)


def test_a_layer_that_attends_fewer_tokens_than_its_decoder_got(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def last(attend: Any, module: Any, query: Any, *rest: Any, **named: Any):
        return attend(module, query[:, :, -3:], *rest, **named)

    model = nsa_flex.patch(tiny_model(), NSA)
    Attends(monkeypatch, last)
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    with pytest.raises(ValueError, match=r"attends queries \(batch, tokens\) \(2, 3\), but .*40"):
        logits(model, IDS, attention_mask=mask, use_cache=False)
