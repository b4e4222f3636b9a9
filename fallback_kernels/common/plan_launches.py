"""Kernel launches of a launch plan: compiled kernels, and those of Triton's interpreter.

A step keeps its arguments; a replay puts in the stream and the addresses. Triton's own way to a
compiled kernel builds the tensor map of each descriptor at every launch, in Python. A
`PreparedLaunch` has all of it behind it and calls the C function that Triton's launcher ends in.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import triton

from nsa_flex.fallback_kernels.common.plan_steps import Registers, Step, operands, resolved

# Versions of Triton whose launcher is known.
LAUNCHER_VERSIONS = ("3.6.", "3.7.")
# Tensor maps that a descriptor keeps: of every address that the layers of a model give it.
MAX_TENSOR_MAPS = 256

Address = tuple[int, int, int]  # argument, register, offset in bytes


def compiled_launch(
    compiled: Any,
    grid: tuple[int, ...],
    args: list[Any],
    pointers: list[Address],
    descriptors: list[Address],
) -> Step:
    """The launch of a compiled kernel, prepared where Triton's launcher is as it is known.

    Args:
        args: of the kernel; tensor descriptors as they were when the plan was made.
        pointers: arguments that are tensors. descriptors: those that are tensor descriptors.
    """
    call = (compiled, (*grid, 1, 1)[:3], args, pointers, descriptors)
    try:
        return PreparedLaunch(*call)
    except Unprepared:
        return CompiledLaunch(*call)


class CompiledLaunch:
    """A compiled kernel: Triton's launcher, called with addresses in place of tensors.

    The last descriptor is kept for as long as its memory is the same.
    """

    __slots__ = ("args", "descriptors", "kept", "pointers", "run")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        args: list[Any],
        pointers: list[Address],
        descriptors: list[Address],
    ) -> None:
        # Grid, stream, function, metadata and three for hooks; then the arguments.
        head = [*grid, 0, compiled.function, compiled.packed_metadata, None, None, None]
        self.run = compiled.run
        self.args = head + args
        first = len(head)
        self.pointers = [(first + i, register, offset) for i, register, offset in pointers]
        self.descriptors = [(first + i, register, offset) for i, register, offset in descriptors]
        self.kept = [(-1, _at(args[i], -1)) for i, _, _ in descriptors]
        for i, _, _ in self.descriptors:
            self.args[i] = None  # the tensor that it names is not to live on

    @property
    def registers(self) -> set[int]:
        return {register for _, register, _ in (*self.pointers, *self.descriptors)}

    def __call__(self, registers: Registers) -> None:
        args = self.args.copy()
        args[3] = registers.stream
        addresses = registers.pointers
        for i, register, offset in self.pointers:
            args[i] = addresses[register] + offset
        for number, (i, register, offset) in enumerate(self.descriptors):
            address = addresses[register] + offset
            kept = self.kept[number]
            if kept[0] != address:  # one assignment: threads may replay the plan side by side
                self.kept[number] = kept = (address, _at(kept[1], address))
            args[i] = kept[1]
        self.run(*args)


class Unprepared(Exception):
    """Triton's launcher is not as it is known, or the kernel asks for more than a launch."""


