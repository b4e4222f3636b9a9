"""What a patched layer needs of its call, where decoder or layer drop the keyword argument.

Layers of StableLM and Nemotron call their attention with named arguments only, and Falcon's
decoder its layers. `position_ids` comes through everywhere, and the attention modules of these
families have no use for it, so it carries the context: as an argument like any other, which
gradient checkpointing keeps for the recomputation and the compiler traces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsa_flex.patching.call_context import CallContext
from nsa_flex.patching.hf_families import family_of
from nsa_flex.patching.hf_layers import Attention, Decoder
from nsa_flex.patching.hf_versions import cache_of

_Call = tuple[tuple[Any, ...], dict[str, Any]]


class Carried(NamedTuple):
    """In the place of `position_ids`: these, and the context of the call."""

    position_ids: Tensor
    context: CallContext


def hand_over(decoder: Decoder, modules: list[Attention]) -> list[RemovableHandle]:
    """Bring `nsa_call` from the decoder's arguments to `modules`, if their family drops it.

    Call it after the hook that makes `nsa_call` is registered.

    Returns:
        handles that undo it.
    """
    dropped_by = family_of(modules[0]).dropped_by
    if dropped_by is None:
        return []
    senders: list[tuple[nn.Module, Any]]
    if dropped_by == "decoder":
        # Its rotary embedding reads the positions on the way.
        senders = [(decoder, _send_from_decoder), (decoder.rotary_emb, _unpack)]
    else:
        senders = [(_owner(decoder, module), _send_from_layer) for module in modules]
    hooks = senders + [(module, _receive) for module in modules]
    return [owner.register_forward_pre_hook(hook, with_kwargs=True) for owner, hook in hooks]


def _owner(decoder: Decoder, module: Attention) -> nn.Module:
    """The layer that holds an attention module."""
    name = next(name for name, each in decoder.named_modules() if each is module)
    return decoder.get_submodule(name.rpartition(".")[0])


def _send_from_decoder(decoder: Decoder, args: tuple[Any, ...], call: dict[str, Any]) -> _Call:
    context = call.get("nsa_call")
    if context is None:  # another attention implementation, for a while
        return args, call
    position_ids = call.get("position_ids")
    if position_ids is None:
        position_ids = _next_positions(call)
    return args, {**call, "position_ids": Carried(position_ids, context)}


def _next_positions(call: dict[str, Any]) -> Tensor:
    """The positions that a decoder takes where none are passed: (1, S), after the cached ones."""
    embeds, cache = call.get("inputs_embeds"), cache_of(call)
    tokens = call["input_ids"] if embeds is None else embeds
    cached = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(tokens.shape[1], device=tokens.device) + cached)[None]


def _send_from_layer(layer: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> _Call:
    context = call.get("nsa_call")
    if context is None:
        return args, call
    return args, {**call, "position_ids": Carried(call["position_ids"], context)}


def _unpack(module: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> _Call:
    carried = call.get("position_ids")
    if not isinstance(carried, Carried):
        return args, call
    return args, {**call, "position_ids": carried.position_ids}


def _receive(module: Attention, args: tuple[Any, ...], call: dict[str, Any]) -> _Call:
    carried = call.get("position_ids")
    if not isinstance(carried, Carried):
        return args, call
    return args, {**call, "position_ids": carried.position_ids, "nsa_call": carried.context}
