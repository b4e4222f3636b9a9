"""Which of a packed row's documents are long, for kernels that divide the documents among them.

Where a document begins says it all: the token so many places on is of the same one, or not.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class LeftOut(NamedTuple):
    """Documents of packed rows whose gradients others compute."""

    document_start: Tensor | None  # int32 (B, S), contiguous
    tokens: int  # of up to so many


NONE_LEFT_OUT = LeftOut(None, 0)


class Early(NamedTuple):
    """Queries of packed rows that others attend: the first of every document."""

    document_start: Tensor | None  # int32 (B, S), contiguous
    tokens: int  # so many of each


NONE_EARLY = Early(None, 0)


@triton.jit
def is_long(document_start_ptr, start, most, num_tokens):
    """Whether the documents that begin at `start` have more than `most` tokens; of any shape.

    document_start_ptr: int32 (S,) of a batch row, not descending.
    """
    after = start + most
    return tl.load(document_start_ptr + after, mask=after < num_tokens, other=-1) == start


@triton.jit
def are_long(document_start_ptr, b, token, num_tokens, most):
    """Which tokens [BLOCK] exist and are of documents of more than `most` tokens.

    document_start_ptr: int32 (B, S), contiguous.
    """
    document_start_ptr += b.to(tl.int64) * num_tokens
    exists = (token >= 0) & (token < num_tokens)
    start = tl.load(document_start_ptr + token, mask=exists, other=0)
    return is_long(document_start_ptr, start, most, num_tokens) & exists


@triton.jit
def are_short(document_start_ptr, b, token, num_tokens, most):
    """Whether all tokens [BLOCK] are of documents of up to `most` tokens, or past the last.

    document_start_ptr: int32 (B, S), contiguous.
    """
    long = are_long(document_start_ptr, b, token, num_tokens, most)
    return tl.max(long.to(tl.int32), 0) == 0


@triton.jit
def is_span_short(
    document_start_ptr, b, first, last, num_tokens, most, AROUND: tl.constexpr,
    PROBES: tl.constexpr,
):  # fmt: skip
    """Whether all tokens of [first, last], and AROUND more on either side, are of documents of up
    to `most` tokens. False, too, where PROBES tokens cannot tell.

    document_start_ptr: int32 (B, S), contiguous.
    """
    begin, end = tl.maximum(first - AROUND, 0), tl.minimum(last + AROUND, num_tokens - 1)
    # A longer document that holds neither end of the span holds one of any `most` tokens in turn.
    token = tl.minimum(begin + tl.arange(0, PROBES) * most, end)
    short = are_short(document_start_ptr, b, token, num_tokens, most)
    return short & (end - begin <= (PROBES - 1) * most)
