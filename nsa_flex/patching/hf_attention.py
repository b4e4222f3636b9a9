"""What transformers' attention interface calls for a patched decoder, and for its masks.

`nsa_flex` is the attention implementation in the config of a patched decoder. Importing this
module registers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nsa_flex.patching.hf_layers import IMPLEMENTATION, Attention
from nsa_flex.patching.rows import Rows

# Keyword arguments of attention functions that ask for more than softmax(scale * q k) v.
_REFUSED_ARGUMENTS = {
    "softcap": "logit soft-capping (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "sinks": "attention sinks (sinks)",
    "position_bias": "a position bias (position_bias)",
    "cache": "continuous batching (a paged cache)",
}


def attention_forward(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nsa_hidden_states: Tensor | None = None,
    nsa_rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' attention modules call: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Returns:
        (B, Sq, Hq, Dv), and None in the place of attention weights.

    Raises:
        ValueError: the call asks for dropout, soft-capping, sinks or another thing that NSA does
            not compute.
    """
    layer = getattr(module, "nsa", None)
    if layer is None:
        attend = _former_attention(module)
        return attend(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    _refuse(dropout, kwargs)
    if nsa_hidden_states is None or nsa_rows is None:
        raise RuntimeError(
            f"{type(module).__name__} was not told of padding and packed documents: it was called "
            "outside its decoder, or its decoder layer does not hand keyword arguments down; call "
            "the decoder, or unpatch the model"
        )
    if nsa_rows.cache is None:
        output = layer(nsa_hidden_states, query, key, value, scale=scaling, rows=nsa_rows)
    else:
        cache = nsa_rows.cache.layers[module.layer_idx]
        output = layer.attend_cached(nsa_hidden_states, query, key, value, cache, scaling)
    return output.transpose(1, 2), None


def _refuse(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(
            f"attention dropout is not supported, got {dropout}: set attention_dropout of the "
            "attention modules (and of the config) to 0, or call model.eval()"
        )
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal=False is not supported: NSA is causal attention")
    for name, feature in _REFUSED_ARGUMENTS.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{feature} is not something that NSA computes")


def _former_attention(module: Attention) -> Callable[..., tuple[Tensor, Tensor | None]]:
    eager = sys.modules[type(module).__module__].eager_attention_forward
    name = module.config.nsa_flex["attn_implementation"]
    return eager if name == "eager" else ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)


def mask_for_attention(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """What transformers makes masks with while the attention implementation is `nsa_flex`.

    Unpatched layers get the mask of the implementation that they run. Patched layers need none:
    the padding mask goes through as it is, so that masks which `generate` prepares ahead of a
    static cache still tell the padding.
    """
    record = kwargs["config"].nsa_flex
    if ("full" if kwargs.get("local_size") is None else "local") in record["kept_masks"]:
        former = ALL_MASK_ATTENTION_FUNCTIONS[record["attn_implementation"]]
        return former(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    if kwargs.get("use_vmap") or getattr(mask_function, "__name__", "") == "or_mask":
        raise ValueError(
            "a custom mask function (bidirectional image or prefix tokens, for example) is not "
            "supported: NSA is causal attention"
        )
    if attention_mask is not None and attention_mask.shape[1] < kv_length:
        missing = kv_length - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask


AttentionInterface.register(IMPLEMENTATION, attention_forward)
AttentionMaskInterface.register(IMPLEMENTATION, mask_for_attention)
