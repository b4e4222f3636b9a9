"""Calls of operators that do without PyTorch's machinery where nobody watches it.

An operator written in Python goes through its dispatcher several times a call, with autograd more
than a hundred microseconds. A plain eager call on CUDA tensors needs none of it: the body and its
gradients are one `torch.autograd.Function`. Traced, watched or profiled, and in the second
derivative, the operator itself is called. Compiled code calls the operator too, which then has
nothing left to differentiate, and comes to the body at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_plain(x: Tensor) -> bool:
    """Whether a call with such a tensor is eager, on CUDA, and nobody would miss the operator."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.is_cuda
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and not torch.autograd._profiler_enabled()
        and not torch.jit.is_tracing()
    )


def directly(
    operator: Any,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
    *,
    first: bool = False,
) -> Callable[..., Any]:
    """A function like `operator`, a `torch.library.custom_op`, for calls from Python.

    Args:
        setup_context, backward: what `operator.register_autograd` got; None for an operator
            without gradients.
        first: the function returns the operator's first result alone, so that autograd need not
            wrap the others; `backward` gets the gradient of that one.
    """
    body = operator._init_fn
    shorten(operator)

    if setup_context is None or backward is None:

        def without_gradients(*args: Any) -> Any:
            if is_plain(_first_tensor(args)) and not torch.is_grad_enabled():
                return body(*args)
            return operator(*args)

        return without_gradients

    keep, differentiate = setup_context, backward

    def forward(ctx: Any, *args: Any) -> Any:
        out = body(*args)
        keep(ctx, args, out)
        return out[0] if first else out

    # The class is named after the operator: profilers and graphs show its name.
    methods = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
    kind: Any = type(torch.autograd.Function)
    direct = kind(operator._name, (torch.autograd.Function,), methods)

    def with_gradients(*args: Any) -> Any:
        plain = is_plain(_first_tensor(args))
        if plain and torch.is_grad_enabled():
            return direct.apply(*args)
        out = body(*args) if plain else operator(*args)
        return out[0] if first else out

    return with_gradients


def shorten(operator: Any) -> None:
    """Plain calls of the operator's overload without gradients go to its body.

    Compiled code makes such calls, from Python. The dispatcher takes each through two functions of
    `torch.library`, with all arguments and results made anew for either.
    """
    overload = operator._opoverload
    dispatch = getattr(overload, "_op", None)  # what the overload calls
    if dispatch is None or hasattr(dispatch, "shortens"):
        return
    body = operator._init_fn
    behind = _defaults(overload._schema)

    def call(*args: Any, **kwargs: Any) -> Any:
        others = behind.get(len(args))
        if others is None or torch.is_grad_enabled() or not is_plain(_first_tensor(args)):
            return dispatch(*args, **kwargs)
        if others:  # which the body takes by position: its launch plans want that
            given = {**others, **kwargs}
            if len(given) > len(others):
                return dispatch(*args, **kwargs)  # which says what is wrong
            return body(*args, *given.values())
        return dispatch(*args, **kwargs) if kwargs else body(*args)

    call.shortens = dispatch  # type: ignore[attr-defined]
    overload._op = call


def _defaults(schema: Any) -> dict[int, dict[str, Any]]:
    """By a number of arguments, of those that may be left out behind them: name and default."""
    parameters = schema.arguments
    number = len(parameters)
    while number and parameters[number - 1].has_default_value():
        number -= 1
    return {
        first: {x.name: x.default_value for x in parameters[first:]}
        for first in range(max(number, 1), len(parameters) + 1)
    }


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, list) and x:
            return x[0]
    raise ValueError("an operator without tensors")
