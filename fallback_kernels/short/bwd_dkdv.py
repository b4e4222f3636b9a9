"""Backward of short documents by key: dK and dV of all branches, one CTA a tile of keys.

Tokens and compressed blocks are keys alike: first come the CTAs of the blocks, which all late
queries of a document see, then those of the tokens. One loop runs over query heads, and over the
queries that have the tile near and those that have it far.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.add_splits import Splits, add_splits
from nsa_flex.fallback_kernels.common.block_kinds import SHORT_DOCUMENT, has_kind
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.softmax import base2_scale
from nsa_flex.fallback_kernels.common.strides import rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tiles import cdiv, precision_of, width_of
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.ranges.tiles import load_tile, store_tile
from nsa_flex.fallback_kernels.short.bwd_dq import COMPRESSED, FAR, NEAR, UNSELECTED, WORDS
from nsa_flex.fallback_kernels.short.config import plan_of
from nsa_flex.fallback_kernels.short.spans import ends_of_documents, rows_of_keys
from nsa_flex.fallback_kernels.sliding.config import stats_descriptor
from nsa_flex.fallback_kernels.sliding.tiles import HeadRows, load_head_tile, load_stats


class ShortStats(NamedTuple):
    """`stats` of `query_gradients`, inside a kernel."""

    desc: Any  # a tensor descriptor for TMA, or None to load by `ptr`
    ptr: Any
    query_heads: Any
    strides: Any  # of batch and head


@triton.jit
def load_short_stats(stats, b, row, first, num_tokens, BLOCK_M: tl.constexpr):
    """One of a span's three numbers [BLOCK_M] for the tokens from `first` on; 0 past the last."""
    return load_stats(stats.desc, stats.ptr, b, row, *stats.strides, first, num_tokens, BLOCK_M)


