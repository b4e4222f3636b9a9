"""The largest score of each block of keys, as an indexer's top-k blocks go by.

One CTA has a tile of queries of one head. It goes over the blocks up to the last query's own and
stores one number for each: scores never leave the CTA.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason
from nsa_flex.fallback_kernels.common.checks import DTYPES, MAX_HEAD_DIM
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.reasons import explained

MAX_BLOCK_SIZE = 128
MAX_HEADS = 65535  # heads of all batch rows: one axis of the launch grid


@explained
def unsupported_reason(query: Tensor, block_size: int) -> str | None:
    """Why the kernel does not take these inputs; None if it does. Looks at no values."""
    batch, heads, _, dim = query.shape
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the Triton kernel takes {DTYPES}"
    if dim > MAX_HEAD_DIM:
        return f"{dim} is the head dim; the Triton kernel takes at most {MAX_HEAD_DIM}"
    if block_size > MAX_BLOCK_SIZE:
        return f"{block_size} keys are a block; the Triton kernel takes at most {MAX_BLOCK_SIZE}"
    if batch * heads > MAX_HEADS:
        return f"{batch * heads} heads in all batch rows; the Triton kernel takes {MAX_HEADS}"
    return None


def block_max(
    query: Tensor,
    key: Tensor,
    position: Tensor,
    start: Tensor | None,
    block_size: int,
) -> Tensor:
    """Largest dot product of each query with the keys of each block that it sees.

    Args:
        query: (B, H, Sq, D), key: (B, Hk, Sk, D), Hk divides H.
        position: int32 (B, Sq), key index of each query, ascending.
        start: int32 (B, Sq), first key of each query's document, a multiple of the block size;
            None for 0.

    Returns:
        float32 (B, H, Sq, ceil(Sk / block_size)); -inf of blocks that a query does not see.
    """
    query, key = rows_contiguous(query), rows_contiguous(key)
    batch, heads, num_queries, dim = query.shape
    num_keys = key.shape[2]
    blocks = cdiv(num_keys, block_size)
    best = torch.empty(
        (batch, heads, num_queries, blocks), dtype=torch.float32, device=query.device
    )
    is_float32 = query.dtype == torch.float32
    block_m, block_n = (32, 16) if is_float32 else (64, block_size)  # larger ones spill
    with torch.cuda.device_of(query):
        block_max_kernel[(cdiv(num_queries, block_m), batch * heads)](
            query, key, position, start, best,
            query.stride()[:3], key.stride()[:3],
            num_queries, num_keys, blocks, heads, heads // key.shape[1],
            BLOCK_SIZE=block_size, HEAD_DIM=dim,
            BLOCK_M=block_m, BLOCK_N=block_n,
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return best


@recordable
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_blocks"])
def block_max_kernel(
    query_ptr, key_ptr, position_ptr, start_ptr, best_ptr, query_strides, key_strides,
    num_queries, num_keys, num_blocks, heads, group,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """CTA (tile of queries, batch row and head). Strides are of (B, H, S)."""
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see more: they start first
    b, head = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    query = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_mask = query < num_queries
    position = tl.load(position_ptr + b * num_queries + query, mask=row_mask, other=-1)
    first = tl.zeros([BLOCK_M], tl.int32)
    if start_ptr is not None:
        first = tl.load(start_ptr + b * num_queries + query, mask=row_mask, other=0)
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    query_ptr += b * query_strides[0] + head * query_strides[1]
    key_ptr += b * key_strides[0] + (head // group) * key_strides[1]
    best_ptr += ((b * heads + head) * num_queries + query.to(tl.int64)) * num_blocks  # [BLOCK_M]
    q = tl.load(
        query_ptr + query.to(tl.int64)[:, None] * query_strides[2] + dim[None, :],
        mask=row_mask[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip  # [BLOCK_M, BLOCK_D]
    least = tl.min(tl.where(row_mask, first, num_keys), 0) // BLOCK_SIZE
    end = tl.minimum(tl.max(position, 0) // BLOCK_SIZE + 1, num_blocks)
    nothing = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for block in range(least):
        tl.store(best_ptr + block, nothing, mask=row_mask)
    for block in range(least, end):
        best = nothing
        for part in range(BLOCK_SIZE // BLOCK_N):
            key = block * BLOCK_SIZE + part * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            k = tl.load(
                key_ptr + key.to(tl.int64)[None, :] * key_strides[2] + dim[:, None],
                mask=(key < num_keys)[None, :] & (dim < HEAD_DIM)[:, None], other=0.0,
            )  # fmt: skip  # [BLOCK_D, BLOCK_N]
            score = tl.dot(q, k, input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
            visible = (key[None, :] <= position[:, None]) & (key[None, :] >= first[:, None])
            score = tl.where(visible & (key < num_keys)[None, :], score, float("-inf"))
            best = tl.maximum(best, tl.max(score, 1))
        tl.store(best_ptr + block, best, mask=row_mask)
    for block in range(end, num_blocks):
        tl.store(best_ptr + block, nothing, mask=row_mask)
