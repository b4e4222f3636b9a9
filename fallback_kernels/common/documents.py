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
def are_short(document_start_ptr, b, token, num_tokens, most):
    """Whether all tokens [BLOCK] are of documents of up to `most` tokens, or past the last.

    document_start_ptr: int32 (B, S), contiguous.
    """
    document_start_ptr += b.to(tl.int64) * num_tokens
    exists = (token >= 0) & (token < num_tokens)
    start = tl.load(document_start_ptr + token, mask=exists, other=0)
    long = is_long(document_start_ptr, start, most, num_tokens) & exists
    return tl.max(long.to(tl.int32), 0) == 0
