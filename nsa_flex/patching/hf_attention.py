"""What transformers' attention interface calls for a patched decoder, and for its masks.

`nsa_flex` is the attention implementation in the config of a patched decoder, and
`nsa_flex_flash` while an engine of continuous batching runs it. Importing this
module registers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from nsa_flex.patching import minicpm_attention, minicpm_config, minimax_m3
from nsa_flex.patching.call_context import CallContext, LayerInput
from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, Attention
from nsa_flex.patching.hf_refusals import (
    check_arguments,
    check_heads,
    check_mask,
    check_tokens,
    check_window,
)
from nsa_flex.patching.hf_versions import is_custom_mask
from nsa_flex.patching.slot_masks import mask_for_rows

_ADDED = (
    "the decoder is patched, and its {name} with layer_idx={place} is not: it was put there after "
    "patch; call nsa_flex.unpatch(model), then nsa_flex.patch(model)"
)

_NOT_PATCHED = (
    "the config of this model names nsa_flex as its attention, as that of a patched model does, "
    "but {what}: call nsa_flex.load(path) for the NSA layers of a checkpoint, "
    "nsa_flex.patch(model) for fresh ones (del model.config.nsa_flex first, if it has one), or "
    "model.set_attn_implementation('sdpa') for dense attention"
)


def attention_forward(
    module: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    nsa_input: LayerInput | None = None,
    nsa_call: CallContext | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """What transformers' attention modules call: query (B, Hq, Sq, D), key (B, Hkv, Sk, D).

    Returns:
        (B, Sq, Hq, Dv), contiguous, and None in the place of attention weights.

    Raises:
        ValueError: the module is not patched; or the call asks for dropout, soft-capping, sinks, a
            mask of the layer's own or another thing that NSA does not compute; or keys and values
            are not those that the cache of the layer gave; or heads are split over ranks.
        RuntimeError: the module was called outside its decoder.
    """
    layer = getattr(module, "nsa", None)
    name = type(module).__name__
    if layer is None and nsa_call is None and minimax_m3.is_own(module.config):
        return minimax_m3.attend(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
    if layer is None and nsa_call is None and minicpm_config.is_own(module.config):
        return minicpm_attention.attend(
            module, query, key, value, attention_mask, scaling, dropout, **kwargs
        )
    if layer is None and nsa_call is not None:
        raise ValueError(_ADDED.format(name=name, place=module.layer_idx))
    if layer is None:
        raise ValueError(_NOT_PATCHED.format(what=f"its {name} is not patched"))
    if nsa_input is None or nsa_call is None:
        raise RuntimeError(
            f"{name} was not told of padding and packed documents: it was called outside its "
            "decoder, or put into one that is not patched, or its decoder layer does not hand "
            "keyword arguments down; call the decoder, or unpatch the model"
        )
    check_heads(name, query, key, layer.shape)
    check_arguments(name, dropout, kwargs, nsa_call)
    check_window(name, kwargs.get("sliding_window"), module.config)
    check_mask(name, attention_mask, nsa_input.attention_mask, full=nsa_call.full_masks)
    if nsa_call.paged is not None:
        paged = (nsa_call.paged.layers[module.layer_idx], nsa_call.paged.batch)
        output = layer(nsa_input.hidden_states, query, key, value, scale=scaling, paged=paged)
    elif nsa_call.cache is None:
        check_tokens(name, query, key, nsa_call.rows)
        output = layer(
            *(nsa_input.hidden_states, query, key, value),
            scale=scaling,
            rows=nsa_call.rows,
            joined=nsa_input.joined,
        )
    else:
        cache = nsa_call.cache.layers[module.layer_idx]
        cache.check_handed_back(name, key, value)
        output = layer(
            nsa_input.hidden_states, query, key, value, scale=scaling, cache=cache, stored=True
        )
    return output.transpose(1, 2).contiguous(), None


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
    if minimax_m3.is_own(kwargs["config"]) or minicpm_config.is_own(kwargs["config"]):
        return mask_for_rows(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
    record = getattr(kwargs["config"], "nsa_flex", None)
    if record is None:
        raise ValueError(_NOT_PATCHED.format(what="it has no record of a patch"))
    kind = "full" if kwargs.get("local_size") is None else "local"
    if kind == "full" and (kwargs.get("use_vmap") or is_custom_mask(mask_function)):
        raise ValueError(
            "a custom mask function (bidirectional image or prefix tokens, for example) is not "
            "supported: NSA is causal attention"
        )
    if kind in record["kept_masks"]:
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
    if attention_mask is not None and attention_mask.shape[1] < kv_length:
        missing = kv_length - attention_mask.shape[1]
        attention_mask = torch.nn.functional.pad(attention_mask, (0, missing))
    return attention_mask


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, mask_for_attention)
