"""Range attention forward: a CTA a tile of queries of one head, FlashAttention's loop over keys.

The query heads of a group are neighbours in the grid, so that they find keys and values in the L2.
Where all rows of a tile see all keys of another, TMA loads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import (
    LN2,
    MIN_LOGIT,
    base2_scale,
    finite,
    online_softmax_update,
)
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.ranges.config import RangesPlan
from nsa_flex.fallback_kernels.ranges.tiles import (
    key_bounds,
    load_ranges,
    load_tile,
    store_tile,
)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, k_ptr, v_ptr, k_stride, v_stride,
    begin, end, first_key, end_key, num_keys, scale_log2,
    MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys [begin, end), multiples of BLOCK_N, into the softmax sums of a tile of queries."""
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        key = column.to(tl.int64)
        k = load_tile(k_ptr, key, k_stride, num_keys, MASKED, HEAD_DIM, BLOCK_D)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            seen = (column[None, :] >= first_key[:, None]) & (column[None, :] < end_key[:, None])
            logits = tl.where(seen, logits, float("-inf"))
        v = load_tile(v_ptr, key, v_stride, num_keys, MASKED, VALUE_DIM, BLOCK_DV)
        acc, row_max, row_sum = online_softmax_update(
            acc, row_max, row_sum, logits, v, scale_log2, None, True, PRECISION
        )
    return acc, row_max, row_sum


@triton.jit
def _attend_by_tma(
    acc, row_max, row_sum, q, key_desc, value_desc, b, kv_head, begin, end, scale_log2,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_attend`, of keys that every row sees."""
    row_max = tl.maximum(row_max, MIN_LOGIT)
    for start in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        k = key_desc.load([b, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_D)
        v = value_desc.load([b, kv_head, start, 0]).reshape(BLOCK_N, BLOCK_DV)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        acc, row_max, row_sum = online_softmax_update(
            acc, row_max, row_sum, logits, v, scale_log2, None, False, PRECISION
        )
    return acc, row_max, row_sum


@recordable
@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def ranges_fwd_kernel(
    q_ptr, k_ptr, v_ptr, key_desc, value_desc, first_key_ptr, end_key_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, lse_strides,
    range_stride_b, num_queries, num_keys, query_heads, group, scale_log2,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LEAVE: tl.constexpr,
):  # fmt: skip
    """out (B, Sq, Hq, Dv) and natural lse (B, Hq, Sq) of one tile of queries and one head.

    key_desc, value_desc: of tiles of BLOCK_N keys and values, or None: all loads are by pointers.
    LEAVE: tiles of queries that see nothing are left as they are.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(k_ptr.dtype.element_ty)
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late queries see more: they start first
    b = tl.program_id(2).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = row.to(tl.int64)
    first_key, end_key = load_ranges(
        first_key_ptr + b * range_stride_b, end_key_ptr + b * range_stride_b, row, num_queries
    )
    begin, full_begin, full_end, end = key_bounds(first_key, end_key, row < num_queries, BLOCK_N)
    if LEAVE & (begin == end):
        return
    num_keys = tl.minimum(num_keys, tl.max(end_key, 0))  # what follows may hold anything

    kv_head = (head // group).to(tl.int64)
    q_ptr += b * q_strides[0] + head.to(tl.int64) * q_strides[1]
    k_ptr += b * k_strides[0] + kv_head * k_strides[1]
    v_ptr += b * v_strides[0] + kv_head * v_strides[1]
    q = load_tile(q_ptr, query, q_strides[2], num_queries, True, HEAD_DIM, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, k_strides[2], v_strides[2],
        begin, full_begin, first_key, end_key, num_keys, scale_log2,
        True, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
    )  # fmt: skip
    if key_desc is not None:
        acc, row_max, row_sum = _attend_by_tma(
            acc, row_max, row_sum, q, key_desc, value_desc, tl.program_id(2), head // group,
            full_begin, full_end, scale_log2, BLOCK_D, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
    else:
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, k_ptr, v_ptr, k_strides[2], v_strides[2],
            full_begin, full_end, first_key, end_key, num_keys, scale_log2,
            False, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, STAGES, PRECISION,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, k_ptr, v_ptr, k_strides[2], v_strides[2],
        full_end, end, first_key, end_key, num_keys, scale_log2,
        True, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, 1, PRECISION,
    )  # fmt: skip

    empty = row_sum == 0.0
    out = acc / tl.where(empty, 1.0, row_sum)[:, None]  # [BLOCK_M, BLOCK_DV]
    lse = (finite(row_max) + tl.log2(tl.where(empty, 1.0, row_sum))) * LN2
    lse = tl.where(empty, float("-inf"), lse)  # [BLOCK_M]
    row_stride = query_heads * VALUE_DIM
    out_ptr += b * num_queries * row_stride + head * VALUE_DIM
    store_tile(out_ptr, query, row_stride, num_queries, out, VALUE_DIM, BLOCK_DV)
    lse_ptr += b * lse_strides[0] + head.to(tl.int64) * lse_strides[1]
    tl.store(lse_ptr + query * lse_strides[2], lse, mask=row < num_queries)


def ranges_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_key: Tensor,
    end_key: Tensor,
    scale: float,
    *,
    lse_by_head: bool = False,
    leave: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `ranged_attention`; `first_key` and `end_key` have a batch stride, 0 if shared.

    lse_by_head: the memory of the log-sum-exp is (B, H, S), not (B, S, H).
    leave: results of queries that see nothing may be anything.
    """
    plan = RangesPlan.of(query, key, value)
    q, k, v = (rows_contiguous(x) for x in (query, key, value))
    batch, heads, num_queries, _ = q.shape
    num_keys = k.shape[2]
    out = torch.empty((batch, num_queries, heads, v.shape[3]), dtype=q.dtype, device=q.device)
    options: dict = {"dtype": torch.float32, "device": q.device}
    if lse_by_head:
        lse = torch.empty((batch, heads, num_queries), **options)
    else:
        lse = torch.empty((batch, num_queries, heads), **options).transpose(1, 2)
    descs = [descriptor(x, plan.fwd.block_n) for x in (k, v)]
    if any(x is None for x in descs):
        descs = [None, None]
    grid = (heads, cdiv(num_queries, plan.fwd.block_m), batch)
    ranges_fwd_kernel[grid](
        q, k, v, *descs, first_key, end_key, out, lse,
        strides(q), strides(k), strides(v), lse.stride(), first_key.stride(0),
        num_queries, num_keys, heads, heads // k.shape[1], base2_scale(scale),
        **plan.constants(), **plan.fwd.constants(), LEAVE=leave,
    )  # fmt: skip
    return out.transpose(1, 2), lse
