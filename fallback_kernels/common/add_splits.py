"""Sums over what the CTAs of one tile of keys have each computed of dK and dV."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv

ADDED = 1024  # numbers that one CTA adds


@triton.jit
def add_splits_tile(partial_ptr, out_ptr, size, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of numbers, the CTA's along the first axis: their sums over the splits."""
    size = size.to(tl.int64)
    number = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    mask = number < size
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(0, SPLITS, loop_unroll_factor=8):  # as many loads in flight
        total += tl.load(partial_ptr + split * size + number, mask=mask, other=0.0)
    tl.store(out_ptr + number, total.to(out_ptr.dtype.element_ty), mask=mask)


@recordable
@triton.jit(do_not_specialize=["num_k", "num_v", "more_k", "more_v"])
def add_splits_kernel(
    k_ptr, v_ptr, dk_ptr, dv_ptr, num_k, num_v,
    more_k_ptr, more_v_ptr, more_dk_ptr, more_dv_ptr, more_k, more_v,
    SPLITS: tl.constexpr, MORE_SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """CTA (tile of numbers, key, value, and these of another call): their sums over the splits."""
    of_value = tl.program_id(1) % 2 == 1
    if tl.program_id(1) < 2:
        partial_ptr = tl.where(of_value, v_ptr, k_ptr)
        out_ptr = tl.where(of_value, dv_ptr, dk_ptr)
        size = tl.where(of_value, num_v, num_k)
        add_splits_tile(partial_ptr, out_ptr, size, SPLITS, BLOCK)
    elif MORE_SPLITS > 0:
        more_partial_ptr = tl.where(of_value, more_v_ptr, more_k_ptr)
        more_out_ptr = tl.where(of_value, more_dv_ptr, more_dk_ptr)
        more_size = tl.where(of_value, more_v, more_k)
        add_splits_tile(more_partial_ptr, more_out_ptr, more_size, MORE_SPLITS, BLOCK)


class Splits(NamedTuple):
    """Partial dK and dV, (splits, ...), contiguous: float32, or one split in their own dtype."""

    key: Tensor
    value: Tensor


def add_splits(splits: Splits, dtype: torch.dtype, more: Splits | None = None) -> list[Tensor]:
    """dK and dV, rounded to `dtype`: sums over the first dimension, in one launch or none.

    So are those of `more`, which follow.
    """
    given = [splits] if more is None else [splits, more]
    outs = [[_empty_sum(x, dtype) for x in each] for each in given]
    added = [x for x in zip(given, outs, strict=True) if x[0].key.shape[0] > 1]
    if added:
        arguments = [(*each, *out, *(x.numel() for x in out)) for each, out in added]
        counts = [each.key.shape[0] for each, _ in added]
        if len(added) == 1:
            arguments.append((None, None, None, None, 0, 0))
            counts.append(0)
        most = max(x.numel() for _, out in added for x in out)
        add_splits_kernel[(cdiv(most, ADDED), 2 * len(added))](
            *arguments[0],
            *arguments[1],
            SPLITS=counts[0],
            MORE_SPLITS=counts[1],
            BLOCK=ADDED,
        )
    return [x for out in outs for x in out]


def _empty_sum(splits: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for the sum over the first dimension; of one split, itself."""
    if splits.shape[0] == 1:
        return splits[0]
    return torch.empty(splits.shape[1:], dtype=dtype, device=splits.device)
