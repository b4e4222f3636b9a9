"""The parameters that a callable trains."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn


def parameters_of(fn: Any) -> list[nn.Parameter]:
    """Of a module, of the one a method is bound to, and what a function names or closes over."""
    cells = [c.cell_contents for c in getattr(fn, "__closure__", None) or () if _is_filled(c)]
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    globals_ = [getattr(fn, "__globals__", {}).get(name) for name in names]
    held = [fn, getattr(fn, "__self__", None), *cells, *globals_]
    own = [p for p in held if isinstance(p, nn.Parameter)]
    return own + [p for m in held if isinstance(m, nn.Module) for p in m.parameters()]


@contextlib.contextmanager
def gradients_kept(fn: Any) -> Iterator[None]:
    """Parameters' `.grad` is None inside and what it was before afterwards."""
    before = [(p, p.grad) for p in parameters_of(fn)]
    for p, _ in before:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in before:
            p.grad = grad


def _is_filled(cell: Any) -> bool:
    with contextlib.suppress(ValueError):
        return cell.cell_contents is not None
    return False
