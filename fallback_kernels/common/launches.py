"""Triton's launches of one thread, told to whoever wants to note or to replace them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from triton.runtime.jit import KernelInterface

# What is called in place of `kernel[grid](*args, **kwargs)`: (kernel, grid, args, kwargs).
Launch = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]

_patching = threading.Lock()


@contextmanager
def intercepting_launches(launch: Launch) -> Iterator[None]:
    """Within, `launch` is called for each kernel that this thread launches; others go on.

    One thread at a time: a second one waits.
    """
    thread = threading.get_ident()
    with _patching:
        ordinary = KernelInterface.__getitem__

        def intercept(kernel: Any, grid: Any) -> Callable[..., Any]:
            if threading.get_ident() != thread:
                return ordinary(kernel, grid)
            return lambda *args, **kwargs: launch(kernel, grid, args, kwargs)

        KernelInterface.__getitem__ = intercept
        try:
            yield
        finally:
            KernelInterface.__getitem__ = ordinary
