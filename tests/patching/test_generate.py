"""generate() on patched models: every way to decode gives what full passes give."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex import LayerCache, NSACache
from nsa_flex.cache import layer as cache_layer
from nsa_flex.decoding import MAX_STEP, decode_step
from nsa_flex.hot_path import count_graphs, find_syncs
from patching.tiny_models import NSA, moved, tiny_model, tokens
from patching.trained_model import lines, trained_model

GREEDY: dict[str, Any] = {"do_sample": False}


def padded_prompts() -> tuple[Tensor, Tensor]:
    """Three prompts of 40, 29 and 3 tokens, padded on the left, and their mask."""
    ids = torch.stack([lines(140)[start : start + 40] for start in (0, 31, 90)])
    mask = (torch.arange(40) >= torch.tensor([[0], [11], [37]])).long()
    return ids * mask, mask


@pytest.fixture
def model() -> nn.Module:
    return trained_model()


def caches_of(model: nn.Module, length: int) -> dict[str, Any]:
    """Every kind of cache that a caller may bring."""
    return {
        "dynamic": transformers.DynamicCache(config=model.config),
        "lazy": transformers.DynamicCache(),
        "static": transformers.StaticCache(config=model.config, max_cache_len=length),
        "nsa": NSACache(model),
        "nsa-static": NSACache(model, max_length=length),
    }


@pytest.mark.kept(lambda cache: cache == "static")
@pytest.mark.parametrize("cache", [None, "static"])
def test_512_greedy_tokens_are_those_of_the_full_pass(model: nn.Module, cache: str | None) -> None:
    ids = lines(40)[None]
    found = model.generate(ids, max_new_tokens=512, cache_implementation=cache, **GREEDY)
    logits = model(found, use_cache=False).logits[0, 39:-1]
    assert torch.equal(logits.argmax(-1), found[0, 40:])
    best = logits.topk(2).values
    assert (best[:, 0] - best[:, 1]).min() > 1e-6  # decided, not rounded


WAYS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "static": {**GREEDY, "cache_implementation": "static"},
    "chunks": {**GREEDY, "prefill_chunk_size": 17},
    "static chunks": {**GREEDY, "cache_implementation": "static", "prefill_chunk_size": 9},
    "sampling": {"do_sample": True, "temperature": 3.0, "top_k": 0},
    "static sampling": {"do_sample": True, "top_k": 5, "cache_implementation": "static"},
    "beams": {"num_beams": 3, "do_sample": False},
    "static beams": {"num_beams": 3, "do_sample": False, "cache_implementation": "static"},
    "beam sampling": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_padded_batch_gives_what_full_passes_give(model: nn.Module, way: str) -> None:
    ids, mask = padded_prompts()
    how = {"max_new_tokens": 14, "attention_mask": mask, **WAYS[way]}
    cached = ("cache_implementation", "prefill_chunk_size")
    plain = {name: value for name, value in how.items() if name not in cached}
    torch.manual_seed(3)
    expected = model.generate(ids, use_cache=False, **plain)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, **how), expected)


def assisted(model: nn.Module, helper: str) -> dict[str, Any]:
    """Arguments of `generate`."""
    if helper == "prompt lookup":
        return {"prompt_lookup_num_tokens": 5}
    # Right but for one of two letters, which it takes for each other: tokens are taken back.
    assistant = copy.deepcopy(model).float()
    with torch.no_grad():
        assistant.lm_head.weight[[2, 3]] = assistant.lm_head.weight[[3, 2]]
    return {"assistant_model": assistant}


@pytest.mark.parametrize("max_length", [None, 120])
@pytest.mark.parametrize("helper", ["assistant", "prompt lookup"])
def test_assisted_generation(
    model: nn.Module, helper: str, max_length: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several tokens are checked by a step, and wrong ones are taken back, static or not."""
    ids = lines(50)[None]
    steps, taken_back = [], []

    def step(query: Tensor, *args: Any, **options: Any) -> Any:
        steps.append(query.shape[2])
        return decode_step(query, *args, **options)

    def crop(self: LayerCache, tokens_to_remove: int) -> None:
        taken_back.append(-tokens_to_remove)
        crop_layer(self, tokens_to_remove)

    crop_layer = LayerCache.crop
    expected = model.generate(ids, max_new_tokens=60, use_cache=False, **GREEDY)
    monkeypatch.setattr(cache_layer, "decode_step", step)
    monkeypatch.setattr(LayerCache, "crop", crop)
    cache = NSACache(model, max_length=max_length)
    how = {"past_key_values": cache, **assisted(model, helper)}
    found = model.generate(ids, max_new_tokens=60, **how, **GREEDY)
    assert torch.equal(found, expected)
    assert 1 < max(steps) <= MAX_STEP
    assert max(taken_back) > 0
    assert cache.layers[0].lengths.tolist() == [109]  # all but the token that came last


