"""Random transformers decoders of a few thousand parameters, one of each family."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from nsa_flex.config import NSAConfig

VOCABULARY = 97

# S <= n * l' = 32 tokens are dense when only the selected branch counts.
NSA = NSAConfig(
    compress_block_size=8,
    compress_stride=4,
    select_block_size=8,
    num_selected_blocks=4,
    num_initial_blocks=1,
    num_local_blocks=2,
    window_size=12,
)

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_MIXED = ["sliding_attention", "full_attention"]

# Name -> class and what its config has beyond the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": _MIXED[::-1]},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "attn_logit_softcapping": None,
            "query_pre_attn_scalar": 24,
            "sliding_window": 8,
            "layer_types": _MIXED,
        },
    ),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 8, "layer_types": _MIXED}),
    "phi3": (
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {"attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
}

_MODEL_CLASSES = {"Gemma3Text": "Gemma3"}


def tiny_model(family: str = "llama", **changes: Any) -> nn.Module:
    """A random decoder in eval mode, eager where it has no sdpa; `changes` go to its config."""
    name, extras = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{_MODEL_CLASSES.get(name, name)}ForCausalLM")
    implementation = changes.pop("attn_implementation", "eager")
    config = config_class(**{**_SIZES, **extras, **changes})
    config._attn_implementation = implementation if model_class._supports_sdpa else "eager"
    model = model_class(config).eval()
    _spread(model)
    return model


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Larger weights: at the usual 0.02 attention is so flat that a wrong mask hardly shows."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token ids that are not padding, int64 (batch, length)."""
    return torch.randint(2, VOCABULARY, (batch, length))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())
