"""Kernel launches of a launch plan: compiled kernels, and those of Triton's interpreter.

Triton's launcher parses every argument in Python and C, and encodes the tensor map of each
descriptor, at every launch. A `PackedLaunch` did that once: it keeps the kernel's parameters
packed in memory, and a replay fills in the stream and the addresses. An operator with a kernel of
unknown layout has no plan: its body runs, and Triton launches.
"""

from __future__ import annotations

import struct
import sys
from typing import Any

import torch
import triton

from nsa_flex.fallback_kernels.common.arch import version_unsupported_reason
from nsa_flex.fallback_kernels.launch.native import PROBLEMS, native
from nsa_flex.fallback_kernels.launch.steps import (
    OnStream,
    Registers,
    Step,
    Unrecordable,
    operands,
    resolved,
)

MAP_ALIGNMENT = 64  # of a CUtensorMap, bytes
# Of Triton's types, as the `struct` module spells them.
FORMATS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q",
    "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp16": "e", "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip

Address = tuple[int, int, int]  # argument, register, offset in bytes


class PackedLaunch(Step):
    """Compiled kernels with packed parameters, launched in order by `packed_launch.c`.

    As made, one kernel; `append` adds what follows it at once.
    """

    __slots__ = ("compiled", "handles", "launch", "registers")

    def __init__(
        self,
        compiled: Any,
        grid: tuple[int, ...],
        args: list[Any],
        pointers: list[Address],
        descriptors: list[Address],
    ) -> None:
        """The launch with such arguments.

        Args:
            args: of the kernel; tensor descriptors as they were when the plan was made.
            pointers: arguments that are tensors. descriptors: those that are tensor descriptors.

        Raises:
            Unrecordable: parameters or launch options of unknown layout.
        """
        launcher = compiled.run
        device = triton.runtime.driver.active.get_current_device()
        reason = version_unsupported_reason(torch.device("cuda", device))
        if reason is not None:
            raise Unrecordable(reason)
        if type(launcher).__name__ != "CudaLauncher":
            raise Unrecordable(f"a launcher {type(launcher).__name__}")
        if launcher.global_scratch_size or launcher.profile_scratch_size:
            raise Unrecordable("a kernel with scratch memory")
        num_warps, num_ctas, shared = compiled.packed_metadata
        if num_ctas != 1:
            raise Unrecordable("a kernel with clusters")
        module = native()
        if module is None:
            raise Unrecordable("packed_launch.c could not be compiled")
        try:
            packed = _Parameters(compiled, args, pointers, descriptors)
            handle = module.prepare(
                *(compiled.function, device, grid, 32 * num_warps, shared),
                *(launcher.launch_cooperative_grid, launcher.launch_pdl),
                *packed.tables(),
            )
        except PROBLEMS as problem:
            raise Unrecordable(str(problem)) from problem
        self.launch = module.launch
        self.handles: tuple[Any, ...] = (handle,)
        self.compiled = [compiled]  # which the functions that `handles` launch belong to
        self.registers = {register for _, register, _ in (*pointers, *descriptors)}

    def append(self, other: PackedLaunch) -> None:
        """Also launches the kernels of `other`, after its own."""
        self.handles += other.handles
        self.compiled += other.compiled
        self.registers |= other.registers

    def __call__(self, registers: Registers) -> None:
        self.launch(self.handles, registers.pointers, registers.stream)


def join_launches(steps: list[Step]) -> list[Step]:
    """Merges packed launches that follow one another into one step."""
    joined: list[Step] = []
    for step in steps:
        if joined and isinstance(step, PackedLaunch) and isinstance(joined[-1], PackedLaunch):
            joined[-1].append(step)
            continue
        if isinstance(step, OnStream):
            step.steps = join_launches(step.steps)
        joined.append(step)
    return joined


