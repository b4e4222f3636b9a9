"""Calls of operators without the layers of `torch.library`, where nobody watches them.

An operator made by `torch.library.custom_op` goes through two Python functions of PyTorch's around
its body, one for gradients and one that looks whether results share memory with arguments; each
gets arguments and results made anew by the dispatcher. A plain call on CUDA needs neither:

- eager, body and gradients are one `torch.autograd.Function`, and no dispatcher is asked;
- compiled code calls the operator, which has nothing left to differentiate: a kernel of ours, for
  CUDA and the dispatch key of its autograd, runs the body at once.

Every other call (traced, watched, profiled, with gradients inside compiled code, in the second
derivative) goes through the operator as PyTorch made it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import make_autograd_impl  # what `register_autograd` registers

_libraries: list[torch.library.Library] = []  # a library that is gone takes its kernels along


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
    register_kernels(operator)

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


@functools.cache
def register_kernels(operator: Any, device: str = "CUDA") -> None:
    """Registers kernels of the operator that run its body at once, in plain calls without
    gradients.

    On a CPU, a call of an operator of twelve arguments takes 33 µs by `custom_op` alone, 21 with a
    kernel for the device, 9 with both kernels; the body itself 3.5.
    """
    body, formula = operator._init_fn, make_autograd_impl(operator._opoverload, operator)

    def below_autograd(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled() or not is_plain(_first_tensor(args)):
            return formula(keyset, *args)
        return body(*args)

    namespace, name = operator._qualname.split("::")
    library = torch.library.Library(namespace, "FRAGMENT")
    library.impl(name, below_autograd, f"Autograd{device}", with_keyset=True)
    library.impl(name, body, device)
    _libraries.append(library)


def _first_tensor(args: tuple[Any, ...]) -> Tensor:
    for x in args:
        if isinstance(x, Tensor):
            return x
        if isinstance(x, list) and x:
            return x[0]
    raise ValueError("an operator without tensors")
