"""Run code without data: what reads a value on the host cannot work on the meta device."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_flex.hot_path.backward import ForwardBackward
from nsa_flex.hot_path.findings import Finding, traceback_location

_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType)


def find_value_reads(fn: Callable, *args: Any, **kwargs: Any) -> list[Finding]:
    """Run `fn` on meta copies of its tensors; the first thing that needs a value is the finding.

    Tensors are replaced wherever they are held: arguments, containers, objects such as caches,
    the parameters and buffers of a module (also one that `fn` closes over), so nothing that the
    caller owns is changed. A tensor that `fn` makes without `device=` lands on the CPU and fails
    here as it would on an accelerator. Not found here, but by `find_syncs`: printing a tensor and
    writing through a mask, which torch lets pass without data. Code that has no meta kernel is a
    finding too; its text says so.

    >>> find_value_reads(lambda x: x * x.max().item(), torch.ones(3))[0].detail
    'RuntimeError: Tensor.item() cannot be called on meta tensors'
    """
    fn, args, kwargs = _callable_to_meta(fn), to_meta(args), to_meta(kwargs)
    try:
        fn(*args, **kwargs)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        detail = f"{type(error).__name__}: {reason}"
        return [Finding("meta-run", detail, traceback_location(error.__traceback__))]
    return []


def to_meta(value: Any) -> Any:
    """A deep copy of `value` whose tensors are on the meta device; `value` if it holds none.

    Tensors that were the same object stay the same object: tied weights stay tied.
    """
    memo = {id(tensor): _meta_tensor(tensor) for tensor in _tensors_in(value, set())}
    return copy.deepcopy(value, memo) if memo else value


def _callable_to_meta(fn: Callable) -> Callable:
    plain = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", fn)
    return _plain_callable_to_meta(plain)


def _plain_callable_to_meta(fn: Any) -> Callable:
    if isinstance(fn, ForwardBackward):
        return ForwardBackward(_callable_to_meta(fn.fn))
    if isinstance(fn, functools.partial):
        args, keywords = to_meta(fn.args), to_meta(fn.keywords)
        return functools.partial(_callable_to_meta(fn.func), *args, **keywords)
    if isinstance(fn, types.FunctionType) and fn.__closure__:
        return _with_meta_closure(fn)
    return to_meta(fn)


def _with_meta_closure(fn: types.FunctionType) -> types.FunctionType:
    cells = tuple(_meta_cell(cell) for cell in fn.__closure__ or ())
    made = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    made.__kwdefaults__ = fn.__kwdefaults__
    return made


def _meta_cell(cell: types.CellType) -> types.CellType:
    held = cell.cell_contents
    return types.CellType(_callable_to_meta(held) if callable(held) else to_meta(held))


def _meta_tensor(tensor: torch.Tensor) -> torch.Tensor:
    made = tensor.detach().to("meta")
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _tensors_in(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    if id(value) in seen or isinstance(value, _LEAVES):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield value
        return
    for child in _children(value):
        yield from _tensors_in(child, seen)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
