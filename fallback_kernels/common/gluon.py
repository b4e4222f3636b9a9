"""What the Gluon kernels share: what versions of Triton name differently, and arithmetic by single
instructions.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma


def _either(module: Any, *names: str) -> Any:
    """What has one of these names; the first that is there."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


thread_barrier = _either(gl, "thread_barrier", "barrier")  # 3.7 renamed it
# 3.8 renamed the copies; 3.9 keeps the names before, and raises where a kernel uses them.
tma_load = _either(tma, "async_load", "async_copy_global_to_shared")
tma_store = _either(tma, "async_store", "async_copy_shared_to_global")
async_load = _either(async_copy, "async_load", "async_copy_global_to_shared")


@gluon.jit
def fast_exp2(x):
    """2 ** x; denormal results are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def fast_log2(x):
    """Binary logarithm, off by 2**-22; outside of (0.5, 2) by 2**-22 of its value."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def fast_reciprocal(x):
    """1 / x, off by its last bit at most."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def to_float32(x):
    """float32 of 16-bit numbers, in one instruction each."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;",
            "=f,=f,r",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(gl.float32)
