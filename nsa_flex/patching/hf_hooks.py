"""Forward pre-hooks that tell patched attention modules of the call that they are part of.

Hooks run in the order they were registered in, and what comes later (steering, a mask put in its
place) may change the call. So hooks of others, whenever they come, go before these.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nsa_flex.patching.hf_families import family_of
from nsa_flex.patching.hf_layers import Attention, Decoder, parameter_names
from nsa_flex.patching.hf_refusals import check_mask_kept
from nsa_flex.patching.hf_versions import cache_of
from nsa_flex.patching.rows import CallContext, LayerInput

_Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class LastHook:
    """Handle of a hook that `register_last` registered."""

    module: nn.Module
    handle: RemovableHandle

    def remove(self) -> None:
        """Undo it; the module registers hooks as others do again."""
        self.handle.remove()
        vars(self.module).pop("register_forward_pre_hook", None)


def register_last(module: nn.Module, hook: Any) -> LastHook:
    """Register a forward pre-hook with keyword arguments of this package, to run last.

    Those of this package that follow run after it.
    """
    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    # An instance attribute: the class and other modules of this type keep theirs.
    vars(module)["register_forward_pre_hook"] = functools.partial(_register_before_own, module)
    return LastHook(module, handle)


def remove_copies(module: nn.Module) -> None:
    """Undo the hooks of this package that a module has as a copy of another, by no handle."""
    hooks: Any = module._forward_pre_hooks
    for number in [number for number, hook in hooks.items() if _is_own(hook)]:
        del hooks[number], module._forward_pre_hooks_with_kwargs[number]
        vars(module).pop("register_forward_pre_hook", None)


def _register_before_own(module: nn.Module, *args: Any, **kwargs: Any) -> RemovableHandle:
    """`register_forward_pre_hook` of the module's class, but before hooks of this package."""
    handle = type(module).register_forward_pre_hook(module, *args, **kwargs)
    hooks: Any = module._forward_pre_hooks  # an OrderedDict
    for number in [number for number, hook in hooks.items() if _is_own(hook)]:
        hooks.move_to_end(number)
    return handle


def _is_own(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith(f"{__package__}.")


@dataclass(frozen=True)
class InputHook:
    """Forward pre-hook of a patched attention module: what it was called with, handed on.

    Args:
        arguments: names of the module's parameters in order.
    """

    arguments: tuple[str, ...]

    def __call__(self, module: Attention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        call = kwargs
        if args:
            call = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        check_mask_kept(type(module).__name__, call)
        name = "hidden_states" if "hidden_states" in call else self.arguments[0]
        got = LayerInput(call[name], call.get("attention_mask"))
        return args, {**kwargs, "nsa_input": got}


def hook_attention(module: Attention) -> LastHook:
    """Hand on what `module` is called with."""
    return register_last(module, InputHook(parameter_names(module)))


class Carried(NamedTuple):
    """In the place of `position_ids`: these, and the context of the call."""

    position_ids: Tensor
    context: CallContext


def hand_over(decoder: Decoder, modules: list[Attention]) -> list[RemovableHandle]:
    """Bring `nsa_call` from the decoder's arguments to `modules`, if their family drops it.

    Layers of StableLM and Nemotron call their attention with named arguments only, and Falcon's
    decoder its layers. `position_ids` comes through everywhere, and these attention modules do not
    use it, so it carries the context: as an argument like any other, which gradient checkpointing
    keeps for the recomputation and the compiler traces.

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
        senders = [(decoder, _send), (decoder.rotary_emb, _unpack)]
    else:
        senders = [(_owner(decoder, module), _send) for module in modules]
    hooks = senders + [(module, _receive) for module in modules]
    return [owner.register_forward_pre_hook(hook, with_kwargs=True) for owner, hook in hooks]


def _owner(decoder: Decoder, module: Attention) -> nn.Module:
    """The layer that holds an attention module."""
    name = next(name for name, each in decoder.named_modules() if each is module)
    return decoder.get_submodule(name.rpartition(".")[0])


def _send(owner: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> _Call:
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
