"""Thousands of decode steps: nothing grows, compiles again or waits. Decoding on CUDA."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nsa_flex
from nsa_flex import NSAAttention, NSACache, NSAConfig
from nsa_flex.hot_path import find_syncs
from patching.tiny_models import NSA, relative_error, tiny_model
from patching.trained_model import lines, trained_model
from reference.accuracy import limit
from reference.modes import no_synchronization


def addresses(cache: Any) -> list[int]:
    """Where everything in a cache lies."""
    tensors = [x for layer in cache.layers for x in (*layer.buffers.tensors, layer.lengths)]
    return [x.data_ptr() for x in tensors]


@torch.no_grad()
def test_a_static_cache_stays_where_it_is_for_500_steps() -> None:
    layer = NSAAttention(16, 4, 2, config=replace(NSA, num_selected_blocks=6)).double()
    cache = layer.new_cache(max_length=600)
    x = torch.randn(2, 600, 16, dtype=torch.float64)
    layer(x[:, :40], cache=cache)
    holder = NSACache(layer)
    holder.layers = [cache]
    before, memory = addresses(holder), cache.memory()
    outputs = [layer(x[:, place : place + 1], cache=cache) for place in range(40, 540)]
    assert find_syncs(lambda: layer(x[:, 540:541], cache=cache)) == []
    assert (addresses(holder), cache.memory()) == (before, memory)
    expected = layer(x[:, :540])[:, 40:]
    assert relative_error(torch.cat(outputs, 1), expected) < 1e-12


# On CUDA


def bfloat16_layer(config: NSAConfig) -> NSAAttention:
    """A layer whose every part is random, on CUDA."""
    layer = NSAAttention(128, 8, 2, config=config)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    return layer.to("cuda", torch.bfloat16).requires_grad_(False)


@pytest.mark.long
@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "static"), [("mean", False), ("mlp", True)])
def test_any_chunks_are_one_call_on_cuda(kind: Any, static: bool) -> None:
    # So many blocks that all are chosen: rounding moves choices of bfloat16.
    config = NSAConfig(8, 4, 16, 32, window_size=20, compression=kind)
    layer = bfloat16_layer(config)
    exact = copy.deepcopy(layer).double().cpu()
    exact.backend = "dense"
    baseline = copy.deepcopy(layer)
    baseline.backend = "dense"
    x = torch.randn(3, 400, 128, device="cuda", dtype=torch.bfloat16)
    mask = torch.arange(400, device="cuda") >= torch.tensor([[0], [5], [210]], device="cuda")
    want = exact(x.double().cpu(), attention_mask=mask.cpu())
    base = baseline(x, attention_mask=mask)
    eager_error = relative_error(base.cpu(), want)
    # Prefills, speculative and single steps, of random lengths.
    lengths = [int(torch.randint(low, high, ())) for low, high in ((1, 200), (1, 3), (17, 60))]
    chunks = [*lengths, 16, *([1] * 30), int(torch.randint(2, 17, ()))]
    chunks.append(400 - sum(chunks))
    cache = layer.new_cache(max_length=400 if static else None)
    parts = [
        layer(part, cache=cache, attention_mask=real)
        for part, real in zip(x.split(chunks, 1), mask.split(chunks, 1), strict=True)
    ]
    error = relative_error(torch.cat(parts, 1).cpu(), want)
    assert error <= limit(eager_error, torch.bfloat16)
    assert cache.lengths.tolist() == mask.sum(1).tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [None, "static"])
def test_512_greedy_tokens_on_cuda(cache: str | None) -> None:
    model = copy.deepcopy(trained_model()).float().cuda()
    ids = lines(40)[None].cuda()
    how = {"max_new_tokens": 512, "do_sample": False, "cache_implementation": cache}
    found = model.generate(ids, **how)
    logits = model(found, use_cache=False).logits[0, 39:-1]
    assert torch.equal(logits.argmax(-1), found[0, 40:])


@pytest.mark.long
@pytest.mark.gpu
@torch.no_grad()
def test_10000_steps_in_one_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Constant memory, no recompilation, no wait, every step a replay of one graph."""
    from torch._dynamo.utils import counters

    config = NSAConfig(compression="mean", num_selected_blocks=8, window_size=128)
    model = nsa_flex.patch(
        tiny_model(hidden_size=128, num_hidden_layers=2, max_position_embeddings=16384), config
    )
    model = model.to("cuda", torch.bfloat16)
    cache = NSACache(model, max_length=10400)
    place = torch.tensor([[300], [300]], device="cuda")
    ids = torch.randint(2, 97, (2, 300), device="cuda")
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)

    def step(token: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits = compiled(token, past_key_values=cache, position_ids=place).logits
        place.add_(1)
        return logits[:, -1:].argmax(-1)

    for _ in range(20):
        token = step(token)
    torch.cuda.synchronize()
    memory, compiled_graphs = torch.cuda.memory_allocated(), counters["stats"]["unique_graphs"]
    with no_synchronization(), torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(10000):
            token = step(token)
    assert torch.cuda.memory_allocated() == memory
    assert counters["stats"]["unique_graphs"] == compiled_graphs == 1
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert cache.layers[0].lengths.tolist() == [10320, 10320]
