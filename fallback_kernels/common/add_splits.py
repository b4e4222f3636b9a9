"""Sums over what the CTAs of one tile of keys have each computed of dK and dV."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.tiles import cdiv

ADDED = 1024  # numbers that one CTA adds


@triton.jit(do_not_specialize=["num_k", "num_v"])
def add_splits_kernel(
    k_ptr, v_ptr, dk_ptr, dv_ptr, num_k, num_v, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """CTA (tile of numbers, key or value): their sums over the splits."""
    of_value = tl.program_id(1) == 1
    size = tl.where(of_value, num_v, num_k).to(tl.int64)
    partial_ptr = tl.where(of_value, v_ptr, k_ptr)
    out_ptr = tl.where(of_value, dv_ptr, dk_ptr)
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = number < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(SPLITS):
        total += tl.load(partial_ptr + split * size + number, mask=mask, other=0.0)
    tl.store(out_ptr + number, total.to(out_ptr.dtype.element_ty), mask=mask)


def add_splits(grad_k: Tensor, grad_v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Sums over the first dimension of two float32 tensors, rounded to `dtype`, in one launch."""
    dk, dv = (torch.empty(x.shape[1:], dtype=dtype, device=x.device) for x in (grad_k, grad_v))
    grid = (cdiv(max(dk.numel(), dv.numel()), ADDED), 2)
    add_splits_kernel[grid](
        grad_k, grad_v, dk, dv, dk.numel(), dv.numel(), SPLITS=grad_k.shape[0], BLOCK=ADDED
    )
    return dk, dv
