"""Steps of a launch plan. They read and fill registers, one for each tensor.

Launches of kernels are in `packing`.

A register holds a tensor that owns memory: an argument of the operator or the result of a PyTorch
operator. Views are not kept: a kernel gets its pointer from the register's and an offset, an
operator a view made by one `as_strided`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.fallback_kernels.launch.native import native


class Unrecordable(Exception):
    """Raised with the reason why a body has no launch plan."""


class Registers:
    """The tensors of one replay.

    tensors: by register, None before and after its life. pointers: addresses, by register.
    stream: handle of the CUDA stream that kernels are launched on; main: of the caller's.
    """

    __slots__ = ("main", "pointers", "stream", "tensors")

    def __init__(self, tensors: list[Tensor | None], pointers: list[int], stream: int) -> None:
        """tensors, pointers: initial values of all registers."""
        self.tensors, self.pointers = tensors, pointers
        self.stream = self.main = stream

    def put(self, register: int, x: Tensor) -> None:
        self.tensors[register] = x
        self.pointers[register] = x.data_ptr()


class Step:
    """One action of a replay.

    registers: that it reads or fills. operands: those of them whose tensors it reads, where a
    kernel reads addresses alone.
    """

    __slots__ = ()
    registers: AbstractSet[int] = frozenset()
    operands: AbstractSet[int] = frozenset()

    def __call__(self, registers: Registers) -> None:
        raise NotImplementedError


class Whole(NamedTuple):
    """The tensor of a register."""

    register: int

    def of(self, registers: Registers) -> Tensor | None:
        return registers.tensors[self.register]


class View(NamedTuple):
    """A view of a register's tensor, `offset` elements behind its first."""

    register: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, registers: Registers) -> Tensor:
        base = registers.tensors[self.register]
        assert base is not None
        return torch.as_strided(base, self.size, self.stride, base.storage_offset() + self.offset)


class ListOf(NamedTuple):
    """A list of arguments, some of them references."""

    items: tuple[Any, ...]

    def of(self, registers: Registers) -> list[Any]:
        return [resolved(item, registers) for item in self.items]


class DescriptorOf(NamedTuple):
    """A tensor descriptor of a reference's memory."""

    descriptor: Any
    base: Whole | View

    def of(self, registers: Registers) -> Any:
        descriptor = copy.copy(self.descriptor)
        descriptor.base = self.base.of(registers)
        return descriptor


class Copy(NamedTuple):
    """A copy of what a reference stands for."""

    item: Whole | View

    @property
    def register(self) -> int:
        return self.item.register

    def of(self, registers: Registers) -> Tensor:
        found = self.item.of(registers)
        assert found is not None
        return found.clone()


_REFERENCES = {Whole, View, ListOf, DescriptorOf, Copy}


def resolved(item: Any, registers: Registers) -> Any:
    """The tensor that a reference stands for; other items as they are."""
    return item.of(registers) if type(item) in _REFERENCES else item


def operands(x: Any) -> set[int]:
    """The registers of all references in arguments."""
    if isinstance(x, (Whole, View, Copy)):
        return {x.register}
    if isinstance(x, ListOf):
        return operands(x.items)
    if isinstance(x, DescriptorOf):
        return operands(x.base)
    if isinstance(x, dict):
        return operands(tuple(x.values()))
    if isinstance(x, (tuple, list)):
        return set().union(*(operands(each) for each in x))
    return set()


class Operation(Step):
    """An operator of PyTorch.

    results: the register of each result that owns memory, None of others. Only arguments that
    are references are looked up.
    """

    __slots__ = (
        *("args", "call", "kwargs", "name", "named", "numbered"),
        *("operands", "registers", "results"),
    )

    def __init__(
        self,
        operator: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        results: tuple[int | None, ...],
    ) -> None:
        self.name: str = operator._schema.name
        self.call = operator
        self.args, self.kwargs, self.results = list(args), kwargs, results
        self.operands = operands((args, kwargs))
        self.registers = self.operands | {r for r in results if r is not None}
        self.numbered = [(i, x) for i, x in enumerate(args) if type(x) in _REFERENCES]
        self.named = [(name, x) for name, x in kwargs.items() if type(x) in _REFERENCES]

    def __call__(self, registers: Registers) -> None:
        args, kwargs, results = self.args, self.kwargs, self.results
        if self.numbered:
            args = args.copy()
            for i, x in self.numbered:
                args[i] = x.of(registers)
        if self.named:
            kwargs = {**kwargs, **{name: x.of(registers) for name, x in self.named}}
        out = self.call(*args, **kwargs)
        if isinstance(out, Tensor):
            out = (out,)
        for register, x in zip(results, out or (), strict=False):
            if register is not None:
                registers.put(register, x)


def memory(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """Returns an allocator of uninitialised memory of this layout, on CUDA on the current device.

    There it is the function that Inductor's code calls: `torch.empty` costs the host three times
    as much.
    """
    if device.type != "cuda":
        return partial(torch.empty_strided, size, stride, dtype=dtype, device=device)
    guards: Any = torch._C._dynamo.guards  # torch's stubs lack the function
    return partial(guards._empty_strided_cuda, size, stride, dtype)


class Allocation(Step):
    """New memory, zeroed or uninitialised."""

    __slots__ = ("make", "register", "registers", "zeros")

    def __init__(self, register: int, like: Tensor, *, zeros: bool) -> None:
        assert like.is_contiguous()
        self.register, self.registers = register, {register}
        self.zeros = zeros
        self.make = memory(tuple(like.shape), like.stride(), like.dtype, like.device)

    def __call__(self, registers: Registers) -> None:
        x = self.make()
        if self.zeros:
            x.zero_()
        registers.tensors[self.register] = x
        registers.pointers[self.register] = x.data_ptr()


@dataclass(slots=True)
class Fork(Step):
    """The other streams wait for the caller's."""

    device: torch.device
    others: list[torch.cuda.Stream]

    def __call__(self, registers: Registers) -> None:
        for other in self.others:
            native().wait(other.cuda_stream, registers.main, self.device.index)


@dataclass(slots=True)
class Join(Step):
    """The caller's stream waits for the others."""

    device: torch.device
    others: list[torch.cuda.Stream]

    def __call__(self, registers: Registers) -> None:
        for other in self.others:
            native().wait(registers.main, other.cuda_stream, self.device.index)


class OnStream(Step):
    """Steps on one of the other streams.

    operations: whether PyTorch's are among them, which ask for the current stream.
    """

    __slots__ = ("operands", "operations", "registers", "steps", "stream")

    def __init__(
        self, stream: torch.cuda.Stream, steps: list[Step], operations: bool = False
    ) -> None:
        self.stream, self.steps, self.operations = stream, steps, operations
        self.registers = frozenset().union(*(step.registers for step in steps))
        self.operands = frozenset().union(*(step.operands for step in steps))

    def __call__(self, registers: Registers) -> None:
        registers.stream = self.stream.cuda_stream
        if self.operations:
            with torch.cuda.stream(self.stream):
                for step in self.steps:
                    step(registers)
        else:
            for step in self.steps:
                step(registers)
        registers.stream = registers.main


@dataclass(slots=True)
class Release(Step):
    """Frees the tensors of registers that no later step reads."""

    numbers: tuple[int, ...]

    def __call__(self, registers: Registers) -> None:
        for number in self.numbers:
            registers.tensors[number] = None
