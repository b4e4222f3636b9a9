"""Families whose decoder or layers drop keyword arguments, and Falcon, which attends by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import nsa_flex
from nsa_flex.hot_path import count_graphs, find_graph_breaks, find_syncs
from patching.tiny_models import NSA, relative_error, tiny_model, tokens

DROPPED = ["stablelm", "nemotron", "falcon-40b"]

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"attention_mask": (torch.arange(40) >= torch.tensor([[0], [7]])).long()},
    "packed": {"position_ids": (torch.arange(40) % 20)[None].expand(2, -1)},
}


@torch.no_grad()
def logits(model: nn.Module, *args: torch.Tensor, **call: Any) -> torch.Tensor:
    return model(*args, **call).logits


@pytest.mark.parametrize("family", DROPPED)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(family: str, reentrant: bool) -> None:
    model = nsa_flex.patch(tiny_model(family).train(), NSA)
    twin = copy.deepcopy(model)
    twin.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = tokens(2, 40)
    losses = []
    # The second call comes before the backward pass of the first recomputes its layers.
    for each in (model, twin):
        padded = each(ids, labels=ids, use_cache=False, **CALLS["padded"]).loss
        packed = each(ids, labels=ids, use_cache=False, **CALLS["packed"]).loss
        (padded + packed).backward()
        losses.append(padded + packed)
    assert torch.equal(*losses)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative_error(theirs.grad, ours.grad) < 1e-6


EACH_ONCE = [("plain", "nemotron"), ("padded", "stablelm"), ("packed", "falcon-40b")]


@pytest.mark.kept(lambda call, family: (call, family) in EACH_ONCE)
@pytest.mark.parametrize("family", DROPPED)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_is_one_graph_and_waits_for_no_tensor(family: str, call: str) -> None:
    model, ids = nsa_flex.patch(tiny_model(family), NSA), tokens(2, 40)
    assert find_graph_breaks(model, ids, use_cache=False, **CALLS[call]) == []
    assert find_syncs(model, ids, use_cache=False, **CALLS[call]) == []


@pytest.mark.kept(lambda family: family == "falcon-40b")
@pytest.mark.parametrize("family", DROPPED)
def test_compiled_calls_give_what_eager_ones_give_without_recompilation(family: str) -> None:
    model = nsa_flex.patch(tiny_model(family), NSA)
    batches = [{"input_ids": tokens(2, 40), "use_cache": False, **CALLS["padded"]} for _ in "123"]
    assert count_graphs(model, batches).graphs == 1
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for batch in batches:
        found, expected = logits(compiled, **batch), logits(model, **batch)
        real = batch["attention_mask"].bool()
        assert relative_error(found[real], expected[real]) < 1e-5


@pytest.mark.parametrize("family", DROPPED)
def test_a_layer_called_outside_its_decoder_is_an_error(family: str) -> None:
    model = nsa_flex.patch(tiny_model(family), NSA)
    decoder = model.base_model
    layer = decoder.layers[0] if hasattr(decoder, "layers") else decoder.h[0]
    hidden, places = torch.randn(1, 8, 32), torch.arange(8)[None]
    call = {"position_ids": places, "position_embeddings": decoder.rotary_emb(hidden, places)}
    if family.startswith("falcon"):
        call["alibi"] = None
    with pytest.raises(RuntimeError, match="called outside its decoder"):
        layer(hidden, attention_mask=None, **call)


@pytest.mark.parametrize("family", DROPPED)
def test_documents_told_by_their_boundaries(family: str) -> None:
    model = nsa_flex.patch(tiny_model(family), NSA)
    documents = [tokens(1, length) for length in (20, 41, 3)]
    boundaries = torch.tensor([0, 20, 61, 64], dtype=torch.int32)
    places = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    packed = {"position_ids": places, "cu_seq_lens_q": boundaries, "use_cache": False}
    found = logits(model, torch.cat(documents, 1), **packed)
    alone = torch.cat([logits(model, document) for document in documents], 1)
    assert relative_error(found, alone) < 1e-5


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("family", DROPPED)
def test_a_layer_left_out_keeps_its_attention(family: str, implementation: str) -> None:
    model = tiny_model(family, attn_implementation=implementation)
    mask = (torch.arange(30) >= torch.tensor([[0], [7]])).long()
    ids = tokens(2, 30) * mask
    expected = logits(model, ids, attention_mask=mask)
    nsa_flex.patch(model, NSA, init="dense", filter_fn=lambda module, name: ".1." in name)
    found = logits(model, ids, attention_mask=mask)
    assert relative_error(found[mask.bool()], expected[mask.bool()]) < 1e-5
    how = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    uncached = model.generate(ids, use_cache=False, **how)
    for kind in ("dynamic", "static"):
        assert torch.equal(model.generate(ids, cache_implementation=kind, **how), uncached)


@pytest.mark.parametrize("family", DROPPED)
def test_switching_the_attention_for_a_while(family: str) -> None:
    model, ids = tiny_model(family, attn_implementation="sdpa"), tokens(2, 40)
    dense = logits(model, ids)
    sparse = logits(nsa_flex.patch(model, NSA), ids)
    # `set_attn_implementation` declines for Falcon.
    model.config._attn_implementation = "sdpa"
    assert torch.equal(logits(model, ids), dense)
    model.config._attn_implementation = "nsa_flex"
    assert torch.equal(logits(model, ids), sparse)


def test_falcon_with_alibi_is_refused() -> None:
    model = tiny_model("falcon-7b", alibi=True)
    with pytest.raises(ValueError, match=r"FalconAttention has a position bias \(alibi=True\)"):
        nsa_flex.patch(model, NSA)
    assert not any("nsa" in name for name, _ in model.named_modules())


def test_falcon_whose_forward_is_wrapped_already_is_refused() -> None:
    model = tiny_model("falcon-7b")
    attention = model.transformer.h[1].self_attention
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=r"FalconAttention has a forward of its own"):
        nsa_flex.patch(model, NSA)
    assert not hasattr(model.transformer.h[0].self_attention, "nsa")


@pytest.mark.parametrize(("family", "num_kv_heads"), [("falcon-7b", 1), ("falcon-40b", 2)])
def test_falcon_caches_the_keys_of_a_group_once(family: str, num_kv_heads: int) -> None:
    model = nsa_flex.patch(tiny_model(family), NSA)
    with torch.no_grad():
        cache = model(tokens(1, 20), use_cache=True).past_key_values
    assert cache.layers[0].keys.shape[1] == num_kv_heads


def test_falcon_with_71_query_heads_on_one_key_head() -> None:
    model = tiny_model("falcon-7b", hidden_size=568, num_attention_heads=71)
    ids = tokens(2, 32)
    expected = logits(copy.deepcopy(model).double(), ids)
    nsa_flex.patch(model, NSA, init="dense")
    assert relative_error(logits(model, ids), expected) < 1e-5
    uncached, cached = (
        model.generate(ids[:1, :9], max_new_tokens=6, do_sample=False, use_cache=use)
        for use in (False, True)
    )
    assert torch.equal(cached, uncached)
