"""Decoders of transformers with random weights, by model type, each a few hundred kilobytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nsa_flex.testing.tiny_configs import shrunk

MAX_PARAMETERS = 5_000_000

_WELL_KNOWN = ("llama", "qwen3", "mistral", "gemma3_text", "phi3", "olmo2", "gpt2")
_MIXED = ["sliding_attention", "full_attention"]
_SHARED = {"num_hidden_layers": 4, "layer_types": _MIXED * 2, "num_kv_shared_layers": 2}

# What the rules cannot know: layers that are all of one kind by default, sizes that depend on one
# another, values without a default.
_OF_TYPE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 100, "encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma2": {"layer_types": _MIXED},
    "gemma3n_text": {
        **_SHARED,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4": {"text_config": {"global_head_dim": 16}},
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified": {"text_config": {"global_head_dim": 16}},
    "gemma4_unified_text": {"global_head_dim": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hrm_text": {"num_layers_per_stack": None},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 8]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "mistral": {"sliding_window": None},
    "moshi": {"sliding_window": 512},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False},
    "smollm3": {"no_rope_layers": [1, 0]},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zaya": {"num_experts_per_tok": 1},
}

_DSA = {
    "num_key_value_heads": 4,
    "head_dim": 24,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_OF_TYPE.update(dict.fromkeys(("dots3_note", "dots3_note_text"), _DSA))
_OF_TYPE.update(dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QSA))

# Model types without a decoder of their own that could be built, and why.
NOT_BUILT: dict[str, str] = {
    "gemma3n": "its vision tower needs timm; the decoder is gemma3n_text",
    "gemma4_assistant": "it drafts for gemma4, whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts for gemma4_unified, whose keys and values it reads",
}


def tiny_decoder(model_type: str, **changes: Any) -> Any:
    """A random causal language model of transformers, in eval mode.

    Its config is the default one of the class with every size shrunk; two layers, or one of
    every kind where layers differ. Matrices are so large that a wrong mask shows in the logits.

    Args:
        model_type: as in a config's `model_type`: llama, qwen3, gemma2, …
        changes: go to the config.

    Raises:
        ValueError: transformers has no causal language model of that type, it cannot be built
            alone, or it would have more than `MAX_PARAMETERS` parameters.
    """
    model_class, config = _model_class(model_type), tiny_config(model_type, **changes)
    with torch.device("meta"):
        sizes = model_class(config)
    count = sum(parameter.numel() for parameter in sizes.parameters())
    if count > MAX_PARAMETERS:
        name, largest = max(sizes.named_parameters(), key=lambda pair: pair[1].numel())
        raise ValueError(
            f"{model_type} would have {count} parameters, more than {MAX_PARAMETERS}; "
            f"{name} has the shape {tuple(largest.shape)}"
        )
    model = model_class(tiny_config(model_type, **changes)).eval()
    _spread(model)
    return model


def tiny_config(model_type: str, **changes: Any) -> Any:
    """The config of `tiny_decoder`."""
    if model_type in NOT_BUILT:
        raise ValueError(f"{model_type} cannot be built alone: {NOT_BUILT[model_type]}")
    config_class = _model_class(model_type).config_class
    return config_class(**_merged(shrunk(config_class()), _OF_TYPE.get(model_type, {}), changes))


def model_types() -> list[str]:
    """Every model type that transformers has a causal language model of."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _model_class(model_type: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f"transformers has no causal language model of type {model_type!r}; "
            f"some that it has: {', '.join(_WELL_KNOWN)}"
        )
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def _merged(*every: dict[str, Any]) -> dict[str, Any]:
    """Later values over earlier ones; dictionaries inside are merged likewise."""
    merged: dict[str, Any] = {}
    for values in every:
        for name, value in values.items():
            both = isinstance(value, dict) and isinstance(merged.get(name), dict)
            merged[name] = _merged(merged[name], value) if both else value
    return merged


@torch.no_grad()
def _spread(model: nn.Module) -> None:
    """Larger weights: at the usual 0.02 attention is so flat that a wrong mask hardly shows."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
