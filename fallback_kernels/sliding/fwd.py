"""Forward of one query tile: its window from right to left.

Only the key tiles at the two ends of the window are masked. The tile at the left end is narrow:
with the heads of a group in one tile there are few keys that only some of its rows see.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.fallback_kernels.common.softmax import MIN_LOGIT, online_softmax_update
from nsa_flex.fallback_kernels.sliding.tiles import (
    is_visible,
    load_document_start,
    load_key_value,
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
    PRECISION: tl.constexpr, STAGES: tl.constexpr, end_key,
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
