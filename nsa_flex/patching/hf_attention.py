"""What the attention modules of a patched decoder call, and what makes their masks.

`nsa_flex` is the attention implementation in the config of a patched decoder, and
`nsa_flex_flash` while an engine of continuous batching runs it. Importing this
module registers it.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from nsa_flex.parallel.heads import HeadShards
from nsa_flex.patching import minicpm_attention, minicpm_config, minimax_m3
from nsa_flex.patching.hf_families import family_of
from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, Attention
from nsa_flex.patching.hf_refusals import (
    check_arguments,
    check_heads,
    check_mask,
    check_tokens,
    check_window,
)
from nsa_flex.patching.hf_versions import is_custom_mask
from nsa_flex.patching.rows import CallContext, LayerInput
from nsa_flex.patching.slot_masks import mask_for_rows
from nsa_flex.sharded import refuse_context_parallel

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
    check_heads(name, query, key, layer.shape, nsa_call.rows.head_shards)
    check_arguments(name, dropout, kwargs, nsa_call)
    check_window(name, kwargs.get("sliding_window"), module.config)
    if nsa_call.rows.head_shards is None:  # who exchanges heads drops masks, which rows tell
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


def check_parallelism(implementation: str, shards: HeadShards | None, *, training: bool) -> None:
    """Who gets whole sequences in a call of a decoder; asked at each, since it may begin any time.

    Args:
        implementation: the decoder's name among transformers' ALL_ATTENTION_FUNCTIONS.
        shards: of `sequence_parallel`; None if the layers were not told of it.
        training: the mode of the decoder.

    Raises:
        ValueError: inside torch's `context_parallel`; or something stands in the place of the
            function that this package registered, as Ulysses sequence parallelism does, and the
            layers were not told, or the other way round.
    """
    refuse_context_parallel()
    found = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if found is not attention_forward and shards is None:
        name = getattr(found, "__qualname__", type(found).__name__)
        raise ValueError(
            f"transformers' ALL_ATTENTION_FUNCTIONS has {name} for {implementation!r}, as "
            "Ulysses sequence parallelism (DeepSpeed's UlyssesSPAttentionHF, accelerate's "
            "sp_size) wraps it: call nsa_flex.sequence_parallel(model, group) with its ranks, so "
            "that gates and φ go with their heads, or run without it"
        )
    if found is attention_forward and shards is not None and shards.hold(training=training):
        raise ValueError(
            "nsa_flex.sequence_parallel(model, ...) was called, and nothing exchanges tokens for "
            f"heads around {implementation!r}: register it (DeepSpeed's UlyssesSPAttentionHF."
            'register_with_transformers with core_attn_implementation="nsa_flex", accelerate\'s '
            "sp_size), or call nsa_flex.sequence_parallel(model, None)"
        )


def own_forwards(modules: list[Attention]) -> list[OwnForward]:
    """Run the modules that attend by themselves through NSA; handles that undo it."""
    return [OwnForward(module) for module in modules if not family_of(module).calls_interface]


def give_back_forwards(modules: list[Attention]) -> None:
    """What `OwnForward.remove` does, for copies of its module."""
    for module in modules:
        if getattr(vars(module).get("forward"), "__func__", None) is _falcon_forward:
            del module.forward


class OwnForward:
    """`forward` of one FalconAttention, until `remove`."""

    def __init__(self, module: Attention) -> None:
        self.module = module
        # An instance attribute: the class and the other modules of this type keep theirs.
        module.forward = types.MethodType(_falcon_forward, module)

    def remove(self) -> None:
        """Give the module its class's forward back."""
        del self.module.forward


def _falcon_forward(
    module: Attention,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Tensor | None,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """`FalconAttention.forward`; without alibi, which `patch` refuses.

    The keys and values of a group stay one, in the cache too. (Falcon's own forward repeats those
    of its newer architecture for each query head.)
    """
    if module.config._attn_implementation not in IMPLEMENTATIONS:
        own = type(module).forward
        named = {"layer_past": layer_past, "position_embeddings": position_embeddings}
        return own(module, hidden_states, alibi, attention_mask, **named, **kwargs)
    query, key, value = _project(module, hidden_states)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    if layer_past is not None:
        key, value = layer_past.update(key, value, module.layer_idx)
    scaling = module.inv_norm_factor
    output, _ = attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return module.dense(output.flatten(2)), None


def _project(module: Attention, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, Hq, S, D), keys and values (B, Hkv, S, D), before position embedding.

    Heads lie group by group: the queries of a group, then its key, then its value.
    """
    shape = module.nsa.shape
    group = shape.num_query_heads // shape.num_kv_heads
    fused = module.query_key_value(hidden_states)
    fused = fused.unflatten(2, (shape.num_kv_heads, group + 2, shape.head_dim))
    query, key, value = fused.split((group, 1, 1), 3)  # [B, S, Hkv, G or 1, D]
    return tuple(x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))


for _name in IMPLEMENTATIONS:
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, mask_for_attention)
