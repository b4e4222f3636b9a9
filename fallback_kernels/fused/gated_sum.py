"""The gated sum of the three branches, one pass over memory forward and one backward.

An operator rather than an expression for the compiler: left to fuse it, Inductor of torch 2.11
computed wrong gradients of the gates (a sum over head dims was stored in one layout and read in
another, for batches of more than one row), and the pass is memory-bound either way.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv
from nsa_flex.fallback_kernels.launch.direct import directly
from nsa_flex.fallback_kernels.launch.plans import planned

BLOCK_ROWS = tl.constexpr(16)  # (token, head) rows of a CTA


def gated_sum(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    """`sum_c gates[..., c] * branch_c` in float32.

    Args:
        compressed, selected, sliding: (B, H, S, D), one dtype, any strides, on CUDA.
        gates: (B, H, S, 3), any float dtype and strides.

    Returns:
        (B, H, S, D) in the branches' dtype, in (B, S, H, D) memory. Differentiable once in all
        four inputs.
    """
    return _sum(compressed, selected, sliding, gates).transpose(1, 2)


@torch.library.custom_op("nsa_flex::merge", mutates_args=())
@planned
def _forward(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    batch, heads, length, dim = compressed.shape
    out = compressed.new_empty((batch, length, heads, dim))
    tensors = (compressed, selected, sliding, gates, out.transpose(1, 2))
    _launch(gated_sum_fwd_kernel, tensors, gates.shape)
    return out


@_forward.register_fake
def _(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    batch, heads, length, dim = compressed.shape
    return compressed.new_empty((batch, length, heads, dim))


@torch.library.custom_op("nsa_flex::merge_backward", mutates_args=())
@planned
def _backward(
    grad: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the branches, in (B, S, H, D) memory, and of the gates, (B, S, H, 3)."""
    grads = _empty_gradients(grad, gates)
    views = tuple(g.transpose(1, 2) for g in grads)
    tensors = (grad.transpose(1, 2), compressed, selected, sliding, gates, *views)
    _launch(gated_sum_bwd_kernel, tensors, gates.shape)
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
    grads = _sum_gradients(grad, *ctx.saved_tensors)
    return tuple(g.transpose(1, 2) for g in grads)


_forward.register_autograd(_differentiate, setup_context=_save)
_sum = directly(_forward, _save, _differentiate)
_sum_gradients = directly(_backward)


def _launch(kernel: Any, tensors: tuple[Tensor, ...], shape: torch.Size) -> None:
    batch, heads, tokens, _ = shape
    dim = tensors[0].shape[3]
    rows = batch * heads * tokens
    kernel[(cdiv(rows, BLOCK_ROWS.value),)](
        *tensors,
        *(x.stride() for x in tensors),
        rows,
        heads,
        tokens,
        DIM=dim,
    )


