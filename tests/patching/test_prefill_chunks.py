"""Chunks of a prefill, prefixes and long speculative steps: at an offset that the host knows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex import NSACache
from nsa_flex.hot_path import find_syncs
from patching.tiny_models import NSA, tiny_model
from patching.trained_model import lines, trained_model
from reference.counted import Operators

GREEDY: dict[str, Any] = {"do_sample": False}
STATIC: dict[str, Any] = {"cache_implementation": "static"}


class Graphs:
    """A backend of torch.compile that keeps the shapes of the tokens that each graph takes."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, ...]]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        integers = [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.int64]
        self.seen.append([tuple(x.shape) for x in integers if x.dim() == 2])
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self  # `generate` copies its config

    def config(self) -> Any:
        """What makes `generate` compile on a CPU too."""
        made = transformers.CompileConfig(backend=self, mode=None)
        made._compile_all_devices = True
        return made


@pytest.fixture
def model() -> nn.Module:
    return trained_model()


@pytest.fixture(autouse=True)
def _nothing_compiled_is_kept(model: nn.Module) -> Iterator[None]:
    yield
    for name in ("_compiled_call", "_last_compile_config", "_previous_max_cache_length"):
        vars(model).pop(name, None)
    torch._dynamo.reset()


def of_layers(*places: int) -> list[int]:
    """Offsets of the two layers of the model."""
    return [place for place in places for _ in range(2)]


@pytest.mark.kept(lambda way, masked: (way != "compiled") == masked)
@pytest.mark.parametrize("way", ["growing", "static", "compiled"])
@pytest.mark.parametrize("masked", [False, True])
def test_generate_runs_chunks_at_offsets_of_the_host(
    model: nn.Module, offsets: list[Any], way: str, masked: bool
) -> None:
    """Ints; a mask of ones too. What is compiled is the step alone."""
    ids, graphs = lines(110)[None], Graphs()
    expected = model.generate(ids, max_new_tokens=8, use_cache=False, **GREEDY)
    how = {} if way == "growing" else dict(STATIC)
    if way == "compiled":
        how["compile_config"] = graphs.config()
    if masked:
        how["attention_mask"] = torch.ones_like(ids)
    found = model.generate(ids, max_new_tokens=8, prefill_chunk_size=40, **how, **GREEDY)
    assert torch.equal(found, expected)
    assert all(type(each) is int for each in offsets)
    assert offsets == of_layers(0, 40, 80)
    assert len(graphs.seen) == (way == "compiled")
    assert all((1, 1) in shapes for shapes in graphs.seen)


def test_a_short_last_chunk_is_not_compiled(model: nn.Module) -> None:
    ids, graphs = lines(90)[None], Graphs()
    expected = model.generate(ids, max_new_tokens=4, use_cache=False, **GREEDY)
    how = {"prefill_chunk_size": 40, "compile_config": graphs.config(), **STATIC, **GREEDY}
    assert torch.equal(model.generate(ids, max_new_tokens=4, **how), expected)
    assert len(graphs.seen) == 1
    assert (1, 1) in graphs.seen[0]


def test_chunks_of_compiled_generation_run_the_operators_of_eager_ones(model: nn.Module) -> None:
    ids, counted = lines(110)[None], []
    for how in ({"compile_config": Graphs().config()}, {"disable_compile": True}):
        with Operators() as operators:
            model.generate(ids, max_new_tokens=1, prefill_chunk_size=40, **how, **STATIC, **GREEDY)
        counted.append(operators.seen)
    assert counted[0] == counted[1]
    assert counted[0]


def test_a_prefix_goes_on_at_an_offset_of_the_host_after_compiled_steps(
    model: nn.Module, offsets: list[Any]
) -> None:
    """In every layer: the first asks the device, and the others take its answer."""
    ids, cache = lines(130)[None], NSACache(model, max_length=140)
    how = {"past_key_values": cache, "compile_config": Graphs().config(), **GREEDY}
    first = model.generate(ids[:, :60], max_new_tokens=10, **how)
    assert [layer.known_length for layer in cache.layers] == [None, None]
    assert torch.equal(first, ids[:, :70])  # the text is known by heart
    offsets.clear()
    found = model.generate(ids, max_new_tokens=5, prefill_chunk_size=30, **how)
    expected = model.generate(ids, max_new_tokens=5, use_cache=False, **GREEDY)
    assert torch.equal(found, expected)
    assert all(type(each) is int for each in offsets)
    assert offsets == of_layers(69, 99)


@pytest.mark.parametrize("static", [False, True])
def test_a_chunk_waits_for_nothing(model: nn.Module, offsets: list[Any], static: bool) -> None:
    ids, cache = lines(90)[None], NSACache(model, max_length=100 if static else None)
    with torch.no_grad():
        model(ids[:, :40], past_key_values=cache)

        def chunk_and_back() -> None:
            model(ids[:, 40:], past_key_values=cache)
            cache.crop(-50)

        assert find_syncs(chunk_and_back) == []
    assert set(offsets) == {0, 40}
    assert all(type(each) is int for each in offsets)


def test_more_guesses_than_a_step_takes_are_a_chunk(model: nn.Module, offsets: list[Any]) -> None:
    ids = lines(100)[None]
    expected = model.generate(ids, max_new_tokens=30, use_cache=False, **GREEDY)
    found = model.generate(ids, max_new_tokens=30, prompt_lookup_num_tokens=24, **GREEDY)
    assert torch.equal(found, expected)
    assert offsets[:2] == [0, 0]
    assert len(offsets) > 2
    assert all(type(each) is int and each >= 100 for each in offsets[2:])


def test_patched_models_alone_keep_chunks_out_of_compiled_code() -> None:
    model = nsa_flex.patch(tiny_model(attn_implementation="sdpa").eval(), NSA)
    twin = copy.deepcopy(model)
    assert twin.get_compiled_call.args[0] is twin
    model.set_attn_implementation("sdpa")  # for a while
    assert model.get_compiled_call(None) is model._compiled_call
    nsa_flex.unpatch(model)
    for name in ("get_compiled_call", "_compiled_call"):
        assert name not in vars(nsa_flex.unpatch(twin))
        assert name not in vars(model.model)
    assert "get_compiled_call" not in vars(model)
