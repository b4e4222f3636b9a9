"""Kernels whose launches may be noted, or something else done in their place.

Triton launches a kernel by `kernel[grid](...)`. A kernel of the package is decorated by
`recordable`, above `triton.jit` or `gluon.jit`; kernels of others are as Triton made them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# What is called in place of `kernel[grid](*args, **kwargs)`: (kernel, grid, args, kwargs).
Launch = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_thread = threading.local()


def recordable(kernel: Any) -> Any:
    """Decorates a kernel, what `triton.jit` or `gluon.jit` returned: `intercepting_launches` sees
    it.
    """
    kernel.__class__ = _recordable_class(kernel.__class__)
    return kernel


def is_recordable(kernel: Any) -> bool:
    """Whether the kernel is decorated by `recordable`."""
    return getattr(kernel, "is_recordable", False)


@contextmanager
def intercepting_launches(launch: Launch) -> Iterator[None]:
    """Within, `launch` is called for each recordable kernel that this thread launches."""
    before = getattr(_thread, "launch", None)
    _thread.launch = launch
    try:
        yield
    finally:
        _thread.launch = before


@functools.cache
def _recordable_class(kind: Any) -> Any:
    """A subclass of a class of Triton's, by the same name: Triton compares names."""
    ordinary = kind.__getitem__

    def __getitem__(kernel: Any, grid: Any) -> Callable[..., Any]:
        launch = getattr(_thread, "launch", None)
        if launch is None:
            return ordinary(kernel, grid)
        return lambda *args, **kwargs: launch(kernel, grid, args, kwargs)

    return type(kind.__name__, (kind,), {"__getitem__": __getitem__, "is_recordable": True})
