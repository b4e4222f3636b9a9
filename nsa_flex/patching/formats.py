"""Checkpoints that others trained and named: how they read, and how they are written again.

A module of one such format has `MODEL_TYPE`, as in its config.json; `OPTIONS`; `from_upstream` and
`to_upstream`, between its config.json and that of the patched model; `own_name` and
`upstream_name`, between names of tensors. The record of a model that came from one names it, in
its entry `format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from nsa_flex.patching import llama_nsa

T = TypeVar("T")

FORMATS: dict[str, Any] = {module.MODEL_TYPE: module for module in (llama_nsa,)}


def format_of(record: Mapping[str, Any]) -> Any:
    """The module of the format that a record names; None for that of nsa_flex."""
    name = record.get("format")
    return None if name is None else FORMATS[name]


def own_name(record: Mapping[str, Any], name: str) -> str | None:
    """The name in the patched model of a tensor that the patch added; None for any other."""
    known = format_of(record)
    if known is not None:
        return known.own_name(name)
    return name if ".nsa." in f".{name}" else None


def upstream_tensors(record: Mapping[str, Any], tensors: Mapping[str, T]) -> dict[str, T]:
    """Those tensors, by name in the patched model, that its checkpoint has, under its names."""
    known = format_of(record)
    if known is None:
        return dict(tensors)
    names = {name: known.upstream_name(name) for name in tensors}
    return {names[own]: tensor for own, tensor in tensors.items() if names[own] is not None}
