"""Calls of operators that do without PyTorch's machinery where nobody watches it.

An operator written in Python goes through its dispatcher several times a call, with autograd more
than a hundred microseconds. A plain eager call on CUDA tensors needs none of it: the body and its
gradients are one `torch.autograd.Function`. Compiled, traced, watched or profiled, and in the
second derivative, the operator itself is called.
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


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, list) and x:
            return x[0]
    raise ValueError("an operator without tensors")
