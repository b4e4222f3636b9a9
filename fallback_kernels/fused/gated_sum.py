"""The gated sum of the three branches, one pass over memory forward and one backward.

An operator rather than an expression for the compiler: left to fuse it, Inductor of torch 2.11
computed wrong gradients of the gates (a sum over head dims was stored in one layout and read in
another, for batches of more than one row), and the pass is bound by memory either way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # heads of tokens a program handles


def merge(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    """`sum_c gates[..., c] * branch_c` in float32.

    Args:
        compressed, selected, sliding: (B, H, S, D), one dtype, any strides, on CUDA.
        gates: (B, H, S, 3), any float dtype and strides.

    Returns:
        (B, H, S, D) in the branches' dtype, in (B, S, H, D) memory. Differentiable once in all
        four inputs.
    """
    return _forward(compressed, selected, sliding, gates).transpose(1, 2)


@torch.library.custom_op("nsa_flex::merge", mutates_args=())
def _forward(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    batch, heads, length, dim = compressed.shape
    out = compressed.new_empty((batch, length, heads, dim))
    _launch(
        _forward_kernel, (compressed, selected, sliding, gates, out.transpose(1, 2)), gates.shape
    )
    return out


@_forward.register_fake
def _(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    batch, heads, length, dim = compressed.shape
    return compressed.new_empty((batch, length, heads, dim))


@torch.library.custom_op("nsa_flex::merge_backward", mutates_args=())
def _backward(
    grad: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the branches, in (B, S, H, D) memory, and of the gates, (B, S, H, 3)."""
    grads = _empty_gradients(grad, gates)
    views = tuple(g.transpose(1, 2) for g in grads)
    tensors = (grad.transpose(1, 2), compressed, selected, sliding, gates, *views)
    _launch(_backward_kernel, tensors, gates.shape)
    return grads


@_backward.register_fake
def _(
    grad: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty_gradients(grad, gates)


def _empty_gradients(grad: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c = (grad.new_empty(grad.shape) for _ in range(3))
    return a, b, c, gates.new_empty((*grad.shape[:3], 3))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    grads = _backward(grad, *ctx.saved_tensors)
    return tuple(g.transpose(1, 2) for g in grads)


_forward.register_autograd(_differentiate, setup_context=_save)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], shape: torch.Size) -> None:
    batch, heads, length, _ = shape
    dim = tensors[0].shape[3]
    strides = [stride for x in tensors for stride in x.stride()]
    rows = batch * heads * length
    kernel[(triton.cdiv(rows, ROWS),)](
        *tensors, *strides, rows, heads, length, D=dim, D_PAD=triton.next_power_of_2(dim), R=ROWS
    )


@triton.jit
def _places(rows, heads, length, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr):
    """Batch, head and token of R rows in memory order, int64, and which elements there are."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, D_PAD)
    b = row // (heads * length)
    h = row % heads
    s = row // heads % length
    there = row < rows
    return b, h, s, d, there, there[:, None] & (d < D)[None, :]


@triton.jit
def _tile(x, b, h, s, d, sb, sh, ss, sd):
    return x + (b * sb + h * sh + s * ss)[:, None] + (d * sd)[None, :]


@triton.jit
def _gate(gates, c: tl.constexpr, b, h, s, sb, sh, ss, sc, there):
    gate = tl.load(gates + b * sb + h * sh + s * ss + c * sc, mask=there, other=0.0)
    return gate.to(tl.float32)


@triton.jit
def _forward_kernel(
    x0, x1, x2, gates, out,
    x0b, x0h, x0s, x0d, x1b, x1h, x1s, x1d, x2b, x2h, x2s, x2d,
    gb, gh, gs, gc, ob, oh, os, od,
    rows, heads, length, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b, h, s, d, there, inside = _places(rows, heads, length, D, D_PAD, R)
    a0 = tl.load(_tile(x0, b, h, s, d, x0b, x0h, x0s, x0d), mask=inside, other=0.0)
    a1 = tl.load(_tile(x1, b, h, s, d, x1b, x1h, x1s, x1d), mask=inside, other=0.0)
    a2 = tl.load(_tile(x2, b, h, s, d, x2b, x2h, x2s, x2d), mask=inside, other=0.0)
    total = a0.to(tl.float32) * _gate(gates, 0, b, h, s, gb, gh, gs, gc, there)[:, None]
    total += a1.to(tl.float32) * _gate(gates, 1, b, h, s, gb, gh, gs, gc, there)[:, None]
    total += a2.to(tl.float32) * _gate(gates, 2, b, h, s, gb, gh, gs, gc, there)[:, None]
    tl.store(_tile(out, b, h, s, d, ob, oh, os, od), total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    grad, x0, x1, x2, gates, g0, g1, g2, ggates,
    ob, oh, os, od, x0b, x0h, x0s, x0d, x1b, x1h, x1s, x1d, x2b, x2h, x2s, x2d, gb, gh, gs, gc,
    y0b, y0h, y0s, y0d, y1b, y1h, y1s, y1d, y2b, y2h, y2s, y2d, zb, zh, zs, zc,
    rows, heads, length, D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    b, h, s, d, there, inside = _places(rows, heads, length, D, D_PAD, R)
    do = tl.load(_tile(grad, b, h, s, d, ob, oh, os, od), mask=inside, other=0.0).to(tl.float32)
    a0 = tl.load(_tile(x0, b, h, s, d, x0b, x0h, x0s, x0d), mask=inside, other=0.0)
    a1 = tl.load(_tile(x1, b, h, s, d, x1b, x1h, x1s, x1d), mask=inside, other=0.0)
    a2 = tl.load(_tile(x2, b, h, s, d, x2b, x2h, x2s, x2d), mask=inside, other=0.0)
    gate0 = _gate(gates, 0, b, h, s, gb, gh, gs, gc, there)[:, None]
    gate1 = _gate(gates, 1, b, h, s, gb, gh, gs, gc, there)[:, None]
    gate2 = _gate(gates, 2, b, h, s, gb, gh, gs, gc, there)[:, None]
    element = g0.dtype.element_ty
    tl.store(_tile(g0, b, h, s, d, y0b, y0h, y0s, y0d), (do * gate0).to(element), mask=inside)
    tl.store(_tile(g1, b, h, s, d, y1b, y1h, y1s, y1d), (do * gate1).to(element), mask=inside)
    tl.store(_tile(g2, b, h, s, d, y2b, y2h, y2s, y2d), (do * gate2).to(element), mask=inside)
    place = ggates + b * zb + h * zh + s * zs
    gate_type = ggates.dtype.element_ty
    tl.store(place, tl.sum(do * a0.to(tl.float32), 1).to(gate_type), mask=there)
    tl.store(place + zc, tl.sum(do * a1.to(tl.float32), 1).to(gate_type), mask=there)
    tl.store(place + 2 * zc, tl.sum(do * a2.to(tl.float32), 1).to(gate_type), mask=there)
