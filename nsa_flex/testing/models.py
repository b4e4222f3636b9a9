"""Models to check: a family of transformers, tiny and random; a checkpoint; a user's factory."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn


def model_named(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """A model to check, in `dtype`.

    Args:
        name: a checkpoint directory, `module:function` (the function makes the model), or a
            model type of transformers (a tiny random decoder).
        dtype: float64 rounds least: no two blocks score so alike that rounding chooses.

    Raises:
        ValueError: it is none of these; the message says why.
    """
    if Path(name).is_dir():
        return _read(name, dtype)
    if ":" in name:
        return _made_by_user(name).to(dtype)
    model = tiny_decoder(name).to(dtype)
    model.set_experts_implementation("eager")  # the grouped products take no float64
    return model


def _read(folder: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        kind = AutoConfig.from_pretrained(folder).model_type
        attention = {"attn_implementation": "nsa_flex"} if kind.startswith("minimax_m3") else {}
        # As published it is one with a vision tower, which is no causal language model's.
        auto = AutoModelForImageTextToText if kind == "minimax_m3_vl" else AutoModelForCausalLM
        return auto.from_pretrained(
            folder, dtype=dtype, experts_implementation="eager", **attention
        )
    except (OSError, KeyError, json.JSONDecodeError) as error:
        raise ValueError(f"{folder}: {str(error).splitlines()[0]}") from error


def _made_by_user(name: str) -> nn.Module:
    model = call_factory(name)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must return an nn.Module, got {type(model).__name__}")
    return model


def call_factory(name: str) -> Any:
    """What the user's `module:function` returns; modules of the working directory are found.

    Raises:
        ValueError: there is no such function, or it raised something.
    """
    module_name, _, attribute = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name}: {error}") from error
    try:
        return factory()
    except Exception as error:  # whatever the user's code raises
        raise ValueError(f"{name} could not be called: {type(error).__name__}: {error}") from error


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


VOCABULARY = 112
ORDINARY_TOKENS = (3, 96)  # no special token: random ids are drawn from here
LAYERS = 2
MAX_LAYERS = 4  # where layers differ from one another

# Names of attributes by the value that they get, where a config has them and they are numbers.
_NAMES_BY_SIZE: dict[int, str] = {
    VOCABULARY: """
        vocab_size decoder_vocab_size unpadded_vocab_size vocab_size_per_layer_input
        pronunciation_vocab_size shape_vocab_size
    """,
    64: """
        hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size
        output_embedding_size word_embed_proj_dim attention_hidden_size lru_width
        backbone_hidden_size
    """,
    96: """
        intermediate_size moe_intermediate_size shared_expert_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size
        shared_intermediate_size dense_intermediate_size intermediate_size_mlp
        expert_ffn_hidden_size ffn_hidden_size feed_forward_size decoder_ffn_dim
        encoder_ffn_dim ffn_dim dim_ff dff d_inner n_inner router_hidden_size
    """,
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_global_key_value_heads
        linear_num_key_heads num_experts_per_tok moe_topk moe_k top_k_experts eos_token_id
    """,
    4: """
        num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
        swa_num_attention_heads linear_num_heads linear_num_value_heads num_experts
        n_routed_experts num_local_experts moe_num_experts zero_expert_num index_n_heads
    """,
    16: """
        head_dim global_head_dim swa_head_dim kv_channels dim_head d_head d_kv v_head_dim
        qk_nope_head_dim index_head_dim linear_head_dim linear_key_head_dim
        linear_value_head_dim attention_head_size sliding_window sliding_window_size
        attention_window_size window_size local_attention local_attention_window_len
        keep_window_size attention_chunk_size mamba_d_state ssm_state_size state_size
        mamba_d_head mamba_chunk_size chunk_size query_pre_attn_scalar
    """,
    8: "qk_rope_head_dim rotary_dim mamba_n_heads index_topk",
    24: "qk_head_dim q_lora_rank kv_lora_rank o_lora_rank laurel_rank",
    512: """
        max_position_embeddings n_positions n_ctx max_seq_len model_max_length
        max_target_positions max_source_positions original_max_position_embeddings
        context_length
    """,
    1: "n_group topk_group bos_token_id",
    0: "pad_token_id",
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_blocks",
    "num_layers_per_stack",
)
# Where None means that the class has no default, or derives one from the sizes.
_EVEN_IF_NONE = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")


def shrunk(config: Any) -> dict[str, Any]:
    """Keyword arguments that make a config of the same class tiny.

    Sizes are set by name; of lists with an entry a layer the entries of the kept layers remain;
    token ids outside the vocabulary become ids at its end; configs inside are shrunk likewise.
    """
    values = {name: v for name, v in vars(config).items() if not name.startswith("_")}
    layers = _kept_layers(values)
    special = iter(range(VOCABULARY - 1, ORDINARY_TOKENS[1] - 1, -1))
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if hasattr(value, "to_diff_dict"):
            changes[name] = {"model_type": value.model_type, **shrunk(value)}
        elif name == "is_decoder":
            changes[name] = True  # causal, where the same class may be an encoder too
        elif _is_dropout(name, value):
            changes[name] = 0.0
        elif name in _DEPTHS and isinstance(value, int):
            changes[name] = len(layers)
        elif name in _SIZES and (name in _EVEN_IF_NONE or isinstance(value, int)):
            changes[name] = _SIZES[name]
        elif _is_token(name, value):
            changes[name] = next(special)
        elif isinstance(value, (list, tuple)) and len(value) == _depth(values) > LAYERS:
            changes[name] = [value[index] for index in layers]
    return changes


def _depth(values: dict[str, Any]) -> int:
    return next((values[name] for name in _DEPTHS if isinstance(values.get(name), int)), 0)


def _kept_layers(values: dict[str, Any]) -> list[int]:
    """Indices of the first layer of every kind, at least `LAYERS` of them."""
    depth = _depth(values)
    lists = [v for v in values.values() if isinstance(v, (list, tuple)) and len(v) == depth]
    kinds: dict[Any, int] = {}
    for index in range(depth):
        kinds.setdefault(str([entry[index] for entry in lists]), index)
    kept = sorted(kinds.values())[:MAX_LAYERS]
    others = [index for index in range(max(depth, LAYERS)) if index not in kept]
    return sorted(kept + others[: max(0, LAYERS - len(kept))])


def _is_dropout(name: str, value: Any) -> bool:
    return isinstance(value, float) and ("dropout" in name or "pdrop" in name)


def _is_token(name: str, value: Any) -> bool:
    is_id = name.endswith(("_token_id", "_token_index"))
    return is_id and isinstance(value, int) and value >= ORDINARY_TOKENS[0]
