"""Packed documents in a patched decoder: each as if alone, at the cost of a few moves."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import nsa_flex
from nsa_flex.hot_path import find_graph_breaks, find_syncs
from patching.tiny_models import NSA, relative_error, tiny_model, tokens
from reference.counted import Operators
from reference.modes import no_synchronization

WAYS = ("position_ids", "cu_seq_lens", "both")
LENGTHS = [1, 13, 8, 0, 30, 1, 0, 16]


def how(way: str, lengths: list[int]) -> dict[str, Any]:
    """What tells a patched decoder of the documents, in each of the ways that collators use."""
    bounds = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = max(lengths)
    by_bounds = {
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    by_positions = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    calls = {"position_ids": by_positions, "cu_seq_lens": by_bounds}
    return {**calls.get(way, {**by_bounds, **by_positions}), "use_cache": False}


def trained_like() -> nn.Module:
    """A patched Llama in float64 whose φ is no mean, which tells where a document begins."""
    model = nsa_flex.patch(tiny_model(), NSA).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".nsa." in name:
                parameter.normal_(std=0.3)
    return model


def outcome(model: nn.Module, calls: list[tuple[Tensor, dict[str, Any]]]) -> tuple[Tensor, Tensor]:
    """Logits of all calls (tokens, V), and the gradient of their squares in all parameters."""
    model.zero_grad()
    found = torch.cat([model(ids, **call).logits[0] for ids, call in calls])
    found.square().sum().backward()
    gradient = [x.grad.flatten() for x in model.parameters() if x.grad is not None]
    return found.detach(), torch.cat(gradient)


@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_each_document_alone(way: str) -> None:
    model, ids = trained_like(), tokens(1, sum(LENGTHS))
    alone = [(part, {"use_cache": False}) for part in ids.split(LENGTHS, 1) if part.numel()]
    expected = outcome(model, alone)
    found = outcome(model, [(ids, how(way, LENGTHS))])
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-10


@pytest.mark.parametrize("patched", ["all layers", "one layer"])
@pytest.mark.parametrize("way", ["cu_seq_lens", "both"])
def test_a_mask_of_ones_beside_the_bounds_changes_nothing(way: str, patched: str) -> None:
    """As a tokenizer makes it, and a collator may keep it."""
    model, ids = tiny_model().double(), tokens(1, sum(LENGTHS))
    only = (lambda layer, _: layer.layer_idx == 0) if patched == "one layer" else None
    nsa_flex.patch(model, NSA, filter_fn=only)
    call = how(way, LENGTHS)
    rounding = 1e-6 if only else 1e-10  # transformers' own layers take softmax in float32
    with torch.no_grad():
        alone = [model(x, use_cache=False).logits for x in ids.split(LENGTHS, 1) if x.numel()]
        found = model(ids, attention_mask=torch.ones_like(ids), **call).logits
        assert relative_error(found, torch.cat(alone, 1)) < rounding
        hiding = torch.ones_like(ids)
        hiding[0, 5] = 0
        with pytest.raises(RuntimeError, match="hides tokens of a row whose documents"):
            model(ids, attention_mask=hiding, **call)
        for shape in ((2, ids.shape[1]), (1, ids.shape[1] + 3)):
            with pytest.raises(
                ValueError, match=r"attention_mask has shape .* beside cu_seq_lens"
            ):
                model(ids, attention_mask=torch.ones(shape), **call)
        other = {**call, "cu_seq_lens_k": call["cu_seq_lens_k"] + 1}
        with pytest.raises(RuntimeError, match="cu_seq_lens_k differs from cu_seq_lens_q"):
            model(ids, **other)


def test_a_mask_that_transformers_prepared_must_hide_nothing_either() -> None:
    model, ids = nsa_flex.patch(tiny_model("qwen3"), NSA), tokens(1, sum(LENGTHS))
    call, mask = how("both", LENGTHS), torch.ones_like(ids)
    found = model(ids, attention_mask={"full_attention": mask}, **call).logits
    assert torch.equal(found, model(ids, **call).logits)
    mask[0, 5] = 0
    with pytest.raises(RuntimeError, match="hides tokens of a row whose documents"):
        model(ids, attention_mask={"full_attention": mask}, **call)


@settings(max_examples=6)
@given(lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(sum))
def test_any_packing_in_any_way(lengths: list[int]) -> None:
    torch.manual_seed(sum(lengths))
    model, ids = trained_like(), tokens(1, sum(lengths))
    with torch.no_grad():
        alone = [model(x, use_cache=False).logits for x in ids.split(lengths, 1) if x.numel()]
        for way in WAYS:
            found = model(ids, **how(way, lengths)).logits
            assert relative_error(found, torch.cat(alone, 1)) < 1e-10


def test_the_length_of_the_longest_document_is_handed_on() -> None:
    """Kernels of short documents depend on it; a wrong one is an error."""
    model, ids = nsa_flex.patch(tiny_model(), NSA), tokens(1, sum(LENGTHS))
    call = how("cu_seq_lens", LENGTHS)
    expected = model(ids, **{**call, "max_length_q": torch.tensor(1)}).logits  # not read
    assert torch.equal(model(ids, **call).logits, expected)
    with pytest.raises(RuntimeError, match="document that is longer than max_document_length"):
        model(ids, **{**call, "max_length_q": max(LENGTHS) - 1})


@pytest.mark.kept(lambda way: way == "cu_seq_lens")
@pytest.mark.parametrize("way", WAYS)
def test_one_graph_for_any_packing(way: str) -> None:
    model = nsa_flex.patch(tiny_model(), NSA)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ([23, 40, 1], [1, 1, 62], [0, 64, 0], [64 - 16, 8, 8]):
        lengths = lengths if way != "position_ids" else [n for n in lengths if n]
        ids, call = tokens(1, 64), how(way, lengths)
        call.pop("max_length_q", None), call.pop("max_length_k", None)
        found, expected = compiled(ids, **call).logits, model(ids, **call).logits
        assert relative_error(found.detach(), expected.detach()) < 1e-5
    assert counter.frame_count == 1


@pytest.mark.kept(lambda way: way == "position_ids")
@pytest.mark.parametrize("way", WAYS)
def test_a_decoder_without_its_head_compiles(way: str, device: torch.device) -> None:
    """Its hook is a graph by itself then, which returns what it found out of the documents."""
    lengths = [40, 0, 27]
    decoder = nsa_flex.patch(tiny_model(), NSA).get_decoder().to(device)
    call = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in how(way, lengths).items()
    }
    ids = tokens(1, sum(lengths)).to(device)
    want = decoder(ids, **call).last_hidden_state
    found = torch.compile(decoder, fullgraph=True)(ids, **call).last_hidden_state
    assert relative_error(found, want) < 1e-5


@pytest.mark.kept(lambda way: way == "cu_seq_lens")
@pytest.mark.parametrize("way", WAYS)
def test_no_host_sync_and_no_graph_break(way: str) -> None:
    model, ids = nsa_flex.patch(tiny_model(), NSA).train(), tokens(1, sum(LENGTHS))
    call = how(way, LENGTHS)
    assert find_syncs(model, ids, **call) == []
    assert find_graph_breaks(model, ids, **call) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_moves_five_tensors_and_their_gradients_once(way: str) -> None:
    model, ids = nsa_flex.patch(tiny_model(), NSA).train(), tokens(1, sum(LENGTHS))
    counted = []
    for call in ({"use_cache": False}, how(way, LENGTHS)):
        with Operators() as operators:
            model(ids, **call).logits.sum().backward()
        counted.append(operators.seen)
    more = counted[1] - counted[0]
    layers = len(model.model.layers)
    assert more["aten.index_select.default"] == 2 * 5 * layers  # q, k, v, gates and the output
    adding = {name for name in more if "index_add" in name or "index_put" in name}
    assert not adding, "a gradient is added up where it could be moved"


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_cuda_a_packed_step_waits_for_nothing_and_errs_as_documents_alone_do(way: str) -> None:
    lengths = [1, 700, 64, 0, 33, 900]
    sizes = {"head_dim": 64, "max_position_embeddings": 2048}
    config = nsa_flex.NSAConfig(num_selected_blocks=4, compression="mlp")
    exact = nsa_flex.patch(tiny_model(**sizes), config)
    with torch.no_grad():
        for name, parameter in exact.named_parameters():
            if ".nsa." in name:
                parameter.normal_(std=0.05)
    ours = copy.deepcopy(exact).cuda().bfloat16()
    ids = tokens(1, sum(lengths))
    parts = [part for part in ids.split(lengths, 1) if part.numel()]
    want = outcome(exact.double(), [(part, {"use_cache": False}) for part in parts])
    alone = outcome(ours, [(part.cuda(), {"use_cache": False}) for part in parts])
    ids, call = ids.cuda(), how(way, lengths)
    call = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in call.items()}
    outcome(ours, [(ids, call)])  # what is made on the first call may wait
    torch.cuda.synchronize()
    with no_synchronization():
        found = outcome(ours, [(ids, call)])
    for packed, each, exactly in zip(found, alone, want, strict=True):
        allowed = 2 * relative_error(each.double().cpu(), exactly)
        assert relative_error(packed.double().cpu(), exactly) <= allowed
