"""Catch operators of a decode step that go over a whole cache, where a step needs a few rows.

A step may read all of a cache, as dense attention does. What it must not do is write as much:
`torch.cat` of the cache and one token, keys repeated for the heads of a group, a conversion.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa_flex.hot_path.findings import Finding, Recording
from nsa_flex.hot_path.meta import held_in
from nsa_flex.hot_path.torch_internals import custom_op_kernel

# They read, or write, the rows that an index names.
_BY_INDEX = ("index", "gather", "scatter", "take", "embedding", "put")


def find_cache_copies(prepare: Callable[[], Any]) -> list[Finding]:
    """The operators of a call that read all of a cached tensor, or write all of it, and write as
    much: one finding, of kind `cache-copy`, for each line.

    Cached are the tensors of three dimensions and more that objects among the arguments hold, and
    such as are at least half as large as the largest of them: states that are small beside the
    cache cost little. What was copied from a cached tensor is one too.

    Args:
        prepare: makes the call, a `functools.partial`, with new inputs; what it does itself is
            not watched. It is called twice: the first call compiles what there is to compile.
    """
    prepare()()
    call = prepare()
    cached = _cached_in((call.args, call.keywords))
    if not cached:
        return []
    copies = Recording()
    with _DispatchMode(copies, cached):
        call()
    by_line = {found.location: found for found in reversed(copies.findings)}
    return [found for found in copies.findings if by_line[found.location] is found]


def _cached_in(inputs: Any) -> list[Tensor]:
    direct = {id(x) for x in tree_leaves(inputs)}
    held = [
        x
        for x in held_in(inputs, set())
        if isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.dim() > 2
        if id(x) not in direct
    ]
    largest = max((x.numel() for x in held), default=0)
    return [x for x in held if 2 * x.numel() >= largest]


class _DispatchMode(TorchDispatchMode):
    def __init__(self, copies: Recording, cached: Iterable[Tensor]) -> None:
        super().__init__()
        self.copies = copies
        # By memory: the number of elements, and the tensor, so that no other takes its place.
        self.cached = {_memory(x): x for x in cached if _memory(x)}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # Compiled code stays compiled.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        kernel = custom_op_kernel(func, args, kwargs)
        if kernel is not None:
            with self:
                return kernel(*args, **kwargs)
        whole = [x for x in _tensors((args, kwargs)) if self._is_whole(x)]
        out = func(*args, **kwargs)
        if whole and not any(word in func.overloadpacket.__name__ for word in _BY_INDEX):
            self._look(func, whole[0], args, out)
        return out

    def _is_whole(self, x: Tensor) -> bool:
        """Whether it is a cached tensor or a view of all of it."""
        cached = self.cached.get(_memory(x))
        return cached is not None and x.numel() >= cached.numel()

    def _look(self, func: Any, source: Tensor, args: tuple, out: Any) -> None:
        inputs = {_memory(x) for x in _tensors(args)}
        made = [x for x in _tensors(out) if _memory(x) not in inputs]
        size = self.cached[_memory(source)].numel()
        copied = [x for x in made if x.numel() >= size and _memory(x)]
        self.cached |= {_memory(x): x for x in copied}
        writes = func._schema.arguments[0].is_write and self._is_whole(args[0])
        if copied or writes:
            shape = tuple(self.cached[_memory(source)].shape)
            self.copies.record("cache-copy", f"{func} goes over all of a cached tensor {shape}")


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    """What tensors of one piece of memory share; 0 for those without, such as sparse ones."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return x.untyped_storage()._cdata
    return 0
