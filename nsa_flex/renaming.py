"""Names that changed: for one more minor release the former ones work, with a warning."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def former_names(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module that had other names: what it has of them now, and a warning.

    Args:
        module: its `__name__`.
        names: former name to where it is now, "nsa_flex.masks.show".

    >>> __getattr__ = former_names("nsa_flex.example", {"Config": "nsa_flex.NSAConfig"})
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home, _, now = names[name].rpartition(".")
        _warn(f"{module}.{name}", names[name])
        return getattr(importlib.import_module(home), now)

    return find


def former_arguments(**names: str) -> Callable[[F], F]:
    """Lets a function take keyword arguments by their former names, with a warning.

    Args:
        names: former name to the present one.

    Raises:
        TypeError: at a call that gives an argument by both names.

    >>> @former_arguments(block="block_size")
    ... def rows(block_size):
    ...     return block_size
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for former in names.keys() & kwargs.keys():
                now = names[former]
                if now in kwargs:
                    raise TypeError(
                        f"{function.__name__} got {now} and {former}, its former name: pass {now}"
                    )
                _warn(f"the argument {former} of {function.__name__}", now)
                kwargs[now] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def _warn(former: str, now: str) -> None:
    text = f"{former} is now {now}; the former name goes with the next minor release"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
