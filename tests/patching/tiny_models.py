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
    compression="mlp",  # with parameters
)

SIZES: dict[str, Any] = {
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

_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

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
    "gpt2": ("GPT2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}),
    "gpt2-scaled": (
        "GPT2",
        {
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "gpt-neox": ("GPTNeoX", {"use_parallel_residual": True}),
    "gpt-neox-sequential": (
        "GPTNeoX",
        {
            "use_parallel_residual": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 1.0,
            },
        },
    ),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("StableLm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "nemotron": ("Nemotron", {}),
    "falcon-7b": ("Falcon", {}),
    "falcon-40b": (
        "Falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 2},
    ),
    "falcon-sequential": (
        "Falcon",
        {"multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "qwen3-next": ("Qwen3Next", {**_LINEAR, **_EXPERTS, "head_dim": 16}),
    "qwen3.5": ("Qwen3_5Text", {**_LINEAR, "head_dim": 16}),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**_LINEAR, **_EXPERTS, "head_dim": 16}),
}  # Whose embedding of a token is that of its place: padding must not count.
ABSOLUTE_POSITIONS = {"gpt2", "gpt2-scaled"}

# With layers beside attention that carry a state from token to token.
RECURRENT = {"qwen3-next", "qwen3.5", "qwen3.5-moe"}


def tiny_model(family: str = "llama", **changes: Any) -> nn.Module:
    """A random decoder in eval mode, eager where it has no sdpa; `changes` go to its config."""
    name, extras = FAMILIES[family]
    config_class = getattr(transformers, f"{name}Config")
    model_class = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    implementation = changes.pop("attn_implementation", "eager")
    config = config_class(**{**SIZES, **extras, **changes})
    config._experts_implementation = "eager"  # the others take no float64
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


@torch.no_grad()
def moved(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """A patched model in float64, φ and gates far off their start: φ is no mean, and sees places.

    Args:
        scale: standard deviation of what is added.
    """
    for name, parameter in model.double().named_parameters():
        if ".nsa." in name:
            parameter += scale * torch.randn_like(parameter)
    return model.eval()


def tokens(batch: int, length: int) -> torch.Tensor:
    """Random token ids that are not padding, int64 (batch, length)."""
    return torch.randint(2, VOCABULARY, (batch, length))


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of `expected`, in float64."""
    difference = found.double() - expected.double()
    return float(difference.norm() / expected.double().norm())
