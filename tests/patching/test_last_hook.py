"""Hooks that are registered after `patch` change what NSA reads, as those before it do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nsa_flex
from patching.tiny_models import NSA, moved, tiny_model, tokens

IDS = tokens(2, 40)
MASK = torch.ones_like(IDS)
MASK[1, :15] = 0
STEER = torch.randn(32)


def hide_padding(module: nn.Module, args: Any, call: dict[str, Any]) -> Any:
    """What a wrapper that knows the padding might do."""
    return args, {**call, "attention_mask": MASK}


def steer(module: nn.Module, args: Any, call: dict[str, Any]) -> Any:
    """Adds a direction to the input of one attention layer."""
    return args, {**call, "hidden_states": call["hidden_states"] + STEER}


def decoder(model: nn.Module) -> nn.Module:
    return model.model


def attention(model: nn.Module) -> nn.Module:
    return model.model.layers[0].self_attn


def logits(model: nn.Module, **call: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False, **call).logits[MASK == 1]


def patched(family: str) -> nn.Module:
    torch.manual_seed(0)
    return moved(nsa_flex.patch(tiny_model(family), NSA))


@pytest.mark.parametrize("family", ["llama", "stablelm"])
@pytest.mark.parametrize("copied", [None, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize(("hook", "where"), [(hide_padding, decoder), (steer, attention)])
def test_a_hook_after_patch_is_seen(
    hook: Any, where: Callable[[nn.Module], nn.Module], copied: Any, family: str
) -> None:
    first, late = tiny_model(family), patched(family)
    first.load_state_dict(late.state_dict(), strict=False)
    where(first).register_forward_pre_hook(hook, with_kwargs=True)
    nsa_flex.patch(first, NSA).double().load_state_dict(late.state_dict())
    late = late if copied is None else copied(late)
    plain = logits(late)
    handle = where(late).register_forward_pre_hook(hook, with_kwargs=True)
    found = logits(late)
    assert torch.equal(found, logits(first))
    assert not torch.allclose(found, plain)
    handle.remove()
    assert torch.equal(logits(late), plain)


def test_a_mask_by_hook_is_the_mask() -> None:
    model = patched("llama")
    expected = logits(model, attention_mask=MASK)
    decoder(model).register_forward_pre_hook(hide_padding, with_kwargs=True)
    assert torch.equal(logits(model), expected)


def test_unpatch_leaves_hooks_of_others() -> None:
    model, seen = patched("llama"), []
    decoder(model).register_forward_pre_hook(lambda *_: seen.append("late"))
    decoder(model).register_forward_pre_hook(lambda *_: seen.append("first"), prepend=True)
    nsa_flex.unpatch(model)
    assert "register_forward_pre_hook" not in vars(decoder(model))
    logits(model)
    assert seen == ["first", "late"]
