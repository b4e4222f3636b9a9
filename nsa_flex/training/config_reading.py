"""YAML mappings into dataclasses; errors name the key, what came and what was expected."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_mapping(cls: type[T], values: Any, where: str = "") -> T:
    """An instance of dataclass `cls`; nested dataclasses come from nested mappings.

    Args:
        where: name of the section, for errors.

    Raises:
        ValueError: a key is unknown or missing, or a value is not what the field takes.

    >>> from nsa_flex.config import NSAConfig
    >>> from_mapping(NSAConfig, {"window_size": "many"}, "model.nsa")
    Traceback (most recent call last):
    ValueError: model.nsa.window_size is 'many' (str); expected an integer
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where or 'the config'} is {_shown(values)}; expected a mapping")
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in values:
        if key not in fields:
            raise ValueError(unknown_key(_join(where, key), str(key), list(fields)))
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise ValueError(f"{_join(where, name)} is missing; the config must give it")
    hints = get_type_hints(cls)
    given = {
        name: _convert(hints[name], value, _join(where, name)) for name, value in values.items()
    }
    try:
        return cls(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def _convert(kind: Any, value: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (each for each in get_args(kind) if each is not type(None))
        return _convert(kind, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return from_mapping(kind, value, where)
    if origin is Literal:
        if value not in get_args(kind):
            names = ", ".join(map(str, get_args(kind)))
            raise ValueError(f"{where} is {_shown(value)}; expected one of {names}")
        return value
    if origin is tuple:
        item, *_ = get_args(kind)
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, (list, tuple)):
            raise ValueError(f"{where} is {_shown(value)}; expected a list")
        return tuple(_convert(item, each, f"{where}[{i}]") for i, each in enumerate(listed))
    return _plain(origin or kind, value, where)


def _plain(kind: Any, value: Any, where: str) -> Any:
    """A number, a string, a boolean or a mapping. YAML reads 1e-3, without a dot, as a string."""
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    elif type(value) is kind or (kind is dict and isinstance(value, Mapping)):
        return value
    names = {float: "a number", int: "an integer", str: "a string", bool: "true or false"}
    raise ValueError(f"{where} is {_shown(value)}; expected {names.get(kind, 'a mapping')}")


def unknown_key(where: str, key: str, known: list[str]) -> str:
    """What is said of a key that is none of `known`."""
    near = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    return f"unknown key {where}; {hint}"


def _shown(value: Any) -> str:
    return "empty" if value is None else f"{value!r} ({type(value).__name__})"


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
