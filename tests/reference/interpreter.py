"""Kernel tests run twice: compiled on CUDA, and in Triton's interpreter on the CPU.

Triton decides at import whether its kernels run in its interpreter, so on the CPU they run in a
process of their own: a test of each file starts that same file there (`interpreted`). On CUDA the
tests marked `kernels` run the compiled kernels.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter computes with NumPy, which has no bfloat16.
LOW_PRECISION = [torch.float16] if INTERPRETED else [torch.float16, torch.bfloat16]

_interpreted = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # log2(0), and what masks hide
kernels = _interpreted if INTERPRETED else pytest.mark.gpu
only_outside = pytest.mark.skipif(INTERPRETED, reason="this is the process that the test starts")


def run_in_the_interpreter(
    file: str, config: pytest.Config, *, marks: str = "not exhaustive"
) -> None:
    """Runs the tests of `file` that need no GPU in the interpreter, with this run's seed."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # seconds for those not needed here
    plugins = ["no:cacheprovider", "pytest_timeout", "_hypothesis_pytestplugin"]
    command = [sys.executable, "-m", "pytest", "-q", *(f"-p{name}" for name in plugins)]
    result = subprocess.run(
        [*command, "--seed", str(config.option.seed), "-m", marks, file],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 0, "kernel tests failed under the interpreter; output above"
    assert " passed" in result.stdout


def interpreted(file: str) -> Callable[[pytest.FixtureRequest], None]:
    """A test that runs the others of `file`, but for those that need a GPU, on the CPU."""

    @only_outside
    def test(request: pytest.FixtureRequest) -> None:
        run_in_the_interpreter(file, request.config)

    return test


def noted_kernels() -> list[str]:
    """Names of the kernels that this process runs in the interpreter from now on, in order."""
    from triton.runtime import interpreter

    ran: list[str] = []
    run = interpreter.GridExecutor.__call__

    def noting(self: Any, *args: Any, **options: Any) -> None:
        ran.append(self.fn.__name__)
        run(self, *args, **options)

    interpreter.GridExecutor.__call__ = noting
    return ran


def _xor_sums_by_numpy() -> None:
    """Mends the interpreter's slowest reduction, which `tl.sort` is made of.

    It calls the combining function for every single element: half a second for a tile of 256.
    """
    import triton.language as tl
    from triton.runtime.interpreter import ReduceOps

    by_element = ReduceOps.generic_reduce

    def reduce(self: Any, operands: tuple[Any, ...]) -> Any:
        if self.combine_fn is not tl.standard._xor_combine:
            return by_element(self, operands)
        (x,) = operands
        found = np.bitwise_xor.reduce(x.handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, x.dtype)

    ReduceOps.generic_reduce = reduce


def _patch_the_language_once() -> None:
    """Within a kernel, spares calls of device functions a second patch of what is patched.

    The interpreter looks through `triton.language` at every call, a fifth of all its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    @functools.cache
    def modules_of(fn: Any) -> set[str]:
        return {x.__name__ for x in fn.__globals__.values() if x is tl or x is tl.core}

    def patch_lang(fn: Any) -> Any:
        modules = modules_of(fn)
        if modules and modules <= patched:
            return interpreter._LangPatchScope()
        patched.update(modules)
        return patch(fn)

    def run_grid(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            run(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_lang
    interpreter.GridExecutor.__call__ = run_grid


def _dtypes_from_one_table() -> None:
    """Spares the interpreter a new table of all types for every value."""
    import triton.language as tl
    from triton.runtime import interpreter

    of_scalar = functools.cache(interpreter._get_np_dtype)
    pointer = np.dtype(np.uint64)

    def get_np_dtype(dtype: Any) -> np.dtype:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return pointer if isinstance(element, tl.pointer_type) else of_scalar(element)

    interpreter._get_np_dtype = get_np_dtype


def _masks_of_bools() -> None:
    """Mends Triton 3.9, where `scalar & vector` of bools is an int32 that says it is a bool."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store = Builder.create_masked_load, Builder.create_masked_store

    def mend(mask: Any) -> None:
        if not isinstance(mask, np.ndarray):  # Triton 3.6 hands over the array itself
            mask.data = mask.data.astype(bool, copy=False)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **names: Any) -> Any:
        mend(mask)
        return load(self, ptrs, mask, *rest, **names)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **names: Any) -> Any:
        mend(mask)
        return store(self, ptrs, value, mask, *rest, **names)

    Builder.create_masked_load, Builder.create_masked_store = masked_load, masked_store


