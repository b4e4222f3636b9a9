"""Batches of inputs: what a caller may pass, and what a report calls each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

Values = tuple[Any, ...] | Mapping[str, Any]


@dataclass(frozen=True)
class Batch:
    """One call: a function that makes its arguments, and a name for it.

    Args:
        make: returns a tuple of positional or a mapping of keyword arguments.
        label: sizes of its tensors, `input_ids [2, 64]`.
        small: places, as (path, dimension), whose size is 0 or 1: torch takes these for constants.
        requires_grad: whether one of its tensors does.
    """

    make: Callable[[], Values]
    label: str
    small: frozenset[tuple[str, int]]
    requires_grad: bool

    def bind(self, fn: Callable) -> Callable[[], Any]:
        """The call of `fn` with the arguments, made anew: what makes them is not watched."""
        args, kwargs = split(self.make())
        return functools.partial(fn, *args, **kwargs)


class InputError(Exception):
    """A function that makes a batch has failed; the cause is its exception."""


def split(values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments.

    >>> split({"x": 1})
    ((), {'x': 1})
    """
    return ((), dict(values)) if isinstance(values, Mapping) else (values, {})


def batches_of(inputs: Any) -> list[Batch]:
    """What `audit` accepts as inputs, as batches.

    Args:
        inputs: one batch, or a list (or another iterable that is no tuple) of batches. A batch is
            a tuple of positional arguments, a mapping of keyword arguments, a tensor, or a
            function of no arguments that makes one of these: for inputs that a call uses up, such
            as caches.

    Raises:
        TypeError: a batch is none of these.
        ValueError: there is no batch.
        InputError: a function that makes a batch raised.

    >>> [batch.label for batch in batches_of([(torch.ones(2, 8),), {"x": torch.ones(2, 9)}])]
    ['[2, 8]', 'x [2, 9]']
    """
    single = isinstance(inputs, (torch.Tensor, tuple, Mapping)) or callable(inputs)
    many = [inputs] if single else list(inputs) if isinstance(inputs, Iterable) else None
    if many is None:
        raise TypeError(f"inputs must be a batch or a list of batches, got {_name(inputs)}")
    if not many:
        raise ValueError("inputs holds no batch; pass at least one")
    return [_batch(each) for each in many]


def _batch(given: Any) -> Batch:
    make = functools.partial(_made, given) if callable(given) else lambda: given
    leaves = _tensors(_values(make()))
    small = {
        (path, dim) for path, x in leaves for dim, size in enumerate(x.shape) if size in (0, 1)
    }
    requires_grad = any(x.requires_grad for _, x in leaves)
    return Batch(lambda: _values(make()), _label(leaves), frozenset(small), requires_grad)


def _made(factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise InputError from error


def _values(given: Any) -> Values:
    if isinstance(given, torch.Tensor):
        return (given,)
    if not isinstance(given, (tuple, Mapping)):
        raise TypeError(
            "a batch must be a tuple of positional arguments, a mapping of keyword arguments, a "
            f"tensor or a function that makes one of these, got {_name(given)}"
        )
    return given


def _tensors(values: Any) -> list[tuple[str, torch.Tensor]]:
    leaves, _ = tree_flatten_with_path(values)
    named = ((_path(keys), leaf) for keys, leaf in leaves)
    return [(path, leaf) for path, leaf in named if isinstance(leaf, torch.Tensor)]


def _path(keys: Iterable[Any]) -> str:
    parts = (getattr(k, "key", getattr(k, "idx", getattr(k, "name", k))) for k in keys)
    return ".".join(str(part) for part in parts)


def _label(leaves: list[tuple[str, torch.Tensor]]) -> str:
    shown = [f"{path} {list(x.shape)}" for path, x in leaves[:2]]
    shown = [text.lstrip("0123456789 ") for text in shown]  # Positional: the sizes alone.
    more = [f"{len(leaves) - 2} more"] if len(leaves) > 2 else []
    return ", ".join([*shown, *more]) or "no tensors"


def _name(value: Any) -> str:
    return type(value).__name__
