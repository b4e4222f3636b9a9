"""Configs of transformers with every size shrunk by rules on the names of their attributes."""

from __future__ import annotations

from typing import Any

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