@triton.jit
def rows_of_cta(
    num_rows, heads, num_tokens, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Batch row, head and token of BLOCK_M rows in memory order, int64 [BLOCK_M] each; the columns
    [BLOCK_D]; the masks of rows [BLOCK_M] and of elements [BLOCK_M, BLOCK_D] that exist.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    b = row // (heads * num_tokens)
    h = row % heads
    s = row // heads % num_tokens
    row_mask = row < num_rows
    return b, h, s, d, row_mask, row_mask[:, None] & (d < DIM)[None, :]


@triton.jit
def tile_pointers(ptr, b, h, s, d, strides):
    """Pointers [BLOCK_M, BLOCK_D] to rows of a (B, H, S, D) tensor."""
    row = b * strides[0] + h * strides[1] + s * strides[2]
    return ptr + row[:, None] + (d * strides[3])[None, :]


@triton.jit
def load_gate(gate_ptr, branch: tl.constexpr, b, h, s, strides, row_mask):
    """A branch's gate of every row in float32, [BLOCK_M]."""
    gate_ptr = gate_ptr + b * strides[0] + h * strides[1] + s * strides[2] + branch * strides[3]
    return tl.load(gate_ptr, mask=row_mask, other=0.0).to(tl.float32)


@recordable
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def gated_sum_fwd_kernel(
    x0, x1, x2, gates, out, x0_strides, x1_strides, x2_strides, gate_strides, out_strides,
    num_rows, heads, num_tokens,
    DIM: tl.constexpr,
):  # fmt: skip
    """out = sum_c gates[..., c] * x_c, in float32; CTA of (token, head) rows."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    b, h, s, d, row_mask, mask = rows_of_cta(num_rows, heads, num_tokens, DIM, BLOCK_D, BLOCK_ROWS)
    # [BLOCK_ROWS, BLOCK_D] each
    a0 = tl.load(tile_pointers(x0, b, h, s, d, x0_strides), mask=mask, other=0.0)
    a1 = tl.load(tile_pointers(x1, b, h, s, d, x1_strides), mask=mask, other=0.0)
    a2 = tl.load(tile_pointers(x2, b, h, s, d, x2_strides), mask=mask, other=0.0)
    acc = a0.to(tl.float32) * load_gate(gates, 0, b, h, s, gate_strides, row_mask)[:, None]
    acc += a1.to(tl.float32) * load_gate(gates, 1, b, h, s, gate_strides, row_mask)[:, None]
    acc += a2.to(tl.float32) * load_gate(gates, 2, b, h, s, gate_strides, row_mask)[:, None]
    out = tile_pointers(out, b, h, s, d, out_strides)
    tl.store(out, acc.to(out.dtype.element_ty), mask=mask)


@recordable
@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def gated_sum_bwd_kernel(
    grad, x0, x1, x2, gates, g0, g1, g2, grad_gates,
    grad_strides, x0_strides, x1_strides, x2_strides, gate_strides,
    g0_strides, g1_strides, g2_strides, grad_gate_strides,
    num_rows, heads, num_tokens,
    DIM: tl.constexpr,
):  # fmt: skip
    """g_c = gates[..., c] * grad and grad_gates[..., c] = sum(grad * x_c); CTA of rows."""
    BLOCK_D: tl.constexpr = triton.next_power_of_2(DIM)
    b, h, s, d, row_mask, mask = rows_of_cta(num_rows, heads, num_tokens, DIM, BLOCK_D, BLOCK_ROWS)
    # [BLOCK_ROWS, BLOCK_D] each
    do = tl.load(tile_pointers(grad, b, h, s, d, grad_strides), mask=mask, other=0.0)
    do = do.to(tl.float32)
    a0 = tl.load(tile_pointers(x0, b, h, s, d, x0_strides), mask=mask, other=0.0)
    a1 = tl.load(tile_pointers(x1, b, h, s, d, x1_strides), mask=mask, other=0.0)
    a2 = tl.load(tile_pointers(x2, b, h, s, d, x2_strides), mask=mask, other=0.0)
    # [BLOCK_ROWS, 1] each
    gate0 = load_gate(gates, 0, b, h, s, gate_strides, row_mask)[:, None]
    gate1 = load_gate(gates, 1, b, h, s, gate_strides, row_mask)[:, None]
    gate2 = load_gate(gates, 2, b, h, s, gate_strides, row_mask)[:, None]
    element = g0.dtype.element_ty
    g0 = tile_pointers(g0, b, h, s, d, g0_strides)
    tl.store(g0, (do * gate0).to(element), mask=mask)
    g1 = tile_pointers(g1, b, h, s, d, g1_strides)
    tl.store(g1, (do * gate1).to(element), mask=mask)
    g2 = tile_pointers(g2, b, h, s, d, g2_strides)
    tl.store(g2, (do * gate2).to(element), mask=mask)
    gate_type = grad_gates.dtype.element_ty
    zb, zh, zs, zc = grad_gate_strides
    grad_gates = grad_gates + b * zb + h * zh + s * zs  # [BLOCK_ROWS]
    tl.store(grad_gates, tl.sum(do * a0.to(tl.float32), 1).to(gate_type), mask=row_mask)
    tl.store(grad_gates + zc, tl.sum(do * a1.to(tl.float32), 1).to(gate_type), mask=row_mask)
    tl.store(grad_gates + 2 * zc, tl.sum(do * a2.to(tl.float32), 1).to(gate_type), mask=row_mask)
