"""Softmax in base 2, which the hardware has an instruction for: e^x = 2^(x log2 e)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # log2(e)
LN2 = tl.constexpr(0.6931471805599453)  # ln(2)
MIN_LOGIT = tl.constexpr(-3.0e38)  # below any base-2 logit, and finite


def base2_scale(scale: float) -> float:
    """Factor that turns a product q . k into a base-2 logit."""
    return scale * LOG2E.value


@triton.jit
def finite(row_max):
    """`row_max`, and 0 for a row that has seen no key yet: subtracting -inf would give NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def online_softmax_update(
    acc, row_max, row_sum, logits, values, scale_log2, row_mask,
    EMPTY_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys more in the softmax-weighted sum of values.

    Args:
        acc: float32 [BLOCK_M, BLOCK_DV], sum of exp2(logit - row_max) * value so far.
        row_max, row_sum: float32 [BLOCK_M], highest base-2 logit, sum of exp2(logit - row_max).
        logits: float32 [BLOCK_M, BLOCK_N], -inf where a row does not see a key.
        values: [BLOCK_N, BLOCK_DV].
        scale_log2: turns `logits` into base-2 logits; 1.0 if they are.
        row_mask: [BLOCK_M], rows that see any of these keys; None: as `logits` say.
        EMPTY_ROWS: `row_max` is -inf for a row that has seen nothing, and may stay so. Else it
            starts finite (`MIN_LOGIT`), which saves a comparison.
        PRECISION: of a float32 product.

    Returns:
        acc, row_max and row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(logits, 1) * scale_log2)  # [BLOCK_M]
    if row_mask is not None:
        new_max = tl.where(row_mask, new_max, row_max)
    shift = finite(new_max) if EMPTY_ROWS else new_max
    key_shift = shift
    if row_mask is not None:
        key_shift = tl.where(row_mask, shift, float("inf"))
    p = tl.exp2(logits * scale_log2 - key_shift[:, None])  # [BLOCK_M, BLOCK_N]
    alpha = tl.exp2(row_max - shift)  # [BLOCK_M], rescales earlier sums
    row_sum = row_sum * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(values.dtype), values, acc * alpha[:, None], input_precision=PRECISION)
    return acc, new_max, row_sum


@triton.jit
def load_lse_log2(lse_ptr, row, mask):
    """Base-2 log-sum-exp of rows; +inf for masked rows and rows without keys: p is 0 then."""
    return lse_in_base2(tl.load(lse_ptr + row, mask=mask, other=float("-inf")))


@triton.jit
def lse_in_base2(lse):
    """Of a natural log-sum-exp; +inf for -inf, a row without keys."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