class _Parameters:
    """A kernel's parameters in memory, and where addresses go."""

    def __init__(
        self, compiled: Any, args: list[Any], pointers: list[Address], descriptors: list[Address]
    ) -> None:
        """Raises ValueError or LookupError for an argument of unknown layout."""
        self.memory = bytearray()
        self.places: list[int] = []
        self.sizes: list[int] = []
        self.pointers: list[Address] = []  # by byte of the memory, as the next
        self.maps: list[Address] = []
        of_pointers = {i: (register, offset) for i, register, offset in pointers}
        of_maps = {i: (register, offset) for i, register, offset in descriptors}
        metas = iter(compiled.metadata.tensordesc_meta or ())
        types = compiled.src.signature.values()
        for i, (kind, x) in enumerate(zip(types, args, strict=True)):
            if kind == "constexpr":
                continue
            if i in of_maps:
                expanded = _expanded(compiled.run, x, next(metas, None))
                self._add_descriptor(expanded, len(x.shape), of_maps[i])
            elif isinstance(kind, str) and kind.startswith("*"):
                # A pointer that is no tensor's is that of None.
                at = self._add(struct.pack("Q", 0))
                if i in of_pointers:
                    self.pointers.append((at, *of_pointers[i]))
                elif x is not None:
                    raise ValueError(f"a pointer {type(x).__name__}")
            else:
                self._add_numbers(kind, x)
        for _scratch in range(2):
            self._add(struct.pack("Q", 0))

    def tables(self) -> tuple[bytes, ...]:
        """Places and sizes of the parameters, their memory, addresses of pointers and of maps."""
        places, sizes = (struct.pack(f"{len(x)}I", *x) for x in (self.places, self.sizes))
        of_pointers, of_maps = (
            b"".join(struct.pack("IIq", *address) for address in x)
            for x in (self.pointers, self.maps)
        )
        return places, sizes, bytes(self.memory), of_pointers, of_maps

    def _add(self, packed: bytes, alignment: int = 8) -> int:
        """Appends a parameter; returns its first byte."""
        self.memory += bytes(-len(self.memory) % alignment)
        at = len(self.memory)
        self.memory += packed
        self.places.append(at)
        self.sizes.append(len(packed))
        return at

    def _add_numbers(self, kind: Any, x: Any) -> None:
        """A number, or a tuple of them: each element is a parameter, but for constants."""
        if isinstance(kind, tuple):
            for each, y in zip(kind, x, strict=True):
                self._add_numbers(each, y)
        elif kind != "constexpr":
            self._add(struct.pack(FORMATS[kind], x))

    def _add_descriptor(self, expanded: list[Any], rank: int, address: tuple[int, int]) -> None:
        """Appends tensor map, shape and strides; fails for descriptors without a tensor map."""
        tensor_map, *sizes = expanded
        at = self._add(native().tensor_map_bytes(tensor_map), MAP_ALIGNMENT)
        self.maps.append((at, *address))
        for kind, x in zip("i" * rank + "q" * rank, sizes, strict=True):
            self._add(struct.pack(kind, x))


def _expanded(launcher: Any, descriptor: Any, meta: Any) -> list[Any]:
    """Tensor map, shape and strides of a descriptor, as Triton makes them."""
    module: Any = sys.modules[type(launcher).__module__]
    make = module.make_tensordesc_arg
    # From 3.8 on it takes the launcher's other arguments, which CUDA has no use for.
    others = (None,) * (make.__code__.co_argcount - 2)
    return list(make(descriptor, meta, *others))


class InterpretedLaunch(Step):
    """Launches a kernel in Triton's CPU interpreter."""

    __slots__ = ("args", "grid", "kernel", "kwargs", "operands", "registers")

    def __init__(
        self, kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.kernel, self.grid, self.args, self.kwargs = kernel, grid, args, kwargs
        self.registers = self.operands = operands((args, kwargs))

    def __call__(self, registers: Registers) -> None:
        args = [resolved(x, registers) for x in self.args]
        kwargs = {name: resolved(x, registers) for name, x in self.kwargs.items()}
        self.kernel[self.grid](*args, **kwargs)
