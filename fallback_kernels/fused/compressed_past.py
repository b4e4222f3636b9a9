"""The compressed branch by cuDNN where the queries are the last tokens of their rows.

Most keys are seen by all queries: attention without a mask, whose rows are queries. The others
begin in the queries' own tokens, but for a block or two: with these the queries fold, as in a row
that begins l - 1 tokens before the first query that sees one of them. The first few queries see
none. One pass over memory joins both outputs. The backward of each part takes the output and
log-sum-exp of both, and dQ is the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.strides import empty_bshd
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.compressed import cudnn, cudnn_op
from nsa_flex.fallback_kernels.compressed.fold import Fold, bounds_of, fold_of, sum_residues
from nsa_flex.fallback_kernels.fused.bwd_gates import fold_gated_lse, split_row
from nsa_flex.fallback_kernels.fused.fwd_sliding_epilogue import load_compressed, unfold_lse

BLOCK_ROWS = 16  # (token, head) rows of a CTA


@dataclass(frozen=True)
class PastKeys:
    """Compressed keys of a call, cut in two.

    seen: of the first so many, every query sees all.
    fold: that of the queries with the keys that follow.
    """

    seen: int
    fold: Fold

    @classmethod
    def of(cls, num_queries: int, past: int, config: NSAConfig) -> PastKeys:
        """past: tokens before query 0, at least a block of them."""
        block, stride = config.compress_block_size, config.compress_stride
        seen = (past - block + 1) // stride + 1
        # The first block that query 0 does not see ends so many tokens after it.
        reach = seen * stride + block - 1 - past
        return cls(seen, fold_of(num_queries, reach + 1, stride))


def attend(
    rows: Tensor, key: Tensor, value: Tensor, keys: PastKeys, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, Dv), contiguous, and natural log-sum-exp, float32 (B, H, S).

    rows: queries (B, S, H, D), contiguous. key: (B, Hkv, N, D), value: (B, Hkv, N, Dv).
    """
    batch, tokens, heads, _ = rows.shape
    fold = keys.fold
    seen_key, seen_value, later_key, later_value = _cut(key, value, keys)
    out, seen_lse = cudnn_op.whole(rows.transpose(1, 2), seen_key, seen_value, scale)
    out, seen_lse = out.transpose(1, 2).contiguous(), seen_lse.contiguous()
    parts, lses = zip(
        *(
            cudnn.attend_range(rows, later_key, later_value, part, scale, fold.reach, fold.stride)
            for part in fold.ranges
        ),
        strict=True,
    )
    lse = unfold_lse(lses, fold, heads, tokens)
    num_rows = batch * tokens * heads
    compressed_past_fwd_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
        *(out, seen_lse, lse, *parts, num_rows, tokens, heads),
        *bounds_of(fold.ranges),
        fold.reach,
        **_constants(fold, out),
    )
    return out, lse


@dataclass(frozen=True)
class Gradients:
    """What `differentiate` returns."""

    query: Tensor  # (B, S, H, D), contiguous
    key: Tensor  # (B, N, Hkv, D), contiguous
    value: Tensor  # (B, N, Hkv, Dv), likewise


def differentiate(
    grad: Tensor,
    rows: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    gates: Tensor,
    keys: PastKeys,
    scale: float,
) -> Gradients:
    """Gradients of what `attend` took, of `|gate| * grad`; `out` and `lse` are its results.

    grad: (B, S, H, Dv), contiguous. gates: (B, H, S), any strides.
    """
    batch, tokens, heads, _ = rows.shape
    fold = keys.fold
    (seen_lse, *_), lses = (fold_gated_lse(lse, gates, x) for x in (fold_of(tokens, 1, 1), fold))
    seen_key, seen_value, later_key, later_value = _cut(key, value, keys)
    of_seen = cudnn_op.whole_gradients(
        grad.transpose(1, 2),
        rows.transpose(1, 2),
        seen_key,
        seen_value,
        out.transpose(1, 2),
        seen_lse,
        scale,
    )
    of_query, *of_seen_keys = of_seen
    grad_query = of_query.transpose(1, 2).contiguous()
    of_parts = [
        cudnn.range_gradients(
            *(grad, rows, later_key, later_value, out, part_lse, part, scale),
            fold.reach,
            fold.stride,
        )
        for part, part_lse in zip(fold.ranges, lses, strict=True)
    ]
    num_rows = batch * tokens * heads
    compressed_past_bwd_kernel[(cdiv(num_rows, BLOCK_ROWS),)](
        *(grad_query, *(x.query for x in of_parts), num_rows, tokens, heads),
        *bounds_of(fold.ranges),
        fold.reach,
        **_constants(fold, grad_query),
    )
    shares = ([x.key for x in of_parts], [x.value for x in of_parts])
    of_keys = (
        _both(of_first, of_later, like)
        for of_first, of_later, like in zip(of_seen_keys, shares, (key, value), strict=True)
    )
    return Gradients(grad_query, *of_keys)


