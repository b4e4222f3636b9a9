"""Scores of all selectable blocks by the sum or the maximum of compressed blocks, for any n.

One CTA has a tile of queries, all heads of a group, and goes over tiles of selectable blocks up to
the last query's own. The compressed keys of a tile are taken one residue at a time: row j of
residue m is compressed block `(l'/d) j + m`, so that pooling is over tiles, without shuffles. The
product is transposed, keys x (head in group, token): the sum over heads is over columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.arch import triton_unsupported_reason
from nsa_flex.fallback_kernels.common.checks import DTYPES, MAX_HEAD_DIM
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import LOG2E, base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous
from nsa_flex.fallback_kernels.common.tiles import (
    cdiv,
    next_power_of_2,
    precision_of,
    width_of,
)
from nsa_flex.fallback_kernels.topk.interface import MAX_GROUP, MAX_HEADS
from nsa_flex.reasons import explained


@explained
def unsupported_reason(query: Tensor, compressed_key: Tensor) -> str | None:
    """Why the kernel does not take these inputs; None if it does. Looks at no values."""
    batch, heads, _, dim = query.shape
    kv_heads = compressed_key.shape[1]
    reason = triton_unsupported_reason(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}; the Triton kernel takes {DTYPES}"
    limits = (
        (heads // kv_heads, MAX_GROUP, "query heads share a KV head"),
        (dim, MAX_HEAD_DIM, "is the head dim"),
        (batch * kv_heads, MAX_HEADS, "KV heads in all batch rows"),
    )
    for value, most, meaning in limits:
        if value > most:
            return f"{value} {meaning}; the Triton kernel takes at most {most}"
    return None


def block_scores(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    positions: Tensor,
    document_start: Tensor | None,
    scale: float,
    num_blocks: int,
    config: NSAConfig,
) -> Tensor:
    """exp(scale * q k - lse) summed over a group, pooled into blocks: float32 (B, Hkv, C, blocks).

    Args:
        query: (B, Hq, C, D); key: (B, Hkv, N, D), compressed, in its dtype.
        lse: float32 (B, Hq, C), any strides; a query of -inf scores 0.
        positions: int32 (B, C), contiguous, key index of each query.
        document_start: int32 (B, C), contiguous, or None for 0.
        config: sizes, and "max_pool" or sums.
    """
    query, key = rows_contiguous(query), rows_contiguous(key)
    batch, heads, num_queries, dim = query.shape
    kv_heads, num_keys = key.shape[1:3]
    group = heads // kv_heads
    padded_group = next_power_of_2(group)
    is_float32 = query.dtype == torch.float32
    # Larger tiles would spill registers.
    rows = 32 if is_float32 else 64 if dim > 128 or group <= 2 else 128
    rows, block_n = max(rows, padded_group), 16 if is_float32 else 32 if group == 1 else 64
    tokens = max(1, rows // padded_group)
    shape = (batch, kv_heads, num_queries, num_blocks)
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        block_scores_kernel[(cdiv(num_queries, tokens), batch * kv_heads)](
            query, key, lse, positions, document_start, scores,
            query.stride()[:3], key.stride()[:3], lse.stride(),
            num_queries, num_keys, num_blocks, kv_heads, base2_scale(scale),
            GROUP=group, BLOCK_TOKENS=tokens,
            BLOCK_N=block_n, HEAD_DIM=dim,
            COMPRESS=config.compress_block_size, STRIDE=config.compress_stride,
            SELECT=config.select_block_size, MAXIMUM=config.selection == "max_pool",
            num_warps=4,
        )  # fmt: skip
    return scores


@recordable
@triton.jit(do_not_specialize=["num_queries", "num_keys", "num_blocks", "kv_heads"])
def block_scores_kernel(
    query_ptr, key_ptr, lse_ptr, position_ptr, start_ptr, scores_ptr,
    query_strides, key_strides, lse_strides,
    num_queries, num_keys, num_blocks, kv_heads, scale_log2,
    GROUP: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, SELECT: tl.constexpr, MAXIMUM: tl.constexpr,
):  # fmt: skip
    """CTA (tile of queries, batch row and KV head). Strides are of (B, H, S)."""
    PADDED_GROUP: tl.constexpr = triton.next_power_of_2(GROUP)
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    PRECISION: tl.constexpr = precision_of(key_ptr.dtype.element_ty)
    PER: tl.constexpr = SELECT // STRIDE
    LEFT: tl.constexpr = COMPRESS // STRIDE - 1  # compressed blocks before a block that overlap it
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # late queries see more: they start first
    b, head = (tl.program_id(1) // kv_heads).to(tl.int64), tl.program_id(1) % kv_heads
    token = tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)  # [BLOCK_TOKENS]
    row_mask = token < num_queries
    position = tl.load(position_ptr + b * num_queries + token, mask=row_mask, other=-1)
    first = tl.zeros([BLOCK_TOKENS], tl.int32)
    if start_ptr is not None:
        first = tl.load(start_ptr + b * num_queries + token, mask=row_mask, other=0)
    column = tl.arange(0, PADDED_GROUP * BLOCK_TOKENS)  # [columns]: (head in group, token)
    query_head = (head * GROUP + column // BLOCK_TOKENS).to(tl.int64)
    query = (tile * BLOCK_TOKENS + column % BLOCK_TOKENS).to(tl.int64)
    some = (column // BLOCK_TOKENS < GROUP) & (query < num_queries)
    dim = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    row = b * query_strides[0] + query_head * query_strides[1] + query * query_strides[2]
    q = tl.load(
        query_ptr + row[:, None] + dim[None, :],
        mask=some[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
    )  # fmt: skip  # [columns, BLOCK_D]
    row = b * lse_strides[0] + query_head * lse_strides[1] + query * lse_strides[2]
    lse = tl.load(lse_ptr + row, mask=some, other=float("-inf"))  # [columns]
    lse_log2 = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    key_ptr += b * key_strides[0] + head.to(tl.int64) * key_strides[1]
    scores_ptr += (tl.program_id(1).to(tl.int64) * num_queries + token) * num_blocks
    least = tl.min(tl.where(row_mask, first, num_blocks * SELECT), 0) // SELECT
    end = tl.minimum(tl.max(position, 0) // SELECT + 1, num_blocks)
    for first_block in range(0, num_blocks, BLOCK_N):
        block = first_block + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        score = tl.zeros([BLOCK_N, BLOCK_TOKENS], tl.float32)
        seen = (first_block < end) & (first_block + BLOCK_N > least)
        for step in tl.range(0, tl.where(seen, PER + LEFT, 0)):
            key = block * PER + step - LEFT  # [BLOCK_N]
            key_mask = (key >= 0) & (key < num_keys)
            k = tl.load(
                key_ptr + key.to(tl.int64)[:, None] * key_strides[2] + dim[None, :],
                mask=key_mask[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
            )  # fmt: skip  # [BLOCK_N, BLOCK_D]
            logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, columns]
            p = tl.exp2(logits * scale_log2 - lse_log2[None, :])
            p = tl.sum(tl.reshape(p, (BLOCK_N, PADDED_GROUP, BLOCK_TOKENS)), 1)
            visible = (key * STRIDE + COMPRESS - 1)[:, None] <= position[None, :]
            visible = visible & ((key * STRIDE)[:, None] >= first[None, :]) & key_mask[:, None]
            p = tl.where(visible, p, 0.0)  # [BLOCK_N, BLOCK_TOKENS]
            if MAXIMUM:
                score = tl.maximum(score, p)
            else:
                pairs = tl.minimum(tl.minimum(step, LEFT), PER - 1)
                score += (tl.minimum(pairs, PER + LEFT - 1 - step) + 1) * p
        tl.store(
            scores_ptr[None, :] + block[:, None], score,
            mask=(block < num_blocks)[:, None] & row_mask[None, :],
        )  # fmt: skip
