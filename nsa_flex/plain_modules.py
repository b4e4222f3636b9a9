"""Modules whose parameters may be used without calling the module."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules import module as every_module

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_HOOKS_OF_ALL = tuple(f"_global{name}" for name in _HOOKS)


def is_plain_module(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of `module` is its class's `forward` of plain parameters, and nothing else.

    It is not where hooks are registered, on it or on all modules, where `forward` was replaced,
    where the class is another (a wrapper, a parametrization), or where parameters are of a class
    of their own (sharded, quantized).
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and module._compiled_call_impl is None
        and not any(getattr(module, name) for name in _HOOKS)
        and not any(getattr(every_module, name) for name in _HOOKS_OF_ALL)
        and all(type(each) in (nn.Parameter, torch.Tensor) for each in module._parameters.values())
    )