@pytest.mark.parametrize("kind", ["dynamic", "lazy", "static", "nsa", "nsa-static"])
def test_whoever_made_the_cache_it_holds_nsas_layers(model: nn.Module, kind: str) -> None:
    ids = lines(60)[None]
    cache = caches_of(model, 100)[kind]
    expected = model.generate(ids, max_new_tokens=30, use_cache=False, **GREEDY)
    first = model.generate(ids[:, :50], past_key_values=cache, max_new_tokens=10, **GREEDY)
    assert torch.equal(first, ids)  # the text is known by heart
    assert all(isinstance(layer, LayerCache) for layer in cache.layers)
    assert all(bool(layer.is_compileable) == ("static" in kind) for layer in cache.layers)
    found = model.generate(ids, past_key_values=cache, max_new_tokens=30, **GREEDY)
    assert torch.equal(found, expected)


def test_a_cache_that_was_filled_before_it_came(model: nn.Module) -> None:
    ids, mask = padded_prompts()
    new = torch.ones(3, 1, dtype=mask.dtype)
    longer = torch.cat((mask, new), 1)
    positions = (longer.cumsum(1) - 1).clamp(min=0)
    following = lines(3)[:, None]
    with torch.enable_grad():  # transformers' own layers: they keep gradients
        call = {"attention_mask": mask, "position_ids": positions[:, :-1], "use_cache": True}
        cache = model(ids, **call).past_key_values
    assert not any(isinstance(layer, LayerCache) for layer in cache.layers)
    with torch.no_grad():
        call = {"attention_mask": longer, "position_ids": positions[:, -1:]}
        found = model(following, past_key_values=cache, **call).logits
        call = {"attention_mask": longer, "position_ids": positions, "use_cache": False}
        expected = model(torch.cat((ids, following), 1), **call)
    assert all(isinstance(layer, LayerCache) for layer in cache.layers)
    assert cache.layers[0].lengths.tolist() == longer.sum(1).tolist()
    torch.testing.assert_close(found[:, 0], expected.logits[:, -1], rtol=0, atol=1e-10)


def test_one_prefix_goes_on_in_several_ways(model: nn.Module) -> None:
    prefix, length = lines(45)[None], 45
    endings = torch.stack([lines(80)[start : start + 9] for start in (50, 20, 60)])
    with torch.no_grad():
        whole = model(torch.cat((prefix.expand(3, -1), endings), 1), use_cache=False).logits
        cache = NSACache(model)
        model(prefix, past_key_values=cache)

        for row, ending in enumerate(endings):  # a copy of the prefix for each
            twin = copy.deepcopy(cache)
            found = model(ending[None], past_key_values=twin).logits[0]
            torch.testing.assert_close(found, whole[row, length:], rtol=0, atol=1e-10)
            assert twin.layers[0].compress_key is cache.layers[0].compress_key

        for row, ending in enumerate(endings):  # or taken back to the prefix
            found = model(ending[None], past_key_values=cache).logits[0]
            torch.testing.assert_close(found, whole[row, length:], rtol=0, atol=1e-10)
            cache.crop(-9)
        assert cache.get_seq_length() == length

        cache.batch_repeat_interleave(3)  # or all at once
        found = model(endings, past_key_values=cache).logits
        torch.testing.assert_close(found, whole[:, length:], rtol=0, atol=1e-10)
        cache.batch_select_indices(torch.tensor([2]))
        cache.reset()
        found = model(prefix, past_key_values=cache).logits
        torch.testing.assert_close(found, whole[:1, :length], rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["qwen2-sliding", "gemma3"])
@pytest.mark.parametrize("static", [False, True])
def test_layers_left_out_keep_transformers_caches(family: str, static: bool) -> None:
    model = nsa_flex.patch(tiny_model(family, attn_implementation="sdpa"), NSA)
    cache = NSACache(model, max_length=40 if static else None)
    kinds = {isinstance(layer, LayerCache) for layer in cache.layers}
    assert kinds == {True, False}
    ids = tokens(2, 20)
    expected = model.generate(ids, use_cache=False, max_new_tokens=12, **GREEDY)
    found = model.generate(ids, past_key_values=cache, max_new_tokens=12, **GREEDY)
    assert torch.equal(found, expected)
    memory = cache.memory()
    assert memory.raw > 0
    assert memory.other > 0


# What one step costs the host


