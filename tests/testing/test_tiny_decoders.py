"""Tiny decoders: small, of every kind of layer, and refused where they cannot be built."""

from __future__ import annotations

import pytest
import torch

from nsa_flex.testing import models
from nsa_flex.testing.models import ORDINARY_TOKENS, VOCABULARY, tiny_config, tiny_decoder
from nsa_flex.testing.subject import token_range


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", None),
        ("gemma3_text", ["sliding_attention", "full_attention"]),
        ("qwen3_next", ["linear_attention", "full_attention"]),
    ],
)
def test_one_layer_of_every_kind(family: str, kinds: list[str] | None) -> None:
    config = tiny_config(family)
    assert config.num_hidden_layers == 2
    assert getattr(config, "layer_types", None) == kinds


def test_changes_go_to_the_config() -> None:
    assert tiny_config("llama", num_hidden_layers=3).num_hidden_layers == 3
    inner = tiny_config("gemma4", text_config={"hidden_size": 128}).text_config
    assert inner.hidden_size == 128
    assert inner.vocab_size == VOCABULARY


def test_special_tokens_are_no_ordinary_tokens() -> None:
    values = vars(tiny_config("gemma4"))
    special = [value for name, value in values.items() if name.endswith("_token_id")]
    assert len(special) > 3
    assert all(token not in range(*ORDINARY_TOKENS) for token in special)


def test_weights_are_spread() -> None:
    weight = tiny_decoder("llama").model.layers[0].self_attn.q_proj.weight
    assert 0.1 < weight.std() < 0.15  # 1/√64, not transformers' 0.02


def test_a_family_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ValueError, match="gemma4_assistant cannot be built alone: it drafts for"):
        tiny_decoder("gemma4_assistant")


def test_a_family_that_would_be_large_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MAX_PARAMETERS", 1000)
    expected = r"llama would have \d+ parameters, more than 1000; model.embed_tokens.weight has"
    with pytest.raises(ValueError, match=expected):
        tiny_decoder("llama")


def test_the_range_of_tokens_ends_before_special_ones() -> None:
    assert token_range(tiny_decoder("llama")) == (3, VOCABULARY)
    assert token_range(torch.nn.Embedding(50, 8)) == (3, 50)
    with pytest.raises(ValueError, match="no vocabulary that can be found"):
        token_range(torch.nn.Linear(3, 3))
