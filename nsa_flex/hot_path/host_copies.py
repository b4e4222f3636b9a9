"""Copies from the host to the device, seen without one: the meta device stands in for it.

On the CPU such a copy is no copy, and torch makes a tensor of Python values on any device without
an operator that a mode could see. Code that runs on meta tensors names the device all the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nsa_flex.hot_path.patches import replaced
from nsa_flex.hot_path.recording import Recording

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
