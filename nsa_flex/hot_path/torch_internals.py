"""The private names of torch that the detectors lean on, all of them, and attributes replaced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._dynamo
import torch._inductor.config
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters, graph_break_reasons
from torch._guards import CompileContext
from torch._inductor import cudagraph_utils
from torch._inductor.utils import fresh_cache
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

__all__ = [
    "TorchDynamoException",
    "backward_node_name",
    "cudagraph_skips",
    "custom_op_kernel",
    "fresh_cache",
    "fresh_compiler",
    "graphs_from_no_file",
    "is_being_compiled",
    "lookup_backend",
    "optimize",
]

_TORCH_NAMESPACES = {"aten", "prim", "prims", "inductor", "quantized", "c10d", "_c10d_functional"}
# The limit that makes torch give up and run eagerly would hide the recompiles that are counted.
_NO_LIMIT = {"recompile_limit": 1 << 20, "accumulated_recompile_limit": 1 << 20}


def graphs_from_no_file() -> contextlib.AbstractContextManager[Any]:
    """Within it, torch compiles graphs anew that its caches on disk have, and stores none."""
    return torch._inductor.config.patch(force_disable_caches=True)


def backward_node_name() -> str | None:
    """Name of the gradient formula that runs in this thread, e.g. `MulBackward0`."""
    node = torch._C._current_autograd_node()
    return None if node is None else node.name()


def is_being_compiled() -> bool:
    """Whether torch.compile is at work in this thread, whose own reads are no part of a run."""
    return CompileContext.current_compile_id() is not None


def custom_op_kernel(func: Any, args: tuple, kwargs: dict[str, Any]) -> Callable | None:
    """The kernel that a call of a custom operator will reach, None for operators of torch.

    Called within a dispatch mode, it runs without going through that mode, but the operators in
    its body do go through it. None also where another mode waits, which must see the call.
    """
    is_custom = isinstance(func, OpOverload) and func.namespace not in _TORCH_NAMESPACES
    if not is_custom or torch._C._len_torch_dispatch_stack():
        return None
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not tensors:
        return None
    key = torch._C._dispatch_key_for_device(tensors[0].device.type)
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(func.name(), key):
        return None
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return functools.partial(func.redispatch, keys)


@contextlib.contextmanager
def fresh_compiler() -> Iterator[list[Any]]:
    """Forget all compiled code before and after, and lift the recompile limits inside.

    Yields torch's list of the reasons of all graph breaks so far, which grows inside: graphs
    handed to a backend carry theirs too, but a break that ends an empty graph only shows here.
    """
    torch._dynamo.reset()
    graph_break_reasons.clear()
    try:
        with torch._dynamo.config.patch(_NO_LIMIT):
            yield graph_break_reasons
    finally:
        torch._dynamo.reset()


def optimize(
    fn: Callable, backend: Callable, guard_failed: Callable[[Any], None], dynamic: bool | None
) -> Callable:
    """torch.compile, plus a hook that is told of each guard that failed."""
    return torch._dynamo.optimize(backend, guard_fail_fn=guard_failed, dynamic=dynamic)(fn)


class CudagraphSkips:
    """How often, and why, torch left out a CUDA graph."""

    def __init__(self) -> None:
        self.count = 0
        self.reasons: list[str] = []

    def warning(self, text: str, *args: Any) -> None:
        """What torch calls with a reason, in the place of its logger."""
        self.reasons.append(str(text) % args if args else str(text))


@contextlib.contextmanager
def cudagraph_skips() -> Iterator[CudagraphSkips]:
    """Within, collect the skips of CUDA graphs; complete when the context ends."""
    skips, logger = CudagraphSkips(), cudagraph_utils.cudagraphs_log
    before = counters["inductor"]["cudagraph_skips"]
    cudagraph_utils.cudagraphs_log = skips  # type: ignore[assignment]
    try:
        yield skips
    finally:
        cudagraph_utils.cudagraphs_log = logger
        skips.count = counters["inductor"]["cudagraph_skips"] - before


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable) -> Iterator[None]:
    """Within, `owner.name` is `replacement`; afterwards what it was, inherited or its own."""
    own = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
