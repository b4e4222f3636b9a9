"""What families of transformers decoders have: projections, layer types, features of their own.

Most have `q_proj`, `k_proj` and `v_proj`, or `qkv_proj`, as wide as the heads of the config say,
and hand keyword arguments down to transformers' attention interface. The others have an entry in
`_FAMILIES`. Features are recognised by attributes; what is unknown here is noticed at the first
call (`hf_refusals`, `LayerCache.check_handed_back`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from nsa_flex.patching.layer import AttentionShape


def _grouped(module: Any) -> int:
    config = module.config
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _multi_head(module: Any) -> int:
    return module.config.num_attention_heads


def _falcon_kv_heads(module: Any) -> int:
    if module.new_decoder_architecture:
        return module.num_kv_heads
    return 1 if module.multi_query else module.num_heads


_SEPARATE = {"q_proj": (1, 0), "k_proj": (0, 1), "v_proj": (0, 1)}
_FUSED = {"qkv_proj": (1, 2)}
# Beside the query, q_proj gives a gate for the output of attention.
_GATED = {"q_proj": (2, 0), "k_proj": (0, 1), "v_proj": (0, 1)}


@dataclass(frozen=True)
class Family:
    """What an attention module of one family has, and where its call goes.

    Args:
        widths: projection -> (a, b): its output is (a * Hq + b * Hkv) * D wide.
        head_dim: the attribute of the module that holds D.
        num_kv_heads: reads Hkv from the module.
        declares_interface: False where the decoder's class does not say that its attention takes
            any implementation (`_supports_attention_backend`).
        calls_interface: False where the module attends by itself and `hf_attention` runs it.
        dropped_by: who drops keyword arguments that attention functions do not name, so that
            `hand_over` must bring them: the decoder, its layers, or nobody.
    """

    widths: dict[str, tuple[int, int]]
    head_dim: str = "head_dim"
    num_kv_heads: Callable[[Any], int] = _grouped
    declares_interface: bool = True
    calls_interface: bool = True
    dropped_by: Literal["decoder", "layer"] | None = None


# By the name of the attention class, or of one of its bases.
_FAMILIES = {
    "FalconAttention": Family(
        {"query_key_value": (1, 2)},
        num_kv_heads=_falcon_kv_heads,
        declares_interface=False,
        calls_interface=False,
        dropped_by="decoder",
    ),
    "GPT2Attention": Family({"c_attn": (1, 2)}, num_kv_heads=_multi_head),
    "GPTNeoXAttention": Family(
        {"query_key_value": (1, 2)}, head_dim="head_size", num_kv_heads=_multi_head
    ),
    "NemotronAttention": Family(_SEPARATE, dropped_by="layer"),
    "Qwen3NextAttention": Family(_GATED, declares_interface=False),
    "Qwen3_5Attention": Family(_GATED, declares_interface=False),
    "Qwen3_5MoeAttention": Family(_GATED, declares_interface=False),
    "StableLmAttention": Family(_SEPARATE, declares_interface=False, dropped_by="layer"),
}


def family_of(module: nn.Module) -> Family:
    """What is known of the module's family."""
    for base in type(module).__mro__:
        if base.__name__ in _FAMILIES:
            return _FAMILIES[base.__name__]
    return Family(_FUSED if hasattr(module, "qkv_proj") else _SEPARATE)


def read_shape(module: Any) -> AttentionShape:
    """Sizes of a transformers attention module.

    Raises:
        ValueError: its projections have other widths than its family and its config say, or names
            that are not known.
    """
    family, config = family_of(module), module.config
    heads, kv_heads = config.num_attention_heads, family.num_kv_heads(module)
    dim = getattr(module, family.head_dim, 0)
    expected = {
        name: (query * heads + key * kv_heads) * dim
        for name, (query, key) in family.widths.items()
    }
    linears = {name: getattr(module, name, None) for name in expected}
    found = {name: _width(linear) for name, linear in linears.items()}
    if expected != found or dim == 0:
        raise ValueError(
            f"{type(module).__name__} has projections {found}, expected {expected} for "
            f"{heads} query heads, {kv_heads} key-value heads and head_dim {dim}: register an "
            "adapter for it (nsa_flex.register_adapter)"
        )
    hidden_size = getattr(linears[next(iter(linears))], "in_features", config.hidden_size)
    return AttentionShape(hidden_size, heads, kv_heads, dim)


def _width(linear: Any) -> int | None:
    """Output width of an nn.Linear, or of a transformers Conv1D (`nf`)."""
    return getattr(linear, "out_features", getattr(linear, "nf", None))