@pytest.mark.parametrize("padding", [False, True])
def test_a_static_step_is_one_graph_whatever_the_length(model: nn.Module, padding: bool) -> None:
    ids, mask = padded_prompts()
    cache = NSACache(model, max_length=90)
    full = torch.nn.functional.pad(mask, (0, 50), value=1)
    told = {"attention_mask": mask} if padding else {}
    with torch.no_grad():
        model(ids, past_key_values=cache, **told)
        steps = []
        for place in range(40, 60):
            seen = (torch.arange(90) <= place) & (full != 0)
            step = {"position_ids": seen.sum(1, keepdim=True) - 1} if padding else {}
            step |= {"attention_mask": seen} if padding else {}
            steps.append({"input_ids": ids[:, :1], "past_key_values": cache, **step})
        report = count_graphs(model, steps)
        assert report.ok, report
        assert report.graphs == 1
        assert int(cache.get_seq_length()) == 60
        cache.crop(-20)

        def step_and_back() -> None:
            model(**steps[0])
            cache.crop(-1)

        assert find_syncs(step_and_back) == []


def test_a_growing_step_waits_for_nothing(model: nn.Module) -> None:
    ids, mask = padded_prompts()
    cache = NSACache(model)
    with torch.no_grad():
        model(ids, past_key_values=cache, attention_mask=mask)
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)

        def step_and_back() -> None:
            model(ids[:, :1], past_key_values=cache, attention_mask=longer)
            cache.crop(-1)

        assert find_syncs(step_and_back) == []


# Bad use


