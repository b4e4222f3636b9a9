"""Python calls that read a tensor on the host, seen by wrapping methods of Tensor for a while.

Not a function mode: torch.compile traces through one and compiles anew under it, so it would
change the very code that is watched. Dynamo knows tensor methods by name and never sees these
wrappers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_flex.hot_path.patches import replaced
from nsa_flex.hot_path.recording import Recording

HOST_READS = {
    "item": "Tensor.item()",
    "tolist": "Tensor.tolist()",
    "numpy": "Tensor.numpy()",
    "cpu": "Tensor.cpu()",
    "__array__": "numpy.asarray(tensor)",
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__complex__": "complex(tensor)",
    "__index__": "tensor as a Python index",
    "__contains__": "value in tensor",
    "__repr__": "printing a tensor",
    "__format__": "formatting a tensor",
}
MASK_DTYPES = (torch.bool, torch.uint8)


@contextlib.contextmanager
def watch_host_reads(recording: Recording, *, compiled: bool = False) -> Iterator[None]:
    """Within this context, record calls of the methods in `HOST_READS`, from any thread.

    Args:
        recording: takes the findings.
        compiled: the code inside runs compiled. Its guards compare `one_hot` of
            `torch.nn.functional` with what was compiled, so that one stays; graphs call torch's
            own.
    """
    one_hot = torch._C._nn if compiled else torch.nn.functional
    with contextlib.ExitStack() as stack:
        for name, detail in HOST_READS.items():
            original = getattr(torch.Tensor, name)
            stack.enter_context(
                replaced(torch.Tensor, name, _watched(original, detail, recording))
            )
        for owner, name, wrap in (
            (torch.Tensor, "__setitem__", _watched_setitem),
            (one_hot, "one_hot", _silenced_one_hot),
        ):
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name), recording)))
        yield


def has_mask(index: Any) -> bool:
    """Whether an index, or the tensors of one, holds a boolean mask."""
    entries = index if isinstance(index, (tuple, list)) else (index,)
    return any(isinstance(e, torch.Tensor) and e.dtype in MASK_DTYPES for e in entries)


def _watched(original: Callable, detail: str, recording: Recording) -> Callable:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        recording.record("host-sync", detail)
        with recording.silenced():
            return original(*args, **kwargs)

    return method


def _watched_setitem(original: Callable, recording: Recording) -> Callable:
    # The operator sees a Python scalar and a 0-d CPU tensor alike; only the first is a fill.
    write = _watched(original, "writing a tensor through a mask", recording)

    @functools.wraps(original)
    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        is_write = isinstance(value, torch.Tensor) and has_mask(index)
        return (write if is_write else original)(self, index, value)

    return setitem


def _silenced_one_hot(original: Callable, recording: Recording) -> Callable:
    # With a stated number of classes it reads its input, to check the range, on the CPU alone.
    @functools.wraps(original)
    def one_hot(*args: Any, **kwargs: Any) -> torch.Tensor:
        num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
        with recording.silenced() if num_classes >= 0 else contextlib.nullcontext():
            return original(*args, **kwargs)

    return one_hot
