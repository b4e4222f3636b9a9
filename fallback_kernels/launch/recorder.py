"""Records an operator's body as a launch plan: its PyTorch operators and Triton launches.

A plan depends on no tensor's values. A body cannot be recorded whose Python reads one, or that
uses a tensor which is neither an argument nor made by it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from nsa_flex.fallback_kernels.common.launches import intercepting_launches
from nsa_flex.fallback_kernels.launch.packing import InterpretedLaunch, PackedLaunch
from nsa_flex.fallback_kernels.launch.steps import (
    Allocation,
    Copy,
    DescriptorOf,
    Fork,
    Join,
    ListOf,
    OnStream,
    Operation,
    Step,
    Unrecordable,
    View,
    Whole,
    operands,
)

# Run again in each replay: their results may be written to.
_ALLOCATING = ("empty", "new_", "zeros", "ones", "full", "clone")
_NEW_MEMORY = {"empty", "new_empty", "empty_like", "zeros", "new_zeros", "zeros_like"}
# Tags of operators that return values, or shapes that depend on values, to Python.
_ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
MAX_CONSTANT_BYTES = 4 << 20  # of one result that depends on no argument; the plan keeps it

_current = threading.local()


def current_recorder() -> Recorder | None:
    """The recorder of this thread; None where no plan is being made."""
    return getattr(_current, "recorder", None)


class Owner(NamedTuple):
    """Layout and address of the tensor that a register stands for, which may be freed by now."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_offset: int
    pointer: int
    storage_bytes: int

    @classmethod
    def of(cls, x: Tensor) -> Owner:
        """Reads them from the tensor."""
        places = int(x.storage_offset()), x.data_ptr(), x.untyped_storage().nbytes()
        return cls(x.shape, x.stride(), x.dtype, x.device, *places)


