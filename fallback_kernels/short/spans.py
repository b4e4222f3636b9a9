"""Which keys a query sees where every block of its document is selected.

The selected branch is causal attention within the document then, and the window the last part of
it. With the same keys in both, each key is in one of two spans: near, inside the window, or far.
Far keys have one softmax, near keys have two, whose weights differ by a factor of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_spans(document_start_ptr, row, num_tokens, reach, window):
    """First key of a query's document and of its window, and one past its last key, [BLOCK_M].

    document_start_ptr: int32 (S,) of a batch row; None for one document. A query sees `reach` keys
    at most: what follows the last document may be longer than any. All are 0 past the queries.
    """
    row_mask = row < num_tokens
    first = tl.maximum(row + 1 - reach, 0)
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
def ends_of_documents(document_start_ptr, first, last, reach, num_tokens, CHUNK: tl.constexpr):
    """One past the last token of the document that `first` lies in, and of that of `last`.

    At most `reach` tokens behind each of them, and in the row; with one document, the latter both.
    """
    last = tl.minimum(last, num_tokens)
    if document_start_ptr is None:
        first_end = tl.maximum(tl.minimum(last + reach, num_tokens), first)
        last_end = first_end
    else:
        first_end, last_end = first, last
        for chunk in range(0, reach, CHUNK):
            token = first + chunk + tl.arange(0, CHUNK)
            mask = (token < first + reach) & (token < num_tokens)
            start = tl.load(document_start_ptr + token, mask=mask, other=2147483647)
            first_end += tl.sum((start <= first).to(tl.int32), 0)
            token += last - first
            mask = (token < last + reach) & (token < num_tokens)
            start = tl.load(document_start_ptr + token, mask=mask, other=2147483647)
            last_end += tl.sum((start <= last).to(tl.int32), 0)
    return first_end, last_end
