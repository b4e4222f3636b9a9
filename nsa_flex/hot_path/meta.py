"""Run code without data, on the meta device: reads of values fail, copies to the device show.

On the CPU a copy from the host is no copy, and torch makes a tensor of Python values on any device
without an operator that a mode could see. Code that runs on meta tensors names the device all the
same.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_flex.hot_path.backward import ForwardBackward
from nsa_flex.hot_path.findings import Finding, Recording, traceback_location
from nsa_flex.hot_path.torch_internals import replaced

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


aten = torch.ops.aten

_MAKERS = (
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    (torch.Tensor, "new_tensor"),
)
_INDEXING = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)


@contextlib.contextmanager
def watch_host_copies(recording: Recording) -> Iterator[None]:
    """Within this context, record blocking copies from the CPU to the meta device.

    Those are: tensors made of Python values, indexing by Python lists or by tensors of the CPU,
    and `.to(device)`. A tensor that is made without `device=` is no copy.
    """
    with contextlib.ExitStack() as stack:
        for owner, name in _MAKERS:
            maker = _watched_maker(getattr(owner, name), name, recording)
            stack.enter_context(replaced(owner, name, maker))
        stack.enter_context(_IndexingMode(recording))
        stack.enter_context(_CopyMode(recording))
        yield


def _watched_maker(original: Callable, name: str, recording: Recording) -> Callable:
    @functools.wraps(original)
    def maker(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.compiler.is_compiling():  # Torch traces through: a constant of the graph.
            return original(*args, **kwargs)
        with recording.silenced():
            made = original(*args, **kwargs)
        given = args[-1] if args else kwargs.get("data", kwargs.get("obj"))
        if made.is_meta and not (isinstance(given, torch.Tensor) and given.is_meta):
            recording.record("device-copy", f"{name} copies Python values from the host")
        return made

    return maker


class _IndexingMode(TorchFunctionMode):
    """Indexing by lists.

    A mode, since a method that was once set on Tensor leaves a mark when it is taken off again:
    Python then holds every tensor for a sequence, and torch.tensor fails on a list of scalars.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _INDEXING and args[0].is_meta:
            entries = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(entry, list) for entry in entries):
                message = "indexing by a list, copied from the host"
                self.recording.record("device-copy", message)
        return func(*args, **(kwargs or {}))


class _CopyMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _copies_from_host(func, args, kwargs):
            self.recording.record("device-copy", f"{func} copies a tensor from the host")
        return func(*args, **kwargs)


def _copies_from_host(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    if func is aten._to_copy.default:
        device = kwargs.get("device")
        to_meta = device is not None and torch.device(device).type == "meta"
        return to_meta and args[0].is_cpu and not kwargs.get("non_blocking")
    if func is aten.copy_.default:
        non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
        return args[0].is_meta and args[1].is_cpu and not non_blocking
    if func in (aten.index.Tensor, aten.index_put.default, aten.index_put_.default):
        return args[0].is_meta and any(x is not None and x.is_cpu for x in args[1])
    return False
