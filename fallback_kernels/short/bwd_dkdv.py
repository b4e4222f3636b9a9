"""Backward of short documents by key: dK and dV of all branches, one CTA a tile of keys.

Tokens and compressed blocks are keys alike: first come the CTAs of the blocks, which all late
queries of a document see, then those of the tokens. One loop runs over query heads, and over the
queries that have the tile near and those that have it far.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv
from nsa_flex.fallback_kernels.ranges.config import RangesPlan
from nsa_flex.fallback_kernels.ranges.tiles import load_tile, store_tile
from nsa_flex.fallback_kernels.short.bwd_dq import COMPRESSED, FAR, NEAR
from nsa_flex.fallback_kernels.short.spans import block_span, end_of_documents, token_spans

CHUNK = 256  # tokens whose documents are looked at together


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "reach", "window", "compressed_tiles"])
def short_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, ck_ptr, cv_ptr, document_start_ptr, grad_out_ptr, stats_ptr,
    grad_k_ptr, grad_v_ptr, grad_ck_ptr, grad_cv_ptr,
    q_stride_b, q_stride_h, q_stride_s, k_stride_b, k_stride_h, k_stride_s,
    v_stride_b, v_stride_h, v_stride_s, ck_stride_b, ck_stride_h, ck_stride_s,
    cv_stride_b, cv_stride_h, cv_stride_s, do_stride_b, do_stride_h, do_stride_s,
    num_tokens, num_blocks, compressed_tiles, query_heads, kv_heads, heads_per_cta,
    reach, window, scale, scale_log2,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_FAR: tl.constexpr,
    CHUNK: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK (splits, B, S, Hkv, D), dV, and those of compressed keys (splits, B, N, Hkv, D).

    HAS_NEAR: the window has these keys. HAS_FAR: the selected branch has them; alone, all of a
    document are far.
    """
    is_compressed = tl.program_id(0) < compressed_tiles
    splits = query_heads // kv_heads // heads_per_cta
    kv_head = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    b = tl.program_id(2).to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    k_base = k_ptr + b * k_stride_b + wide_kv_head * k_stride_h
    v_base = v_ptr + b * v_stride_b + wide_kv_head * v_stride_h
    if is_compressed:
        k_base = ck_ptr + b * ck_stride_b + wide_kv_head * ck_stride_h
        v_base = cv_ptr + b * cv_stride_b + wide_kv_head * cv_stride_h
    k_stride = tl.where(is_compressed, ck_stride_s, k_stride_s)
    v_stride = tl.where(is_compressed, cv_stride_s, v_stride_s)
    num_keys = tl.where(is_compressed, num_blocks, num_tokens)
    tokens_per_key = tl.where(is_compressed, STRIDE, 1)
    tile = tl.program_id(0) - tl.where(is_compressed, 0, compressed_tiles)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    key = column.to(tl.int64)
    k = load_tile(k_base, key, k_stride, num_keys, True, HEAD_DIM, BLOCK_D)
    v = load_tile(v_base, key, v_stride, num_keys, True, VALUE_DIM, BLOCK_DV)

    # The queries that may see these keys: of documents that have begun where the last key is.
    if document_start_ptr is not None:
        document_start_ptr += b * num_tokens
    first_token = tile * BLOCK_N * tokens_per_key
    last_token = first_token + BLOCK_N * tokens_per_key - 1
    end = end_of_documents(
        document_start_ptr, first_token, last_token, last_token + reach, num_tokens, CHUNK
    )
    near_begin = first_token // BLOCK_M * BLOCK_M
    near_tiles, far_begin = 0, near_begin
    if HAS_NEAR:
        near_end = tl.where(is_compressed, near_begin, tl.minimum(end, last_token + window))
        near_tiles = tl.maximum(near_end - near_begin + BLOCK_M - 1, 0) // BLOCK_M
        if HAS_FAR:
            first_far = tl.where(is_compressed, first_token, first_token + window)
            far_begin = first_far // BLOCK_M * BLOCK_M
    far_tiles = 0
    if HAS_FAR:
        far_tiles = tl.maximum(end - far_begin + BLOCK_M - 1, 0) // BLOCK_M
    per_head = near_tiles + far_tiles

    plane = tl.num_programs(2).to(tl.int64) * query_heads * num_tokens
    q_ptr += b * q_stride_b
    grad_out_ptr += b * do_stride_b
    stats_ptr += b * query_heads * num_tokens
    first_head = (kv_head * splits + split) * heads_per_cta
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    for i in tl.range(0, per_head * heads_per_cta, num_stages=STAGES):
        head = (first_head + i // per_head).to(tl.int64)
        nth = i % per_head
        is_far = nth >= near_tiles
        row = tl.where(
            is_far, far_begin + (nth - near_tiles) * BLOCK_M, near_begin + nth * BLOCK_M
        )
        row += tl.arange(0, BLOCK_M)  # [BLOCK_M]
        query = row.to(tl.int64)
        row_mask = row < num_tokens
        span = tl.where(is_compressed, COMPRESSED, tl.where(is_far, FAR, NEAR))
        stats = stats_ptr + 3 * span * plane + head * num_tokens + query
        lse_log2 = tl.load(stats, mask=row_mask, other=float("inf"))  # [BLOCK_M]
        gate = tl.load(stats + plane, mask=row_mask, other=0.0)  # [BLOCK_M]
        gated_delta = tl.load(stats + 2 * plane, mask=row_mask, other=0.0)  # [BLOCK_M]
        document_first, window_first, end_key = token_spans(
            document_start_ptr, row, num_tokens, reach, window
        )
        first_block, end_block = block_span(
            document_first, row, num_tokens, num_blocks, COMPRESS, STRIDE
        )
        far_end = window_first if HAS_NEAR else end_key
        first_key = tl.where(is_far, document_first, window_first)
        end_key = tl.where(is_far, far_end, end_key)
        first_key = tl.where(is_compressed, first_block, first_key)
        end_key = tl.where(is_compressed, end_block, end_key)

        q = load_tile(
            q_ptr + head * q_stride_h, query, q_stride_s, num_tokens, True, HEAD_DIM, BLOCK_D
        )  # [BLOCK_M, BLOCK_D]
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)  # [BLOCK_N, BLOCK_M]
        p = tl.exp2(logits * scale_log2 - lse_log2[None, :])
        seen = (column[:, None] >= first_key[None, :]) & (column[:, None] < end_key[None, :])
        p = tl.where(seen, p, 0.0)
        grad_out = load_tile(
            grad_out_ptr + head * do_stride_h, query, do_stride_s, num_tokens, True,
            VALUE_DIM, BLOCK_DV,
        )  # fmt: skip  # [BLOCK_M, BLOCK_DV]
        weights = (p * gate[None, :]).to(grad_out.dtype)
        grad_v = tl.dot(weights, grad_out, grad_v, input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        grad_logits = p * (gate[None, :] * grad_p - gated_delta[None, :])
        grad_logits = tl.where(seen, grad_logits, 0.0).to(q.dtype)
        grad_k = tl.dot(grad_logits, q, grad_k, input_precision=PRECISION)

    grad_k *= scale
    row = split * tl.num_programs(2).to(tl.int64) + b
    first = row * num_keys * kv_heads + kv_head
    grad_k_base = grad_k_ptr + first * HEAD_DIM
    grad_v_base = grad_v_ptr + first * VALUE_DIM
    if is_compressed:
        grad_k_base = grad_ck_ptr + first * HEAD_DIM
        grad_v_base = grad_cv_ptr + first * VALUE_DIM
    store_tile(grad_k_base, key, kv_heads * HEAD_DIM, num_keys, grad_k, HEAD_DIM, BLOCK_D)
    store_tile(grad_v_base, key, kv_heads * VALUE_DIM, num_keys, grad_v, VALUE_DIM, BLOCK_DV)


def key_gradients(
    grad: Tensor,
    query: Tensor,
    keys: tuple[Tensor, Tensor],
    compressed: tuple[Tensor, Tensor] | None,
    stats: Tensor,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    reach: int,
    *,
    near: bool,
    far: bool,
) -> list[Tensor]:
    """dK and dV (B, S, Hkv, D), then those of the compressed keys (B, N, Hkv, D) if given.

    Args:
        grad: (B, Hq, S, Dv); query: (B, Hq, S, D).
        keys: key and value of the selected branch (`far`), of the window (`near`), or of both.
        stats: of `query_gradients`.
    """
    plan = RangesPlan.of(query, *keys)
    q, do, k, v, ck, cv = (rows_contiguous(x) for x in (query, grad, *keys, *(compressed or keys)))
    batch, heads, tokens, _ = q.shape
    kv_heads, num_blocks = k.shape[1], ck.shape[2]
    splits = plan.head_splits
    options: dict = {"dtype": torch.float32 if splits > 1 else q.dtype, "device": q.device}
    shapes = [(tokens, kv_heads, x.shape[3]) for x in (k, v)]
    if compressed is not None:
        shapes += [(num_blocks, kv_heads, x.shape[3]) for x in (ck, cv)]
    grads = [torch.empty((splits, batch, *shape), **options) for shape in shapes]
    block_n = plan.bwd_dkdv.block_n
    compressed_tiles = 0 if compressed is None else cdiv(num_blocks, block_n)
    grid = (compressed_tiles + cdiv(tokens, block_n), kv_heads * splits, batch)
    short_bwd_dkdv_kernel[grid](
        q, k, v, ck, cv, document_start, do, stats, *grads, *(() if compressed else grads),
        *(stride for x in (q, k, v, ck, cv, do) for stride in strides(x)),
        tokens, num_blocks, compressed_tiles, heads, kv_heads, heads // kv_heads // splits,
        reach, min(config.window_size, tokens), scale, base2_scale(scale),
        COMPRESS=config.compress_block_size, STRIDE=config.compress_stride,
        HAS_NEAR=near, HAS_FAR=far, CHUNK=CHUNK,
        **plan.constants(), **plan.bwd_dkdv.constants(),
    )  # fmt: skip
    return [x.sum(0).to(q.dtype) if splits > 1 else x[0] for x in grads]
