"""Run code without data: what reads a value on the host cannot work on the meta device."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from nsa_flex.hot_path.backward import ForwardBackward
from nsa_flex.hot_path.findings import Finding, traceback_location
from nsa_flex.hot_path.host_copies import watch_host_copies
from nsa_flex.hot_path.recording import Recording

_PLACED = (torch.Tensor, torch.device)
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, types.FunctionType)


def find_value_reads(fn: Callable, *args: Any, **kwargs: Any) -> list[Finding]:
    """Run `fn` on meta copies of its tensors: the first read of a value, and copies to the device.

    Tensors are replaced wherever they are held: arguments, containers, objects such as caches,
    the parameters and buffers of a module (also one that `fn` closes over or names), so nothing
    that the caller owns is changed. A tensor that `fn` makes without `device=` lands on the CPU
    and fails here as it would on an accelerator. Up to the first read of a value, blocking copies
    from the host are found too (`device-copy`): of Python lists and numbers, which a run on the
    CPU does not show, and of tensors that were made on the CPU. Not found here, but by
    `find_syncs`: printing a tensor and writing through a mask, which torch lets pass without data.
    Code that has no meta kernel is a finding too; its text says so.

    >>> find_value_reads(lambda x: x * x.max().item(), torch.ones(3))[0].detail
    'RuntimeError: Tensor.item() cannot be called on meta tensors'
    """
    fn, args, kwargs = _callable_to_meta(fn), to_meta(args), to_meta(kwargs)
    copies = Recording()
    try:
        with watch_host_copies(copies):
            fn(*args, **kwargs)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        detail = f"{type(error).__name__}: {reason}"
        read = Finding("meta-run", detail, traceback_location(error.__traceback__))
        return [*copies.findings, read]
    return copies.findings


def to_meta(value: Any) -> Any:
    """A deep copy of `value` with its tensors on the meta device; `value` if it holds none.

    Tensors that were the same object stay the same object: tied weights stay tied. A
    `torch.device` that an object remembers becomes the meta device too.
    """
    held = list(held_in(value, set()))
    memo: dict[int, Any] = {id(x): _on_meta(x) for x in held if isinstance(x, _PLACED)}
    if not memo:
        return value
    # What says for itself how it is copied may leave out, or share, what must move as well.
    own = [x for x in held if not isinstance(x, _PLACED)]
    memo |= {id(x): object.__new__(type(x)) for x in own}
    for x in own:
        vars(memo[id(x)]).update(copy.deepcopy(vars(x), memo))
    return copy.deepcopy(value, memo)


def _callable_to_meta(fn: Any, made: dict[types.FunctionType, Any] | None = None) -> Any:
    """`fn` on meta copies of what it holds; `made` are the functions that were copied so far."""
    made = {} if made is None else made
    fn = getattr(fn, "_torchdynamo_orig_callable", None) or getattr(fn, "_orig_mod", fn)
    if isinstance(fn, ForwardBackward):
        return ForwardBackward(_callable_to_meta(fn.fn, made))
    if isinstance(fn, functools.partial):
        inner = _callable_to_meta(fn.func, made)
        return functools.partial(inner, *to_meta(fn.args), **to_meta(fn.keywords))
    if not isinstance(fn, types.FunctionType):
        return to_meta(fn)
    if fn not in made:
        _copy_function(fn, made)
    return made[fn]


def _copy_function(fn: types.FunctionType, made: dict[types.FunctionType, Any]) -> None:
    def copied(value: Any) -> Any:
        return _callable_to_meta(value, made) if callable(value) else to_meta(value)

    cells = tuple(types.CellType() for _ in fn.__closure__ or ())
    held = {
        name: to_meta(value)
        for name in fn.__code__.co_names
        if isinstance(value := fn.__globals__.get(name), (torch.Tensor, torch.nn.Module))
    }
    globals_ = {**fn.__globals__, **held} if held else fn.__globals__
    made[fn] = types.FunctionType(fn.__code__, globals_, fn.__name__, None, cells)
    # It may hold itself: fill it after it is known.
    made[fn].__defaults__ = tuple(map(copied, fn.__defaults__ or ()))
    made[fn].__kwdefaults__ = {n: copied(value) for n, value in (fn.__kwdefaults__ or {}).items()}
    for cell, original in zip(cells, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # Not assigned yet.
            cell.cell_contents = copied(original.cell_contents)


def _on_meta(placed: torch.Tensor | torch.device) -> torch.Tensor | torch.device:
    if isinstance(placed, torch.device):
        return torch.device("meta")
    made = placed.detach().to("meta")
    if isinstance(placed, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=placed.requires_grad)
    return made.requires_grad_(placed.requires_grad)


def held_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Every tensor and device in `value`, however deep, and the objects that copy themselves."""
    if id(value) in seen or isinstance(value, _LEAVES):
        return
    seen.add(id(value))
    if isinstance(value, _PLACED):
        yield value
        return
    if hasattr(type(value), "__deepcopy__") and hasattr(value, "__dict__"):
        yield value
    for child in _children(value):
        yield from held_in(child, seen)


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, types.MethodType):
        yield value.__self__
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
