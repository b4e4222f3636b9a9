"""FLOPs of a training step count each layer as what it computes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

import nsa_flex
from nsa_flex import NSAConfig
from nsa_flex.training.flops import flops_per_token

HEADS, DIM, TOKENS, WINDOW = 4, 8, 256, 16
PAIR = 14 * DIM * HEADS  # 2 products of the forward, 5 of the backward, 2 D each
SMALL = NSAConfig(8, 4, 8, 4, window_size=16, branches=("sliding",), compression="mean")


def model_of(*kinds: str) -> torch.nn.Module:
    config = Qwen2Config(
        hidden_size=HEADS * DIM, num_attention_heads=HEADS, num_key_value_heads=2,
        num_hidden_layers=len(kinds), layer_types=[f"{kind}_attention" for kind in kinds],
        intermediate_size=32, vocab_size=64, use_sliding_window=True, sliding_window=WINDOW,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def attention_of(model: torch.nn.Module) -> float:
    """Of a token, without the weights."""
    weights = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    weights -= model.get_input_embeddings().weight.numel()  # type: ignore[operator]
    return flops_per_token(model, TOKENS) - 6 * weights


def test_a_window_is_not_dense() -> None:
    dense, window = (TOKENS + 1) / 2, WINDOW - WINDOW * (WINDOW - 1) / 2 / TOKENS
    assert attention_of(model_of("full")) == pytest.approx(PAIR * dense)
    assert attention_of(model_of("sliding")) == pytest.approx(PAIR * window)
    mixed = model_of("full", "sliding", "sliding")
    assert attention_of(mixed) == pytest.approx(PAIR * (dense + 2 * window))


def test_layers_that_are_not_patched_count_beside_those_that_are() -> None:
    """A mixed model: NSA in one layer of three."""
    model = model_of("full", "full", "sliding")
    patched = nsa_flex.patch(model, SMALL, filter_fn=lambda _, name: ".0." in name)
    alone = nsa_flex.patch(model_of("full"), SMALL)
    others = attention_of(model_of("full", "sliding"))
    assert attention_of(patched) == pytest.approx(attention_of(alone) + others)