@triton.jit
def _tiles_before(end, begin, tiles, BLOCK_M: tl.constexpr):
    """How many of `tiles` tiles of queries, the first at `begin`, lie before `end` as a whole."""
    return tl.minimum(tl.maximum(end - begin, 0) // BLOCK_M, tiles)


@triton.jit
def _add_queries(
    grad_k, grad_v, k, v, low, high, exists, queries, grad_outs, stats, block,
    begin, tiles, first_head, heads, span, scale_log2,
    IS_NEAR: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK / scale [BLOCK_N, BLOCK_D] and dV with what `tiles` of queries of each head add.

    low, high: of `rows_of_keys`, for the keys that exist [BLOCK_N]. IS_NEAR: they have the keys in
    their window; else `span` is FAR or COMPRESSED. MASKED: token keys of `block` are for those
    queries alone that selected it.
    """
    b, num_tokens, query_heads = queries.b, queries.num_tokens, stats.query_heads
    # All queries of [whole_begin, whole_end) see all keys; those past the last one may, too: what
    # is added of them is 0.
    whole_begin = tl.max(tl.where(exists, low, 0), 0)
    whole_end = tl.min(tl.where(exists, high, num_tokens), 0)
    whole_end = tl.where(whole_end == num_tokens, num_tokens + BLOCK_M, whole_end)
    # The first iteration's loads are prepared even where there is none: dividing by 0 there would
    # let the compiler assume that there is one, and start them.
    per_head = tl.maximum(tiles, 1)
    for i in tl.range(0, tiles * heads, num_stages=STAGES):
        head = first_head + i // per_head
        first = begin + i % per_head * BLOCK_M
        q = load_head_tile(queries, head, first, BLOCK_M, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
        grad_out = load_head_tile(
            grad_outs, head, first, BLOCK_M, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_M, BLOCK_DV]
        # [BLOCK_N, BLOCK_M] each
        logits = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        grad_p = tl.dot(v, tl.trans(grad_out), input_precision=PRECISION)
        stat = 3 * span * query_heads + head
        lse_log2 = load_short_stats(stats, b, stat, first, num_tokens, BLOCK_M)  # [BLOCK_M]
        gate = load_short_stats(stats, b, stat + query_heads, first, num_tokens, BLOCK_M)
        delta = load_short_stats(stats, b, stat + 2 * query_heads, first, num_tokens, BLOCK_M)
        if MASKED:
            word = head + (block // 32 + WORDS) * query_heads
            bits = load_short_stats(stats, b, word, first, num_tokens, BLOCK_M)  # [BLOCK_M]
            has_keys = (bits.to(tl.int32, bitcast=True) >> (block & 31)) & 1 != 0
            if IS_NEAR:  # the window has them nevertheless
                stat = head + 3 * UNSELECTED * query_heads
                of_window = load_short_stats(stats, b, stat, first, num_tokens, BLOCK_M)
                lse_log2 = tl.where(has_keys, lse_log2, of_window)
                stat += query_heads
                of_window = load_short_stats(stats, b, stat, first, num_tokens, BLOCK_M)
                gate = tl.where(has_keys, gate, of_window)
                stat += query_heads
                of_window = load_short_stats(stats, b, stat, first, num_tokens, BLOCK_M)
                delta = tl.where(has_keys, delta, of_window)
            else:
                lse_log2 = tl.where(has_keys, lse_log2, float("inf"))
        p = tl.exp2(logits * scale_log2 - lse_log2[None, :])
        weights = p * gate[None, :]
        grad_logits = p * (gate[None, :] * grad_p - delta[None, :])
        if (first < whole_begin) | (first + BLOCK_M > whole_end):
            row = first + tl.arange(0, BLOCK_M)  # [BLOCK_M]
            seen = (row[None, :] >= low[:, None]) & (row[None, :] < high[:, None])
            # What others see may be large, and of other documents' rows nothing may be known.
            weights = tl.where(seen, weights, 0.0)
            grad_logits = tl.where(seen, grad_logits, 0.0)
        weights = weights.to(grad_out.dtype)
        grad_v = tl.dot(weights, grad_out, grad_v, input_precision=PRECISION)
        grad_logits = grad_logits.to(q.dtype)
        grad_k = tl.dot(grad_logits, q, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _add_spans(
    grad_k, grad_v, k, v, column, ends, exists, queries, grad_outs, stats,
    near_begin, near_tiles, far_begin, far_tiles, first_head, heads, scale_log2,
    is_compressed, longest, window, selected_tokens, first_token, own_first,
    HAS_NEAR: tl.constexpr, HAS_FAR: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
    MASKED: tl.constexpr, SELECT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dK / scale and dV with what all queries add, near and far.

    MASKED: token keys, of the document that begins at `own_first`, are for queries that selected
    their block.
    """
    # The block of the document that the tile's keys lie in.
    block = tl.minimum((first_token - own_first) // SELECT, 63)
    near_certain, far_certain = near_tiles, far_tiles
    # First queries that certainly selected the tile's block, without their bits, then the others.
    PASSES: tl.constexpr = 2 if MASKED else 1
    if MASKED:
        # The first queries of a document selected all its blocks, all queries its initial ones,
        # and those near enough the tile's block that one. Compressed keys are never masked.
        of_all = is_compressed | (block < INITIAL)
        certain_end = tl.where(of_all, queries.num_tokens + BLOCK_M, own_first + selected_tokens)
        far_certain = _tiles_before(certain_end, far_begin, far_tiles, BLOCK_M)
        certain_end = tl.maximum(certain_end, own_first + (block + LOCAL) * SELECT)
        near_certain = _tiles_before(certain_end, near_begin, near_tiles, BLOCK_M)
    if HAS_NEAR:
        low, high = rows_of_keys(
            column, ends, is_compressed, longest, window, True, HAS_NEAR, COMPRESS, STRIDE
        )
        begin, tiles = near_begin, near_certain
        for masked in tl.static_range(PASSES):
            grad_k, grad_v = _add_queries(
                grad_k, grad_v, k, v, low, high, exists, queries, grad_outs, stats, block,
                begin, tiles, first_head, heads, NEAR, scale_log2, True, masked,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_M, STAGES, PRECISION,
            )  # fmt: skip
            begin, tiles = near_begin + near_certain * BLOCK_M, near_tiles - near_certain
    if HAS_FAR:
        span = tl.where(is_compressed, COMPRESSED, FAR)
        low, high = rows_of_keys(
            column, ends, is_compressed, longest, window, False, HAS_NEAR, COMPRESS, STRIDE
        )
        begin, tiles = far_begin, far_certain
        for masked in tl.static_range(PASSES):
            grad_k, grad_v = _add_queries(
                grad_k, grad_v, k, v, low, high, exists, queries, grad_outs, stats, block,
                begin, tiles, first_head, heads, FAR if masked else span, scale_log2,
                False, masked,
                HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_M, STAGES, PRECISION,
            )  # fmt: skip
            begin, tiles = far_begin + far_certain * BLOCK_M, far_tiles - far_certain
    return grad_k, grad_v


@recordable
@triton.jit(
    do_not_specialize=[
        "num_tokens", "num_blocks", "longest", "window", "compressed_tiles",
    ]
)  # fmt: skip
def short_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, ck_ptr, cv_ptr, document_start_ptr, document_end_ptr, kinds_ptr,
    grad_out_ptr, stats_ptr,
    query_desc, grad_out_desc, stats_desc,
    grad_k_ptr, grad_v_ptr, grad_ck_ptr, grad_cv_ptr,
    q_strides, k_strides, v_strides, ck_strides, cv_strides, do_strides, stats_strides,
    num_tokens, num_blocks, compressed_tiles, query_heads, kv_heads, heads_per_cta,
    longest, window, selected_tokens, scale, scale_log2,
    COMPRESS: tl.constexpr, STRIDE: tl.constexpr, HAS_NEAR: tl.constexpr, HAS_FAR: tl.constexpr,
    MASKED: tl.constexpr, SELECT: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr,
    KIND: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dK (splits, B, S, Hkv, D), dV, and those of compressed keys (splits, B, N, Hkv, D).

    HAS_NEAR: the window has these keys. HAS_FAR: the selected branch has them; alone, all of a
    document are far. query_desc, grad_out_desc, stats_desc: of tiles of BLOCK_M queries, or None.
    MASKED: queries selected blocks, `selected_tokens` tokens, and `stats_ptr` says which. Of
    documents that are no longer than that they selected all, and their bits are not read. With
    `kinds_ptr`, only keys of documents of a KIND are written.
    """
    BLOCK_D: tl.constexpr = width_of(HEAD_DIM)
    BLOCK_DV: tl.constexpr = width_of(VALUE_DIM)
    PRECISION: tl.constexpr = precision_of(k_ptr.dtype.element_ty)
    is_compressed = tl.program_id(0) < compressed_tiles
    splits = query_heads // kv_heads // heads_per_cta
    kv_head = tl.program_id(1) // splits
    split = tl.program_id(1) % splits
    row_of_batch = tl.program_id(2)
    b = row_of_batch.to(tl.int64)
    wide_kv_head = kv_head.to(tl.int64)
    k_base = k_ptr + b * k_strides[0] + wide_kv_head * k_strides[1]
    v_base = v_ptr + b * v_strides[0] + wide_kv_head * v_strides[1]
    if is_compressed:
        k_base = ck_ptr + b * ck_strides[0] + wide_kv_head * ck_strides[1]
        v_base = cv_ptr + b * cv_strides[0] + wide_kv_head * cv_strides[1]
    k_stride = tl.where(is_compressed, ck_strides[2], k_strides[2])
    v_stride = tl.where(is_compressed, cv_strides[2], v_strides[2])
    num_keys = tl.where(is_compressed, num_blocks, num_tokens)
    tokens_per_key = tl.where(is_compressed, STRIDE, 1)
    tile = tl.program_id(0) - tl.where(is_compressed, 0, compressed_tiles)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if document_start_ptr is not None:
        document_start_ptr += b * num_tokens
    exists = column < num_keys  # [BLOCK_N]
    token = column * tokens_per_key
    if kinds_ptr is not None:
        token = tl.where(exists, token, num_tokens)
        exists = has_kind(kinds_ptr, b, token, num_tokens, KIND, SELECT)
        if tl.max(exists.to(tl.int32), 0) == 0:
            return
        column = tl.where(exists, column, num_keys)  # as if it were not there
        exists = column < num_keys
    ends = tl.zeros([BLOCK_N], tl.int32) + num_tokens
    if document_start_ptr is not None:
        document_end_ptr += b * num_tokens
        ends = tl.load(document_end_ptr + token, mask=exists, other=num_tokens)
    key = column.to(tl.int64)
    k = load_tile(k_base, key, k_stride, num_keys, True, HEAD_DIM, BLOCK_D)
    v = load_tile(v_base, key, v_stride, num_keys, True, VALUE_DIM, BLOCK_DV)
    queries = HeadRows(query_desc, q_ptr, row_of_batch, 0, q_strides, num_tokens)
    grad_outs = HeadRows(grad_out_desc, grad_out_ptr, row_of_batch, 0, do_strides, num_tokens)

    # The queries that may see these keys: of documents that have begun where the last key is.
    first_token = tile * BLOCK_N * tokens_per_key
    last_token = first_token + BLOCK_N * tokens_per_key - 1
    end = tl.minimum(tl.max(tl.where(exists, ends, 0), 0), last_token + longest)
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

    stats = ShortStats(stats_desc, stats_ptr, query_heads, stats_strides)
    first_head = (kv_head * splits + split) * heads_per_cta
    grad_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    grad_v = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    own_first = 0  # of the document that the tile's first key lies in
    if not MASKED:
        all_selected: tl.constexpr = True
    elif document_start_ptr is None:
        all_selected: tl.constexpr = False  # type: ignore[no-redef]
    else:
        own = tl.minimum(first_token, num_tokens - 1)
        own_first = tl.load(document_start_ptr + own)
        tokens = tl.load(document_end_ptr + own) - own_first
        all_selected = is_compressed | (tokens <= selected_tokens)
    if all_selected:
        grad_k, grad_v = _add_spans(
            grad_k, grad_v, k, v, column, ends, exists, queries, grad_outs, stats,
            near_begin, near_tiles, far_begin, far_tiles, first_head, heads_per_cta, scale_log2,
            is_compressed, longest, window, selected_tokens, first_token, own_first,
            HAS_NEAR, HAS_FAR, COMPRESS, STRIDE, False, SELECT, INITIAL, LOCAL,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_M, STAGES, PRECISION,
        )  # fmt: skip
    else:
        grad_k, grad_v = _add_spans(
            grad_k, grad_v, k, v, column, ends, exists, queries, grad_outs, stats,
            near_begin, near_tiles, far_begin, far_tiles, first_head, heads_per_cta, scale_log2,
            is_compressed, longest, window, selected_tokens, first_token, own_first,
            HAS_NEAR, HAS_FAR, COMPRESS, STRIDE, True, SELECT, INITIAL, LOCAL,
            HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_M, STAGES, PRECISION,
        )  # fmt: skip

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
    longest: int,
    *,
    near: bool,
    far: bool,
    masked: bool = False,
    kinds: Tensor | None = None,
    kind: tl.constexpr = SHORT_DOCUMENT,
    grads: list[Tensor] | None = None,
) -> list[Tensor]:
    """dK and dV (B, S, Hkv, D), then those of the compressed keys (B, N, Hkv, D) if given.

    Args:
        grad: (B, Hq, S, Dv); query: (B, Hq, S, D).
        keys: key and value of the selected branch (`far`), of the window (`near`), or of both.
        stats: of `query_gradients`.
        masked: whether that was given blocks that queries selected.
        kinds: of `block_kinds`; only keys of documents of a `kind` are written, into `grads`.
        grads: memory of the results, contiguous; None for new memory.
    """
    plan = plan_of(query, *keys)
    q, do, k, v, ck, cv = (rows_contiguous(x) for x in (query, grad, *keys, *(compressed or keys)))
    batch, heads, tokens, _ = q.shape
    kv_heads, num_blocks = k.shape[1], ck.shape[2]
    splits = plan.head_splits if grads is None else 1
    options: dict = {"dtype": torch.float32 if splits > 1 else q.dtype, "device": q.device}
    shapes = [(tokens, kv_heads, x.shape[3]) for x in (k, v)]
    if compressed is not None:
        shapes += [(num_blocks, kv_heads, x.shape[3]) for x in (ck, cv)]
    sums = grads or [torch.empty((splits, batch, *shape), **options) for shape in shapes]
    block_n = plan.bwd_dkdv.block_n
    compressed_tiles = 0 if compressed is None else cdiv(num_blocks, block_n)
    grid = (compressed_tiles + cdiv(tokens, block_n), kv_heads * splits, batch)
    block_m = plan.bwd_dkdv.block_m
    descs = [descriptor(q, block_m), descriptor(do, block_m), stats_descriptor(stats, block_m)]
    if any(x is None for x in descs):
        descs = [None] * len(descs)
    short_bwd_dkdv_kernel[grid](
        q, k, v, ck, cv, document_start,
        None if document_start is None else ends_of_documents(document_start), kinds, do, stats,
        *descs, *sums, *(() if compressed else sums),
        *(strides(x) for x in (q, k, v, ck, cv, do)), stats.stride()[:2],
        tokens, num_blocks, compressed_tiles, heads, kv_heads, heads // kv_heads // splits,
        longest, min(config.window_size, tokens), config.num_selected_tokens,
        scale, base2_scale(scale),
        COMPRESS=config.compress_block_size, STRIDE=config.compress_stride,
        HAS_NEAR=near, HAS_FAR=far, MASKED=masked,
        SELECT=config.select_block_size, INITIAL=config.num_initial_blocks,
        LOCAL=config.num_local_blocks, KIND=kind,
        **plan.constants(), **plan.bwd_dkdv.constants(),
    )  # fmt: skip
    if grads is not None:
        return grads
    shares = [Splits(*sums[i : i + 2]) for i in range(0, len(sums), 2)]
    return add_splits(shares[0], q.dtype, *shares[1:])
