"""Batches and steps for the tiny random decoders of transformers that the audit is shown on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nsa_flex.auditing.measuring import MOST_CALLS
from nsa_flex.testing.tiny_configs import ORDINARY_TOKENS

CACHED_TOKENS = 40

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

    from nsa_flex.patching.hf_versions import CACHE

    def step(cached: int) -> dict[str, Any]:
        cache = StaticCache(config=model.config, max_cache_len=CACHED_TOKENS + steps + MOST_CALLS)
        with torch.no_grad():
            model(_tokens(1, cached, device), use_cache=True, **{CACHE: cache})
        return {"input_ids": _tokens(1, 1, device), CACHE: cache, "use_cache": True}

    return [lambda cached=CACHED_TOKENS + i: step(cached) for i in range(steps)]  # type: ignore[misc]


def logits(model: nn.Module) -> Callable[..., torch.Tensor]:
    """The model as a function that returns its logits alone."""

    def forward(**inputs: Any) -> torch.Tensor:
        return model(**inputs).logits

    return forward


def _tokens(batch: int, length: int, device: torch.device | str) -> torch.Tensor:
    return torch.randint(*ORDINARY_TOKENS, (batch, length), device=device)
