"""Modules whose parameters may be used without calling the module."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as every_module

_PLAIN = {nn.Parameter, torch.Tensor}


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks see calls of `module`: registered on it, or on all modules."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or every_module._global_forward_pre_hooks
        or every_module._global_forward_hooks
        or every_module._global_backward_pre_hooks
        or every_module._global_backward_hooks
    )


def is_plain_module(
    module: nn.Module, kind: type[nn.Module], may_lack: tuple[str, ...] = ()
) -> bool:
    """Whether a call of `module` is its class's `forward` of plain parameters, and nothing else.

    It is not where hooks are registered, on it or on all modules, where `forward` was replaced,
    where the class is another (a wrapper, a parametrization), or where parameters are of a class
    of their own (sharded, quantized), or are None, but for those that it `may_lack`.
    """
    kinds = {
        type(each)
        for name, each in module._parameters.items()
        if each is not None or name not in may_lack
    }
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not has_hooks(module)
        and kinds <= _PLAIN
    )