class PreparedLaunch:
    """A compiled kernel: the C function that Triton's launcher ends in.

    The tensor map of a descriptor depends on its address alone, within a plan, and is kept by it.

    pointers: arguments of the C function. maps: likewise, with what makes the tensor map.
    """

    __slots__ = ("args", "grid", "launch", "listed", "maps", "options", "pointers")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        args: list[Any],
        pointers: list[Address],
        descriptors: list[Address],
    ) -> None:
        """Raises `Unprepared`."""
        launcher = compiled.run
        if not triton.__version__.startswith(LAUNCHER_VERSIONS):
            raise Unprepared(f"Triton {triton.__version__}")
        if type(launcher).__name__ != "CudaLauncher":
            raise Unprepared(f"a launcher {type(launcher).__name__}")
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise Unprepared("a kernel with scratch memory")
        self.grid = grid
        self.listed = hasattr(launcher, "kernel_signature")
        self.launch = _c_function(launcher, bool(descriptors))
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        no_scratch, no_hooks = (None, None), (None, None, None)
        metadata = compiled.packed_metadata
        self.options: tuple[Any, ...] = (compiled.function, *flags)
        if self.listed:
            signature = (launcher.arg_annotations, launcher.kernel_signature)
            self.options += (metadata, *no_hooks, *no_scratch, *signature)
        else:
            self.options += (*no_scratch, metadata, *no_hooks)

        module: Any = sys.modules[type(launcher).__module__]
        expand = module.make_tensordesc_arg
        metas = compiled.metadata.tensordesc_meta or [None] * len(descriptors)
        if len(metas) != len(descriptors):
            raise Unprepared("descriptors that are no arguments of their own")
        makers = {
            i: TensorMaps(expand, args[i], meta)
            for (i, _, _), meta in zip(descriptors, metas, strict=True)
        }
        self.args: list[Any] = []
        places = []  # of each argument among the expanded ones
        for i, x in enumerate(args):
            places.append(len(self.args))
            self.args += makers[i].expanded() if i in makers else [x]
        moved = [(places[i], register, offset) for i, register, offset in pointers]
        self.maps: list[tuple[int, int, int, TensorMaps]] = []
        for i, register, offset in descriptors:
            if makers[i].meta is None:  # not by TMA: the kernel gets the address
                moved.append((places[i], register, offset))
            else:
                self.maps.append((places[i], register, offset, makers[i]))
        self.pointers = moved

    @property
    def registers(self) -> set[int]:
        return {x[1] for x in self.pointers} | {x[1] for x in self.maps}

    def __call__(self, registers: Registers) -> None:
        args = self.args.copy()
        addresses = registers.pointers
        for i, register, offset in self.pointers:
            args[i] = addresses[register] + offset
        for i, register, offset, maps in self.maps:
            args[i] = maps[addresses[register] + offset]
        if self.listed:
            self.launch(*self.grid, registers.stream, *self.options, args)
        else:
            self.launch(*self.grid, registers.stream, *self.options, *args)


class TensorMaps(dict[int, Any]):
    """A descriptor's tensor maps, by address."""

    def __init__(self, expand: Callable[[Any, Any], list[Any]], descriptor: Any, meta: Any):
        super().__init__()
        self.expand, self.meta = expand, meta
        # The tensor that it describes is not to live on.
        self.descriptor = _at(descriptor, descriptor.base.data_ptr())

    def expanded(self) -> list[Any]:
        """What the C function gets for the descriptor: tensor map or address, shape, strides."""
        return [None, *self.expand(self.descriptor, self.meta)[1:]]

    def __missing__(self, address: int) -> Any:
        if len(self) >= MAX_TENSOR_MAPS:
            self.clear()
        found = self[address] = self.expand(_at(self.descriptor, address), self.meta)[0]
        return found


def _c_function(launcher: Any, descriptors: bool) -> Any:
    """The function behind the launcher's Python."""
    if not descriptors:
        return launcher.launch
    names, cells = launcher.launch.__code__.co_freevars, launcher.launch.__closure__
    return cells[names.index("launcher")].cell_contents


class _Pointer:
    """What a tensor descriptor's base is asked for at a launch."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _at(descriptor: Any, address: int) -> Any:
    """The tensor descriptor of memory elsewhere."""
    descriptor = copy.copy(descriptor)
    descriptor.base = _Pointer(address)
    return descriptor


class InterpretedLaunch:
    """A kernel in Triton's CPU interpreter, launched as it was."""

    __slots__ = ("args", "grid", "kernel", "kwargs", "operands")

    def __init__(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.args, self.kwargs = kernel, grid, args, kwargs
        self.operands = operands((args, kwargs))

    def __call__(self, registers: Registers) -> None:
        args = [resolved(x, registers) for x in self.args]
        kwargs = {name: resolved(x, registers) for name, x in self.kwargs.items()}
        self.kernel[self.grid](*args, **kwargs)