def _cut(key: Tensor, value: Tensor, keys: PastKeys) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values that all queries see, and the others."""
    n = keys.seen
    return key[:, :, :n], value[:, :, :n], key[:, :, n:], value[:, :, n:]


def _constants(fold: Fold, rows: Tensor) -> dict[str, int]:
    dim = rows.shape[3]
    return {
        "STRIDE": fold.stride,
        "DIM": dim,
        "BLOCK_D": next_power_of_2(dim),
        "BLOCK_M": BLOCK_ROWS,
    }


def _both(seen: Tensor, later: list[Tensor], like: Tensor) -> Tensor:
    """Gradients (B, N, Hkv, D) of keys `like`: of `seen` ones, then by parts of the fold."""
    _, heads, num_blocks, dim = like.shape
    total = empty_bshd(like, heads, num_blocks, dim, like.dtype)
    first = seen.shape[2]
    total[:, :, :first].copy_(seen)
    sum_residues(later, total[:, :, first:])
    return total.transpose(1, 2)


@recordable
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "rows", "first1", "first2", "first3", "reach"]
)
def compressed_past_fwd_kernel(
    out_ptr, seen_lse_ptr, lse_ptr, part0, part1, part2, part3,
    num_rows, num_tokens, heads, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """CTA of (token, head) rows: joins two softmaxes, in the memory of one's results.

    out: (B, S, H, DIM) of keys that all queries see, seen_lse their log-sum-exp (B, H, S); parts
    and lse are of the other keys, lse -inf for a query that sees none of them.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b, token, head, row_mask = split_row(row, num_rows, num_tokens, heads)  # [BLOCK_M] each
    lse_row = (b * heads + head) * num_tokens + token
    seen_lse = tl.load(seen_lse_ptr + lse_row, mask=row_mask, other=0.0)
    lse = tl.load(lse_ptr + lse_row, mask=row_mask, other=0.0)
    top = tl.maximum(lse, seen_lse)
    total = top + tl.log(tl.exp(lse - top) + tl.exp(seen_lse - top))
    later = load_compressed(
        part0, part1, part2, part3, b, token, head, row_mask, heads,
        rows, first1, first2, first3, reach, STRIDE, DIM, BLOCK_D,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    column = tl.arange(0, BLOCK_D)
    pointer = out_ptr + (row * DIM)[:, None] + column[None, :]
    mask = row_mask[:, None] & (column < DIM)[None, :]
    out = tl.load(pointer, mask=mask, other=0.0).to(tl.float32) * tl.exp(seen_lse - total)[:, None]
    out += later.to(tl.float32) * tl.exp(lse - total)[:, None]
    tl.store(pointer, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + lse_row, total, mask=row_mask)


@recordable
@triton.jit(
    do_not_specialize=["num_rows", "num_tokens", "rows", "first1", "first2", "first3", "reach"]
)
def compressed_past_bwd_kernel(
    grad_query_ptr, part0, part1, part2, part3,
    num_rows, num_tokens, heads, rows, first1, first2, first3, reach,
    STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """CTA of (token, head) rows: dQ (B, S, H, DIM) plus that by the parts of a fold, in place."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    b, token, head, row_mask = split_row(row, num_rows, num_tokens, heads)  # [BLOCK_M] each
    later = load_compressed(
        part0, part1, part2, part3, b, token, head, row_mask, heads,
        rows, first1, first2, first3, reach, STRIDE, DIM, BLOCK_D,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    column = tl.arange(0, BLOCK_D)
    pointer = grad_query_ptr + (row * DIM)[:, None] + column[None, :]
    mask = row_mask[:, None] & (column < DIM)[None, :]
    total = tl.load(pointer, mask=mask, other=0.0).to(tl.float32) + later.to(tl.float32)
    tl.store(pointer, total.to(grad_query_ptr.dtype.element_ty), mask=mask)