def _check_overflows_by_numpy() -> None:
    """Makes sums and products of signed integers that do not fit their type errors.

    Unsigned ones wrap, and the choice of blocks means it. The interpreter computes by its own
    operators whether they fit, two fifths of all its time, and asserts it only where it debugs.
    """
    from triton.runtime import interpreter

    operators = {"add": np.add, "sub": np.subtract, "mul": np.multiply}

    def check(left: Any, right: Any, operator: Any) -> None:
        dtype = left.type.scalar
        if dtype.is_int_unsigned() or not 8 <= dtype.int_bitwidth < 64:
            return
        x, y = (each.handle.data.astype(np.int64) for each in (left, right))
        found = operators[operator.__name__](x, y)
        lowest, highest = dtype.get_int_min_value(), dtype.get_int_max_value()
        if found.size and (found.min() < lowest or found.max() > highest):
            raise OverflowError(f"{dtype} {operator.__name__}: {found.min()} to {found.max()}")

    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = check


def _equal_dtypes_at_once() -> None:
    """Spares dtypes, which are all but singletons, the comparison of their names."""
    import triton.language as tl

    by_name = tl.dtype.__eq__

    def equal(self: Any, other: Any) -> bool:
        return self is other or by_name(self, other)

    tl.dtype.__eq__ = equal


def _shapes_from_one_table() -> None:
    """Makes what a shape says of types and tensors once a shape, not once a value.

    That is a third of the interpreter's time.
    """
    import triton.language as tl

    new_block, new_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[Any, dict[str, Any]] = {}
    of_tensors: dict[int, tuple[Any, ...]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        key = (element_ty.name, sizes)
        if key not in of_types:
            new_block(self, element_ty, shape)
            of_types[key] = dict(self.__dict__)
        self.__dict__.update(of_types[key])
        self.element_ty = element_ty

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else None
        if (kept := of_tensors.get(id(shape))) is None:
            new_tensor(self, handle, type)
            of_tensors[id(shape)] = (shape, self.shape, self.numel)  # `shape` keeps its id
            return
        _, self.shape, self.numel = kept
        self.handle, self.type, self.dtype = handle, type, type.scalar

    tl.block_type.__init__, tl.tensor.__init__ = block_type, tensor


def _operands_as_they_are() -> None:
    """Spares operands of one type and shape the search for those that hold both.

    A number beside a tensor becomes one of its type and shape once.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    semantic = interpreter.interpreter_semantic
    search, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    numbers: dict[Any, Any] = {}
    wide: dict[tuple[int, int], list[int]] = {}

    def operands(lhs: Any, rhs: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) > 3 or not isinstance(lhs, tl.tensor) or lhs.dtype.is_ptr():
            return search(lhs, rhs, *args, **kwargs)  # division has types of its own
        if isinstance(rhs, tl.tensor):
            same = lhs.dtype is rhs.dtype and lhs.shape is rhs.shape
            return (lhs, rhs) if same else search(lhs, rhs, *args)
        key = (lhs.dtype.name, id(lhs.shape), type(rhs), str(rhs), *args)
        if (kept := numbers.get(key)) is not None:
            return lhs, kept
        left, right = search(lhs, rhs, *args)
        if left is lhs:
            numbers[key] = right
        return left, right

    def as_wide(x: Any, sizes: list[int]) -> Any:
        if list(x.type.shape) == sizes:
            return x
        return tl.tensor(
            semantic.builder.create_broadcast(x.handle, sizes), tl.block_type(x.dtype, sizes)
        )

    def broadcast_operands(lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        if not (lhs.type.is_block() and rhs.type.is_block()):
            return broadcast(lhs, rhs)
        key = (id(lhs.shape), id(rhs.shape))
        if (sizes := wide.get(key)) is None:
            left, right = broadcast(lhs, rhs)
            if len(lhs.shape) == len(rhs.shape):
                wide[key] = list(left.type.shape)
            return left, right
        return as_wide(lhs, sizes), as_wide(rhs, sizes)

    semantic.binary_op_type_checking_impl = operands
    semantic.broadcast_impl_value = broadcast_operands


def _builtins_without_wrappers() -> None:
    """Calls what a builtin wraps: that it runs in a kernel is known here."""
    from triton.runtime import interpreter

    def patch(obj: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch


if INTERPRETED:
    _check_overflows_by_numpy()
    _masks_of_bools()
    _xor_sums_by_numpy()
    _patch_the_language_once()
    _dtypes_from_one_table()
    _equal_dtypes_at_once()
    _shapes_from_one_table()
    _operands_as_they_are()
    _builtins_without_wrappers()
