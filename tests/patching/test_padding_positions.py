"""Padding without position_ids: each row is computed as its real tokens alone.

Rotation does not care where a row starts, but φ of rotated keys does, once it is no mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
import torch
import transformers
from torch import Tensor, nn

import nsa_flex
from nsa_flex.config import CompressionKind
from patching.tiny_models import NSA, moved, relative_error, tiny_model, tokens

GAP = [1] * 4 + [0] * 9 + [1] * 27
LEFT = [0] * 13 + [1] * 27
RIGHT = [1] * 27 + [0] * 13
MASK = torch.tensor([LEFT, GAP, RIGHT, [1] * 40])
IDS = tokens(4, 40)


def patched(family: str = "llama", kind: CompressionKind = "mlp") -> nn.Module:
    return moved(nsa_flex.patch(tiny_model(family), dataclasses.replace(NSA, compression=kind)))


def error(model: nn.Module, found: Tensor, mask: Tensor = MASK, ids: Tensor = IDS) -> float:
    """Of the real tokens, against each row alone."""
    worst = 0.0
    for row, real in zip(range(len(ids)), mask != 0, strict=True):
        with torch.no_grad():
            alone = model(ids[row, real][None], use_cache=False).logits[0]
        assert found.dtype == torch.float64
        worst = max(worst, relative_error(found[row, real].detach(), alone))
    return worst


@pytest.mark.parametrize("kind", get_args(CompressionKind))
def test_rows_are_as_alone(kind: CompressionKind) -> None:
    model = patched(kind=kind)
    with torch.no_grad():
        found = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert error(model, found) < 1e-10


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt-neox", "falcon-40b", "stablelm"])
def test_rows_of_other_families(family: str) -> None:
    model = patched(family)
    with torch.no_grad():
        found = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert error(model, found) < 1e-10


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_mask_of_one_row_is_for_all(use_cache: bool) -> None:
    model = patched()
    with torch.no_grad():
        want = model(IDS, attention_mask=MASK[1:2].expand(4, -1), use_cache=use_cache).logits
        found = model(IDS, attention_mask=MASK[1:2], use_cache=use_cache).logits
        assert torch.equal(found, want)
        with pytest.raises(ValueError, match="attention_mask has 3 rows, and the call 4"):
            model(IDS, attention_mask=MASK[:3], use_cache=False)


def test_learned_positions_are_left_as_they_are() -> None:
    """GPT-2 counts padding unless it is told otherwise, patched or not."""
    dense = tiny_model("gpt2")
    sparse = tiny_model("gpt2")
    sparse.load_state_dict(dense.state_dict())
    nsa_flex.patch(sparse, NSA, init="dense")
    ids, mask = IDS[:, :32], MASK[:, :32]  # all blocks are selected
    with torch.no_grad():
        found, expected = (m(ids, attention_mask=mask).logits for m in (sparse, dense))
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache_of", ["dynamic", "static", "own", "own static"])
@pytest.mark.parametrize("told", [True, False])
def test_calls_with_a_cache(cache_of: str, told: bool) -> None:
    """In three, the last of them with the mask again or without."""
    model = patched()
    made: dict[str, Any] = {
        "dynamic": transformers.DynamicCache,
        "static": lambda: transformers.StaticCache(config=model.config, max_cache_len=60),
        "own": lambda: nsa_flex.NSACache(model),
        "own static": lambda: nsa_flex.NSACache(model, max_length=60),
    }
    cache = made[cache_of]()
    ids = torch.cat((IDS, tokens(4, 9)), 1)
    mask = torch.cat((MASK, MASK.new_ones(4, 9)), 1)
    found = []
    with torch.no_grad():
        for begin, end in ((0, 33), (33, 40), (40, 41), (41, 49)):
            call = {"attention_mask": mask[:, :end]} if told or begin < 40 else {}
            out = model(ids[:, begin:end], past_key_values=cache, **call)
            found.append(out.logits)
    assert error(model, torch.cat(found, 1), mask, ids) < 1e-10


def test_a_cache_filled_with_gradients() -> None:
    model = patched()
    cache = transformers.DynamicCache()
    first = model(IDS[:, :30], attention_mask=MASK[:, :30], past_key_values=cache).logits
    last = model(IDS[:, 30:], attention_mask=MASK, past_key_values=cache).logits
    assert error(model, torch.cat((first, last), 1)) < 1e-10


def test_the_trained_model_is_the_one_that_generates() -> None:
    """Logits of `generate`, and of a pass over what it wrote with the mask alone."""
    model, ids, mask = patched(), IDS[:1], MASK[:1]
    options: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **options)
    mask = torch.cat((mask, mask.new_ones(1, 6)), 1)
    with torch.no_grad():
        found = model(out.sequences, attention_mask=mask).logits[:, -7:-1]
    assert relative_error(torch.stack(out.logits, 1), found) < 1e-6  # `generate` gives float32


def test_a_mask_of_the_new_tokens_alone_is_refused_as_one() -> None:
    """Before positions are made of it."""
    model, cache = patched(), transformers.DynamicCache()
    with torch.no_grad():
        model(IDS[:, :30], attention_mask=MASK[:, :30], past_key_values=cache)
        with pytest.raises(ValueError, match=r"attention_mask has shape \(4, 10\); expected one"):
            model(IDS[:, 30:], attention_mask=MASK[:, 30:], past_key_values=cache)
        last = model(IDS[:, 30:], attention_mask=MASK, past_key_values=cache).logits
        whole = model(IDS, attention_mask=MASK, use_cache=False).logits
    assert relative_error(last[MASK[:, 30:] == 1], whole[:, 30:][MASK[:, 30:] == 1]) < 1e-10
