"""Which keys a query sees where every block of its document is selected.

The selected branch is causal attention within the document then, and the window the last part of
it. With the same keys in both, each key is in one of two spans: near, inside the window, or far.
Far keys have one softmax, near keys have two, whose weights differ by a factor of the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def token_spans(document_start_ptr, row, num_tokens, longest, window):
    """First key of a query's document and of its window, and one past its last key, [BLOCK_M].

    document_start_ptr: int32 (S,) of a batch row; None for one document. A query sees at most
    `longest` keys. All are 0 past the queries.
    """
    row_mask = row < num_tokens
    first = tl.maximum(row + 1 - longest, 0)
    if document_start_ptr is not None:
        first = tl.maximum(first, tl.load(document_start_ptr + row, mask=row_mask, other=0))
    first = tl.where(row_mask, first, 0)
    window_first = tl.where(row_mask, tl.maximum(first, row + 1 - window), 0)
    return first, window_first, tl.where(row_mask, row + 1, 0)


@triton.jit
def block_span(first, row, num_tokens, num_blocks, COMPRESS: tl.constexpr, STRIDE: tl.constexpr):
    """First compressed block of the document of a query, and one past its last complete one."""
    first_block = tl.minimum(first // STRIDE, num_blocks)
    complete = tl.maximum(row + 1 - COMPRESS + STRIDE, 0) // STRIDE
    end_block = tl.maximum(tl.minimum(complete, num_blocks), first_block)
    return first_block, tl.where(row < num_tokens, end_block, first_block)


@triton.jit
def rows_of_keys(
    key, ends, is_compressed, longest, window,
    IS_NEAR: tl.constexpr, HAS_NEAR: tl.constexpr, COMPRESS: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """First query that sees each key of a span, and one past the last, [BLOCK_N] each.

    The same pairs as of `token_spans` and `block_span`, looked at from the keys. ends: of
    `ends_of_documents`. IS_NEAR: they see it in their window; else far from it, if there is a
    window with the same keys (HAS_NEAR), or at any distance.
    """
    if IS_NEAR:
        low, high = key, tl.minimum(key + window, key + longest)
    else:
        low = key + window if HAS_NEAR else key
        low = tl.where(is_compressed, key * STRIDE + COMPRESS - 1, low)
        high = tl.where(is_compressed, (key + 1) * STRIDE + longest - 1, key + longest)
    return low, tl.minimum(high, ends)


def ends_of_documents(document_start: Tensor) -> Tensor:
    """int32 (B, S): one past the last token of each token's document, and of the gap behind it.

    document_start: int32 (B, S), contiguous. Found on the device, by binary search.
    """
    return torch.searchsorted(document_start, document_start, right=True, out_int32=True)