# Attribute of the module -> what it has; a false value means that it has not.
_OF_THE_MODULE = {
    "sinks": "attention sinks (sinks)",
    "is_kv_shared_layer": "keys and values of another layer (kv_sharing_modes)",
    "store_full_length_kv": "keys and values that other layers read too (kv_sharing_modes)",
    "kv_lora_rank": "latent attention (kv_lora_rank)",
    "lambda_q1": "the difference of two attentions (differential attention)",
    "keep_window_size": "a mask that it computes itself (keep_window_size)",
    "indexer": "an indexer that chooses keys (indexer)",
}

_OF_THE_LAYER_TYPE = {
    "indexed_attention": "an indexer that chooses keys",
    "deepseek_sparse_attention": "an indexer that chooses keys",  # as 5.17 calls it
    "qwen_sparse_attention": "an indexer that chooses keys",
    "minimax_m3_sparse": "an indexer that chooses keys",
    "compressed_sparse_attention": "compressed attention of its own",
    "heavily_compressed_attention": "compressed attention of its own",
    "hybrid": "a recurrent layer in the same layer of the cache",
    "hybrid_sliding": "a recurrent layer in the same layer of the cache",
    "linear_attention": "linear attention",
    "conv": "a convolution",
}


_TOKENS = "its indexer takes single tokens of latent keys (MLA), where nsa_flex selects blocks"
# By model type: what is known of attention that is left out, however often it is asked for.
_DECLINED = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "dots3_note", "glm_moe_dsa", "hy_v4", "mistral_large4"), _TOKENS
    ),
    "glm5_next": "its indexer takes pools of 16 latent keys (MLA), which are not those it attends",
    "qwen4_exp": "its indexer takes blocks of 4 keys, where the kernels take 16 and more",
    "deepseek_v4": "it attends the compressed keys themselves, which an indexer takes one by one",
}


def declined(config: Any) -> str | None:
    """Why nsa_flex leaves the sparse attention of a model of this config out; None if it does not.

    >>> import types
    >>> declined(types.SimpleNamespace(model_type="qwen4_exp_text"))
    'its indexer takes blocks of 4 keys, where the kernels take 16 and more'
    """
    kind = str(getattr(config, "model_type", "")).removesuffix("_text").removesuffix("_vl")
    return _DECLINED.get(kind)


def feature_of_module(module: Any) -> str | None:
    """What keeps NSA from standing in for the module, by its own attributes; or None."""
    for attribute, feature in _OF_THE_MODULE.items():
        value = getattr(module, attribute, None)
        if value is not None and value is not False:
            return feature
    if module.layer_idx is None:
        return "no layer of the cache (layer_idx=None)"
    return None


def feature_of_layer_type(module: Any) -> str | None:
    """What the layer's type says that NSA cannot stand in for, or None. Windows are no such."""
    kind = layer_type(module)
    feature = None if kind is None else _OF_THE_LAYER_TYPE.get(kind)
    return None if feature is None else f"{feature} (layer type {kind})"


# Their masks are made for a limited context; all others read the mask of full attention.
_LOCAL = ("sliding_attention", "chunked_attention", "window_attention", "hybrid_sliding")
# Their modules read no mask that a mask function makes.
_RECURRENT = ("linear_attention", "conv", "moe")


def layer_type(module: Any) -> str | None:
    """The type of the layer that the module attends in; None if its config has no types."""
    types = getattr(module.config, "layer_types", None)
    return types[module.layer_idx] if types and module.layer_idx is not None else None


def local_attention(module: Any) -> str | None:
    """How this layer's context is limited, or None if it sees all of it.

    A window at least as long as the context the model was made for is no limit.
    """
    kind, window = layer_type(module), window_of(module)
    if kind not in (None, "full_attention", "sliding_attention"):
        return f"layer type {kind}"
    if window is None or window >= getattr(module.config, "max_position_embeddings", float("inf")):
        return None
    return f"sliding_window={window}"


def window_of(module: Any) -> int | None:
    """Tokens of the layer's sliding window; None if it has none."""
    if layer_type(module) == "full_attention":
        return None
    own: int | None = getattr(module, "sliding_window", None)
    return own or getattr(module.config, "sliding_window", None)


def kind_of_mask(module: Any) -> str | None:
    """Which mask an unpatched module reads: "full", "local", or none."""
    kind = layer_type(module)
    if kind in _RECURRENT:
        return None
    if kind in _LOCAL or (kind is None and local_attention(module) is not None):
        return "local"
    return "full"
