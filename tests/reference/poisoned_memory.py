"""torch.empty and its kin, filled: whoever reads what nobody wrote sees NaN.

Fresh memory is often zero, so that a kernel which forgets a row passes by luck. Floats become
NaN, integers their type's largest value, which no table may be indexed with. Eager calls only;
the bodies of custom operators and kernel launchers run eagerly inside compiled graphs too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor

_empty = torch.empty
_empty_like = torch.empty_like
_empty_strided = torch.empty_strided
_new_empty = Tensor.new_empty


def poison(tensor: Tensor) -> Tensor:
    """Fill `tensor` in place with NaN, or its integer type's maximum; bool stays as it is."""
    if torch.compiler.is_compiling():
        return tensor
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def empty(*args: Any, **kwargs: Any) -> Tensor:
    return poison(_empty(*args, **kwargs))


def empty_like(*args: Any, **kwargs: Any) -> Tensor:
    return poison(_empty_like(*args, **kwargs))


def empty_strided(*args: Any, **kwargs: Any) -> Tensor:
    return poison(_empty_strided(*args, **kwargs))


def new_empty(*args: Any, **kwargs: Any) -> Tensor:
    return poison(_new_empty(*args, **kwargs))


def install() -> None:
    """Replace torch's functions by the poisoned ones, once and for the whole process."""
    # torch looks these functions up by name once, on first use: let it find its own.
    torch.utils._device._device_constructors()
    torch._dynamo.trace_rules.get_torch_obj_rule_map()
    _put(empty, empty_like, empty_strided, new_empty)


@contextmanager
def lifted() -> Iterator[None]:
    """Torch's own functions, for tests of what a fill would keep from being used."""
    before = torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty
    _put(_empty, _empty_like, _empty_strided, _new_empty)
    try:
        yield
    finally:
        _put(*before)


def _put(empty: Any, empty_like: Any, empty_strided: Any, new_empty: Any) -> None:
    torch.empty = empty
    torch.empty_like = empty_like
    torch.empty_strided = empty_strided
    Tensor.new_empty = new_empty  # type: ignore[method-assign]