class Recorder(TorchDispatchMode):
    """Turns operators and launches into steps; `problem` is why there can be no plan, or None.

    Tensors live no longer than they would without it: a recorded call takes no more memory.

    Args:
        inputs: the operator's tensors, registers 0, 1, ...
    """

    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.problem: str | None = None
        self.owners: list[Owner] = []  # by register
        self.constants: dict[int, Tensor] = {}  # by register
        self._registers = WeakTensorKeyDictionary()
        self._inside = False
        self.num_inputs = len(inputs)
        for x in inputs:
            self._own(x)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Runs this thread's operators and launches, and records them."""
        _current.recorder = self
        try:
            with intercepting_launches(self._launch), self:
                yield
        finally:
            _current.recorder = None

    def reference(self, x: Tensor) -> Whole | View:
        """How a replay finds this tensor."""
        register = self._register(x)
        owner = self.owners[register]
        if x.dtype != owner.dtype:
            raise Unrecordable(f"a view of {owner.dtype} memory as {x.dtype}")
        offset = x.storage_offset() - owner.storage_offset
        if offset == 0 and x.shape == owner.shape and x.stride() == owner.stride:
            return Whole(register)
        return View(register, tuple(x.shape), tuple(x.stride()), int(offset))

    def result(self, x: Tensor) -> Whole | View | Copy:
        """The reference of a result; a constant is copied, as the caller may write to it."""
        found = self.reference(x)
        return Copy(found) if found.register in self.constants else found

    # Streams: `streams.round_robin` tells of them.

    def fork(self, device: torch.device, others: list[torch.cuda.Stream]) -> None:
        self.steps.append(Fork(device, others))

    def join(self, device: torch.device, others: list[torch.cuda.Stream]) -> None:
        self.steps.append(Join(device, others))

    @contextmanager
    def on_stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        outer, self.steps = self.steps, []
        try:
            yield
        finally:
            operations = any(isinstance(step, (Operation, Allocation)) for step in self.steps)
            outer.append(OnStream(stream, self.steps, operations))
            self.steps = outer

    # PyTorch's operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        with self._within():
            out = func(*args, **kwargs)
        if self.problem is None:
            try:
                self._note(func, args, kwargs, out)
            except Unrecordable as problem:
                self.problem = str(problem)
        return out

    @contextmanager
    def _within(self) -> Iterator[None]:
        """Inside an operator or a launch nothing is recorded: replaying it repeats all of it."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        returns = func._schema.returns
        results = out if isinstance(out, (tuple, list)) else (out,)
        if _ASKING & set(func.tags):
            raise Unrecordable(f"{func} tells Python of values")
        if isinstance(out, list):  # one list of tensors: all of them alias, or none does
            returns = returns * len(results)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in _arguments(func))
        aliases = [
            isinstance(x, Tensor) and self._is_alias(x, func, r, args, kwargs)
            for x, r in zip(results, returns, strict=False)
        ]
        if aliases and all(aliases) and not writes:
            return  # a view
        if writes and self.constants.keys() & operands(self._held((*args, *kwargs.values()))):
            raise Unrecordable(f"{func} may write into what is kept with the plan")
        if not writes and self._is_constant(func, args, kwargs, results):
            return
        name = func._schema.name.removeprefix("aten::")
        if name in _NEW_MEMORY and out.is_contiguous():
            self.steps.append(Allocation(self._own(out), out, zeros="zeros" in name))
            return
        self.steps.append(
            Operation(
                func,
                tuple(self._held(x) for x in args),
                {name: self._held(x) for name, x in kwargs.items()},
                tuple(
                    self._own(x) if isinstance(x, Tensor) and not alias else None
                    for x, alias in zip(results, aliases, strict=False)
                ),
            )
        )

    def _is_constant(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: Any
    ) -> bool:
        """Whether results depend on no argument; they are then kept with the plan."""
        random = torch.Tag.nondeterministic_seeded in func.tags
        if random or func._schema.name.removeprefix("aten::").startswith(_ALLOCATING):
            return False
        tensors = [x for x in _flat((args, kwargs)) if isinstance(x, Tensor)]
        if not all(self._register(x) in self.constants for x in tensors):
            return False
        owned = [x for x in results if isinstance(x, Tensor)]
        if any(x.numel() * x.element_size() > MAX_CONSTANT_BYTES for x in owned):
            return False
        for x in owned:
            self.constants[self._own(x)] = x
        return True

    def _is_alias(
        self, x: Tensor, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether a result shares an argument's memory; it then gets that register.

        The schema names the argument; memory tells views from copies (`contiguous`, `reshape`).
        """
        if result.alias_info is None:
            return False
        named = [
            (argument, args[i] if i < len(args) else kwargs.get(argument.name))
            for i, argument in enumerate(_arguments(func))
            if argument.alias_info is not None
        ]
        for argument, of in named:
            # A list of views names no set of its own.
            shared = argument.alias_info.before_set & result.alias_info.before_set
            if isinstance(of, Tensor) and (shared or len(named) == 1):
                if x.untyped_storage()._cdata != of.untyped_storage()._cdata:
                    return False
                self._alias(x, self._register(of))
                return True
        raise Unrecordable(f"{func} gives memory of unknown origin")

    # Triton's launches.

    def _launch(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._inside:
            return kernel.run(*args, grid=grid, warmup=False, **kwargs)
        with self._within():
            compiled = kernel.run(*args, grid=grid, warmup=False, **kwargs)
        if self.problem is None:
            try:
                self._note_launch(kernel, compiled, grid, args, kwargs)
            except Unrecordable as problem:
                self.problem = str(problem)
        return compiled

    def _note_launch(
        self, kernel: Any, compiled: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if compiled is None:  # Triton's interpreter
            held = tuple(self._held(x) for x in args)
            named = {name: self._held(x) for name, x in kwargs.items()}
            self.steps.append(InterpretedLaunch(kernel, grid, held, named))
            return
        if callable(grid):
            raise Unrecordable(f"{kernel.__name__} has a grid that is a function")
        names = kernel.arg_names[len(args) :]
        defaults = kernel.signature.parameters
        bound = [*args, *(kwargs[n] if n in kwargs else defaults[n].default for n in names)]
        pointers, descriptors = [], []
        for i, x in enumerate(bound):
            if isinstance(x, Tensor):
                pointers.append((i, *self._address(x)))
                bound[i] = None
            elif isinstance(getattr(x, "base", None), Tensor):
                descriptors.append((i, *self._address(x.base)))
            elif isinstance(x, tuple) and any(isinstance(y, Tensor) for y in _flat(x)):
                raise Unrecordable(f"{kernel.__name__} takes tensors in a tuple")
        launch_grid = (*grid, 1, 1)[:3]
        self.steps.append(PackedLaunch(compiled, launch_grid, bound, pointers, descriptors))

    # Registers.

    def _address(self, x: Tensor) -> tuple[int, int]:
        """Register, and bytes from its first element to that of `x`."""
        register = self._register(x)
        offset = x.data_ptr() - self.owners[register].pointer if x.numel() else 0
        return register, offset

    def _held(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.reference(x)
        if isinstance(x, (torch.UntypedStorage, torch.Generator)):
            raise Unrecordable(f"an operator takes a {type(x).__name__}")
        if isinstance(x, (tuple, list)) and any(isinstance(y, Tensor) for y in _flat(x)):
            return ListOf(tuple(self._held(y) for y in x))
        if hasattr(x, "base") and isinstance(x.base, Tensor):
            return DescriptorOf(x, self.reference(x.base))
        return x

    def _own(self, x: Tensor) -> int:
        self.owners.append(Owner.of(x))
        self._alias(x, len(self.owners) - 1)
        return len(self.owners) - 1

    def _alias(self, x: Tensor, register: int) -> None:
        if x not in self._registers:
            self._registers[x] = register

    def _register(self, x: Tensor) -> int:
        register = self._registers.get(x)
        if register is None:
            raise Unrecordable(f"a tensor {tuple(x.shape)} from outside the operator")
        return register


def _arguments(func: Any) -> Any:
    return func._schema.arguments


def _flat(x: Any) -> Iterator[Any]:
    if isinstance(x, dict):
        x = tuple(x.values())
    if isinstance(x, (tuple, list)):
        for each in x:
            yield from _flat(each)
    else:
        yield x