def contents(cache: Any) -> list[Tensor]:
    """Everything that a cache holds, copied."""
    kept = []
    for layer in cache.layers:
        if layer.is_initialized:
            kept += [x.clone() for x in (*layer.buffers.tensors, layer.lengths)]
            kept.append(torch.as_tensor(layer.get_seq_length()).clone())
    return kept


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda model, cache: model(lines(9)[None], past_key_values=cache),
            r"holds 40 of at most max_length=48 tokens: no room for 9 more",
        ),
        (
            lambda model, cache: model(lines(10).view(2, 5), past_key_values=cache),
            r"the call brings 2 rows, the cache holds 1",
        ),
        (
            lambda model, cache: copy.deepcopy(model).float()(
                lines(5)[None], past_key_values=cache
            ),
            r"filled with dtype torch.float64, the new tokens have dtype torch.float32",
        ),
        (
            lambda model, cache: copy.deepcopy(model).to("meta")(
                lines(5)[None].to("meta"), past_key_values=cache
            ),
            r"filled with device cpu, the new tokens have device meta",
        ),
        (lambda model, cache: cache.crop(-41), r"goes past the start: the cache holds 40 tokens"),
        (lambda model, cache: cache.crop(3), r"crop\(3\): pass a negative number"),
        (
            lambda model, cache: cache.reorder_cache(torch.tensor([0, 0])),
            r"beam_idx has shape \(2,\); expected \(1,\)",
        ),
        (
            lambda model, cache: model(
                lines(5)[None], past_key_values=cache, attention_mask=torch.ones(1, 60)
            ),
            r"attention_mask has shape \(1, 60\); expected .* 45 a row",
        ),
        (
            lambda model, cache: model(
                lines(5)[None],
                past_key_values=cache,
                attention_mask=(torch.arange(45) > 9)[None].long(),
            ),
            r"hides or shows other cached tokens than when they came in",
        ),
        (
            lambda model, cache: model(
                lines(5)[None], past_key_values=cache, position_ids=torch.zeros(1, 5).long()
            ),
            r"position_ids break the rule",
        ),
        (
            lambda model, cache: model(
                lines(5)[None],
                past_key_values=cache,
                position_ids=torch.tensor([[40, 41, 0, 1, 2]]),
            ),
            r"position_ids restart",
        ),
        (lambda model, cache: cache.layers[0].offload(), r"cannot be offloaded"),
    ],
)
@torch.no_grad()
def test_bad_use_is_named_and_leaves_the_cache(model: nn.Module, call: Any, message: str) -> None:
    cache = NSACache(model, max_length=48)
    model(lines(40)[None], past_key_values=cache)
    before = contents(cache)
    with pytest.raises((ValueError, RuntimeError), match=message):
        call(model, cache)
    assert all(map(torch.equal, contents(cache), before))
    following = model(lines(48)[None, 40:], past_key_values=cache).logits
    expected = model(lines(48)[None], use_cache=False).logits[:, 40:]
    torch.testing.assert_close(following, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("max_length", [None, 70])
@torch.no_grad()
def test_a_call_that_fails_on_the_way_leaves_the_cache(
    model: nn.Module, max_length: int | None
) -> None:
    cache, ids = NSACache(model, max_length=max_length), lines(60)[None]
    model(ids[:, :40], past_key_values=cache)

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    for length in (1, 20):
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, 20 : 20 + length], past_key_values=cache)
    hook.remove()
    assert int(cache.get_seq_length()) == 40
    found = model(ids[:, 40:], past_key_values=cache).logits
    expected = model(ids, use_cache=False).logits[:, 40:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_compiled_step_past_the_end_is_an_error(model: nn.Module) -> None:
    cache, ids = NSACache(model, max_length=42), lines(60)[None]
    model(ids[:, :40], past_key_values=cache)
    step = torch.compile(model, backend="aot_eager", fullgraph=True)
    for place in (40, 41):
        step(ids[:, place : place + 1], past_key_values=cache)
    before = contents(cache)
    with pytest.raises(RuntimeError, match="the cache is full: max_length=42"):
        step(ids[:, 42:43], past_key_values=cache)
    assert all(map(torch.equal, contents(cache), before))
    with pytest.raises(ValueError, match="holds 42 of at most max_length=42 tokens"):
        model(ids[:, 42:43], past_key_values=cache)


def test_gradients_do_not_pass_through_the_cache() -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    with pytest.raises(ValueError, match=r"carries no gradients: call under torch\.no_grad"):
        model(tokens(1, 20), past_key_values=NSACache(model))


@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
def test_caches_that_move_or_round_keys_are_refused(model: nn.Module, kind: str) -> None:
    class Rounded(transformers.cache_utils.DynamicLayer):
        pass

    cache = transformers.DynamicCache(config=model.config)
    if kind == "offloaded":
        cache.offloading = True
        message = "DynamicCache offloads keys and values"
    else:
        cache.layers[1] = Rounded()
        message = "layer 1 of the cache is a Rounded; NSA's keys and values are neither"
    with pytest.raises(ValueError, match=message):
        model.generate(lines(40)[None], past_key_values=cache, max_new_tokens=3, **GREEDY)
    assert not any(isinstance(layer, LayerCache) for layer in cache.layers)


def test_a_model_without_nsa_has_no_such_cache() -> None:
    with pytest.raises(ValueError, match=r"has no NSA layer: patch it first"):
        NSACache(tiny_model())
    model = nsa_flex.patch(tiny_model(attn_implementation="sdpa"), NSA)
    cache = NSACache(model)
    with torch.no_grad():
        model(tokens(1, 9), past_key_values=cache)
        model.set_attn_implementation("sdpa")
        with pytest.raises(ValueError, match="attention implementation is another now"):
            model(tokens(1, 1), past_key_values=cache)


def test_a_hook_on_gates_sees_them_in_every_phase() -> None:
    model, ids = moved(nsa_flex.patch(tiny_model(), NSA)), tokens(1, 40)
    seen = []
    for layer in model.model.layers:
        gates = layer.self_attn.nsa.gates
        gates.register_forward_hook(lambda _, args, out: (seen.append(type(out)), out * 0.5)[1])
    how = {"max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **how)
    for implementation in ("dynamic", "static"):
        found = model.generate(ids, cache_implementation=implementation, **how)
        assert torch.equal(found, expected)
    assert set(seen) == {torch.Tensor}


@pytest.mark.parametrize("left_out", ["layers.0.", "layers.1."])
@pytest.mark.parametrize("padding", [0, 5])
def test_static_caches_go_with_full_attention_that_stays(left_out: str, padding: int) -> None:
    model: Any = tiny_model()
    model.set_attn_implementation("sdpa")
    model = moved(nsa_flex.patch(model, NSA, filter_fn=lambda _, name: left_out not in name))
    ids = tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **how)
    for chunk in (None, 16):
        found = model.generate(ids, cache_implementation="static", prefill_chunk_size=chunk, **how)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dense", [True, False])
def test_past_its_maximum_dynamic_ntk_rotates_by_the_call(dense: bool) -> None:
    """Why the page on generation excepts it: not a matter of NSA."""
    config = tiny_model().config
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model, ids = transformers.LlamaForCausalLM(config).double().eval(), tokens(1, 80)
    if not dense:
        model = moved(nsa_flex.patch(model, NSA))
    with torch.no_grad():
        for length, agrees in ((60, True), (80, False)):
            cache = transformers.DynamicCache()
            parts = ids[:, :length].split(50, dim=1)
            found = torch.cat([model(x, past_key_values=cache).logits for x in parts], 1)
            expected = model(ids[:, :length], use_cache=False).logits
            assert torch.allclose(found, expected, rtol=0, atol=1e-9) == agrees
