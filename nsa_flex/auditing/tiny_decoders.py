"""Decoders of transformers with random weights, a few thousand of them, named by model type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nsa_flex.auditing.measuring import MOST_CALLS

VOCABULARY = 96
CACHED_TOKENS = 40

# Set where a family's config has such an attribute; anything else keeps its default.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "sliding_window": 16,
    "query_pre_attn_scalar": 16,
}
_MIXED = ["sliding_attention", "full_attention"]
_OF_TYPE: dict[str, dict[str, Any]] = {
    "gemma2": {"layer_types": _MIXED},
    "gemma3_text": {"layer_types": _MIXED},
    "smollm3": {"no_rope_layers": [1, 0]},
    "phi3": {"sliding_window": None},
}

# The ten whose audit is in the documentation.
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
)


def tiny_decoder(model_type: str, **changes: Any) -> Any:
    """A random causal language model of transformers, in eval mode.

    Args:
        model_type: as in a config's `model_type`: llama, qwen3, gemma2, …
        changes: go to the config.

    Raises:
        ValueError: transformers has no causal language model of that type.
    """
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"transformers has no causal language model of type {model_type!r}; "
            f"some that it has: {', '.join(FAMILIES)}"
        )
    config_class = CONFIG_MAPPING[model_type]
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    config = config_class(**{**sizes, **_OF_TYPE.get(model_type, {}), **changes})
    return AutoModelForCausalLM.from_config(config).eval()


def token_batches(
    lengths: list[int], batch_sizes: list[int], device: torch.device | str = "cpu"
) -> list[dict[str, Any]]:
    """Keyword arguments of causal language models, without a cache: every length and batch size.

    The first batch is the first of each; later ones vary the length before the batch size.
    """
    return [
        {"input_ids": _tokens(batch, length, device), "use_cache": False}
        for batch in batch_sizes
        for length in lengths
    ]


def decoding_batches(
    model: Any, device: torch.device | str = "cpu", steps: int = 3
) -> list[Callable[[], dict[str, Any]]]:
    """Makers of single steps against static caches that hold more tokens each time.

    Every call makes a cache of its own and fills it, so that a step may be run again.
    """
    from transformers import StaticCache

    def step(cached: int) -> dict[str, Any]:
        cache = StaticCache(config=model.config, max_cache_len=CACHED_TOKENS + steps + MOST_CALLS)
        with torch.no_grad():
            model(input_ids=_tokens(1, cached, device), past_key_values=cache, use_cache=True)
        return {"input_ids": _tokens(1, 1, device), "past_key_values": cache, "use_cache": True}

    return [lambda cached=CACHED_TOKENS + i: step(cached) for i in range(steps)]  # type: ignore[misc]


def logits(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model as a function that returns its logits alone."""

    def forward(**inputs: Any) -> torch.Tensor:
        return model(**inputs).logits

    return forward


def _tokens(batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), device=device)
