"""Falcon's attention, which calls no attention interface, with NSA in the place of its softmax."""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import Tensor

from nsa_flex.patching.hf_attention import attention_forward
from nsa_flex.patching.hf_families import family_of
from nsa_flex.patching.hf_layers import IMPLEMENTATIONS, Attention


def own_forwards(modules: list[Attention]) -> list[OwnForward]:
    """Run the modules that attend by themselves through NSA; handles that undo it."""
    return [OwnForward(module) for module in modules if not family_of(module).calls_interface]


def give_back_forwards(modules: list[Attention]) -> None:
    """What `OwnForward.remove` does, for copies of its module."""
    for module in modules:
        if getattr(vars(module).get("forward"), "__func__", None) is _forward:
            del module.forward


class OwnForward:
    """`forward` of one FalconAttention, until `remove`."""

    def __init__(self, module: Attention) -> None:
        self.module = module
        # An instance attribute: the class and the other modules of this type keep theirs.
        module.forward = types.MethodType(_forward, module)

    def remove(self) -> None:
        """Give the module its class's forward back."""
        del self.module.forward


def _forward(
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
