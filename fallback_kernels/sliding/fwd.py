"""Sliding attention forward: one CTA per query tile, its window from right to left.

Only the key tiles at the two ends of the window are masked. The tile at the left end is narrow:
with the heads of a group in one tile there are few keys that only some of its rows see.
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
    online_softmax_update,
)
from nsa_flex.fallback_kernels.common.strides import empty_bshd, rows_contiguous, strides
from nsa_flex.fallback_kernels.common.tma import descriptor
from nsa_flex.fallback_kernels.sliding.config import SlidingPlan, Tiles
from nsa_flex.fallback_kernels.sliding.tiles import (
    HeadRows,
    is_visible,
    load_document_start,
    load_key_value,
    load_rows_at,
    query_rows,
    query_tile_of_cta,
    row_offsets,
    store_rows_at,
)


@triton.jit
def attend_tile(
    q, k, v, token, document_start, start, window, scale_log2, acc, row_max, row_sum,
    masked, PRECISION: tl.constexpr,
):  # fmt: skip
    """`online_softmax_update` with the keys from `start` on; `row_max` is finite."""
    logits = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
    if masked:
        key = start + tl.arange(0, k.shape[0])
        first_key = None if document_start is None else document_start[:, None]
        visible = is_visible(token[:, None], key[None, :], window, first_key)
        logits = tl.where(visible, logits, float("-inf"))
    return online_softmax_update(
        acc, row_max, row_sum, logits, v, scale_log2, None, False, PRECISION
    )


@triton.jit
def attend_window(
    q, keys, values, document_start_ptr, first, token, window, scale_log2,
    BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EDGE_BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, end_key=None,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_DV], row_max and row_sum [BLOCK_M] of a query tile's window.

    document_start_ptr: int32 (B, S), first key of each token's document; None for one document.
    first, token: positions, of the tile's first row and of each. end_key: keys from there on may
    hold anything; None: there are none.
    """
    if document_start_ptr is None:
        document_start, lowest, highest = None, 0, 0
    else:
        document_start, lowest, highest = load_document_start(
            document_start_ptr, keys.b, token, keys.num_tokens
        )
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    # Finite, so that a tile in which a row sees nothing changes nothing.
    row_max = tl.full([BLOCK_M], MIN_LOGIT, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    # From right to left: tiles on the diagonal, then those that every row sees; these start no
    # earlier than the last row's window.
    end = first + BLOCK_TOKENS
    if end_key is not None:
        end = tl.minimum(end, end_key)
    diagonal_tiles: tl.constexpr = (BLOCK_TOKENS + BLOCK_N - 1) // BLOCK_N
    full_tiles = (end - tl.maximum(end - window, highest)) // BLOCK_N
    full_tiles = tl.maximum(full_tiles, diagonal_tiles)
    for i in tl.range(0, full_tiles, num_stages=STAGES):
        start = end - (i + 1) * BLOCK_N
        k, v = load_key_value(
            keys, values, start, BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV
        )  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_DV]
        acc, row_max, row_sum = attend_tile(
            q, k, v, token, document_start, start, window, scale_log2, acc, row_max, row_sum,
            i < diagonal_tiles, PRECISION,
        )  # fmt: skip
    end -= full_tiles * BLOCK_N

    rest = tl.maximum(end - tl.maximum(first - window + 1, lowest), 0)
    for i in tl.range(0, (rest + EDGE_BLOCK_N - 1) // EDGE_BLOCK_N, num_stages=1):
        start = end - (i + 1) * EDGE_BLOCK_N
        edge_k, edge_v = load_key_value(
            keys, values, start, EDGE_BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
            BY_POINTERS=True,
        )  # fmt: skip  # [EDGE_BLOCK_N, BLOCK_D], [EDGE_BLOCK_N, BLOCK_DV]
        acc, row_max, row_sum = attend_tile(
            q, edge_k, edge_v, token, document_start, start, window, scale_log2,
            acc, row_max, row_sum,
            True, PRECISION,
        )  # fmt: skip
    return acc, row_max, row_sum


@recordable
@triton.jit(do_not_specialize=["num_tokens", "window"])
def sliding_fwd_kernel(
    query_ptr, key_ptr, value_ptr, key_desc, value_desc, document_start_ptr, out_ptr, lse_ptr,
    query_strides, key_strides, value_strides,
    num_tokens, window, kv_heads, scale_log2,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EDGE_BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Output (B, S, Hq, Dv) and log-sum-exp (B, S, Hq) of one query tile."""
    b, h, first, first_head = query_tile_of_cta(num_tokens, kv_heads, GROUP, HEADS, BLOCK_TOKENS)
    token, head_in_group, row_mask = query_rows(
        first, first_head, num_tokens, GROUP, HEADS, BLOCK_TOKENS, BLOCK_M
    )  # [BLOCK_M] each
    query_ptr += b.to(tl.int64) * query_strides[0] + (h * GROUP).to(tl.int64) * query_strides[1]
    offset = row_offsets(token, head_in_group, query_strides[1], query_strides[2])
    q = load_rows_at(query_ptr, offset, row_mask, HEAD_DIM, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    keys = HeadRows(key_desc, key_ptr, b, h, *key_strides, num_tokens)  # type: ignore[call-arg]
    values = HeadRows(value_desc, value_ptr, b, h, *value_strides, num_tokens)  # type: ignore[call-arg]
    acc, row_max, row_sum = attend_window(
        q, keys, values, document_start_ptr, first, token, window, scale_log2,
        BLOCK_TOKENS, BLOCK_M, BLOCK_N, EDGE_BLOCK_N, HEAD_DIM, BLOCK_D, VALUE_DIM, BLOCK_DV,
        PRECISION, STAGES,
    )  # fmt: skip  # [BLOCK_M, BLOCK_DV], [BLOCK_M], [BLOCK_M]
    query_heads = kv_heads * GROUP
    first_row = b.to(tl.int64) * num_tokens * query_heads + h * GROUP
    row = row_offsets(token, head_in_group, 1, query_heads) + first_row
    row_sum = tl.where(row_mask, row_sum, 1.0)
    store_rows_at(out_ptr, row * VALUE_DIM, row_mask, acc / row_sum[:, None], VALUE_DIM, BLOCK_DV)
    tl.store(lse_ptr + row, (row_max + tl.log2(row_sum)) * LN2, mask=row_mask)


def sliding_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    window_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output (B, Hq, S, Dv) and natural log-sum-exp (B, Hq, S) float32, memory (B, S, Hq, ...)."""
    query, key, value = (rows_contiguous(x) for x in (query, key, value))
    plan = SlidingPlan.of(query, key, value)
    tiles = plan.forward_tiles()
    out = empty_bshd(query, plan.query_heads, plan.tokens, plan.value_dim, query.dtype)
    lse = empty_bshd(query, plan.query_heads, plan.tokens, 1, torch.float32)[..., 0]
    _launch(plan, tiles, query, key, value, document_start, out, lse, window_size, scale)
    return out, lse


def _launch(
    plan: SlidingPlan,
    tiles: Tiles,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    document_start: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window_size: int,
    scale: float,
) -> None:
    sliding_fwd_kernel[(plan.query_ctas(tiles),)](
        query,
        key,
        value,
        descriptor(key, tiles.block_n),
        descriptor(value, tiles.block_n),
        document_start,
        out,
        lse,
        strides(query),
        strides(key),
        strides(value),
        plan.tokens,
        plan.clamped_window(window_size),
        plan.kv_heads,
        base2_scale(scale),
        **plan.query_tile_constants(tiles),
    )
