"""What transformers' attention modules compute beyond grouped-query attention, by name.

Recognised by attributes, before a model is patched. What a module does and this page does not know
is noticed at its first call (`hf_refusals`, `LayerCache.check_handed_back`).
"""

from __future__ import annotations

from typing import Any

from nsa_flex.patching.hf_layer_types import layer_type

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
