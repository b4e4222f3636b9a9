"""What a callable wraps, and where that is defined."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any

import torch

from nsa_flex.hot_path import ForwardBackward


def unwrapped(value: Any, owner: type | None = None) -> tuple[Any, type | None]:
    """Through compiled wrappers, partials, decorators and bound methods; the class of the last."""
    while True:
        if isinstance(value, ForwardBackward):
            value = value.fn
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value, owner = value.__func__, type(value.__self__)
        elif not isinstance(value, torch.nn.Module) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        elif hasattr(value, "_orig_mod"):
            value = value._orig_mod
        else:
            return value, owner


def definition_of(fn: Any) -> str:
    """`file:line in function` of a function, or of a module's `forward`; else its name.

    >>> definition_of(torch.nn.Linear(2, 2)).rpartition(" in ")[2]
    'forward'
    >>> definition_of(torch.sin)
    'sin'
    """
    value, _ = unwrapped(fn)
    if isinstance(value, torch.nn.Module):
        value, _ = unwrapped(type(value).forward)
    elif not isinstance(value, types.FunctionType):
        value, _ = unwrapped(inspect.getattr_static(type(value), "__call__", value))
    code = getattr(value, "__code__", None)
    if code is None:
        return getattr(fn, "__name__", type(fn).__name__)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"
