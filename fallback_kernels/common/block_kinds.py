"""Which blocks of packed rows are short, for kernels that share the rows among them.

Documents begin at multiples of l' tokens, and what is short ends at one or with its document: what
holds for a block of l' tokens holds for each of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.launches import recordable
from nsa_flex.fallback_kernels.common.tiles import cdiv

# Bits of a block's kind. Short documents have the backward of `short/`.
SHORT_QUERIES = tl.constexpr(1)  # the first n * l' of a document: they select every block
UNMASKED_DOCUMENT = tl.constexpr(2)  # a short document all of whose queries are short
MASKED_DOCUMENT = tl.constexpr(4)  # a longer short document
SHORT_DOCUMENT = tl.constexpr(6)  # either
BLOCKS = 1024  # that the one CTA of `block_kinds_kernel` takes at a time
TOO_LONG = (
    "document_start holds a document that is longer than max_document_length: pass the length of "
    "the longest, or None"
)


def block_kinds(
    document_start: Tensor, config: NSAConfig, short_documents: int, longest: int | None = None
) -> Tensor:
    """Kinds of all blocks, uint8 (B, ceil(S / l')).

    Args:
        document_start: int32 (B, S), contiguous, multiples of l'.
        short_documents: documents of up to so many tokens are short; 0: none are.
        longest: tokens of the longest document, where kernels rely on it. A longer one raises an
            error on the device (an assertion that the host does not wait for).
    """
    batch, tokens = document_start.shape
    block_size = config.select_block_size
    kinds = document_start.new_empty((batch, cdiv(tokens, block_size)), dtype=torch.uint8)
    fits = None if longest is None else document_start.new_empty(1)
    block_kinds_kernel[(1,)](
        *(document_start, kinds, fits, tokens, kinds.numel(), config.num_selected_tokens),
        short_documents,
        tokens if longest is None else longest,
        BLOCK_SIZE=block_size,
        BLOCKS=BLOCKS,
    )
    if fits is not None:
        torch._assert_async(fits, TOO_LONG)
    return kinds


@triton.jit
def _is_longer(document_start_ptr, start, length, num_tokens):
    """Whether the documents that begin at `start` have more than `length` tokens."""
    after = start + length
    return tl.load(document_start_ptr + after, mask=after < num_tokens, other=-1) == start


@recordable
@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "short_queries", "short_documents", "longest"]
)
def block_kinds_kernel(
    document_start_ptr, kinds_ptr, fits_ptr,
    num_tokens, num_blocks, short_queries, short_documents, longest,
    BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One CTA: the kind of each block, and whether no document is longer than `longest`.

    One CTA needs neither zeros nor atomics for that flag, and a block takes it three loads.
    """
    blocks_per_row = tl.cdiv(num_tokens, BLOCK_SIZE)
    fits = tl.full([BLOCKS], 1, tl.int32)
    for first in range(0, num_blocks, BLOCKS):
        # [BLOCKS], as all vectors; those past the last block repeat it.
        block = tl.minimum(first + tl.arange(0, BLOCKS), num_blocks - 1)
        row_ptr = document_start_ptr + (block // blocks_per_row).to(tl.int64) * num_tokens
        token = block % blocks_per_row * BLOCK_SIZE
        start = tl.load(row_ptr + token)
        unmasked = tl.minimum(short_queries, short_documents)  # tokens of a document, at most
        is_masked = _is_longer(row_ptr, start, unmasked, num_tokens)
        is_long = _is_longer(row_ptr, start, short_documents, num_tokens)
        kind = tl.where(is_long, 0, tl.where(is_masked, MASKED_DOCUMENT, UNMASKED_DOCUMENT))
        kind += tl.where(token - start < short_queries, SHORT_QUERIES, 0)
        tl.store(kinds_ptr + block, kind.to(tl.uint8))
        fits = tl.where(token - start >= longest, 0, fits)
    if fits_ptr is not None:
        tl.store(fits_ptr, tl.min(fits, 0))


@triton.jit
def _load_kinds(kinds_ptr, b, token, num_tokens, outside, BLOCK_SIZE: tl.constexpr):
    """Kinds of the blocks of tokens, of any shape; `outside` of those that do not exist."""
    kinds_ptr += b.to(tl.int64) * tl.cdiv(num_tokens, BLOCK_SIZE)
    exists = (token >= 0) & (token < num_tokens)
    return tl.load(kinds_ptr + token // BLOCK_SIZE, mask=exists, other=outside)


@triton.jit
def has_kind(kinds_ptr, b, token, num_tokens, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Which tokens, of any shape, exist and lie in blocks of a kind."""
    return (_load_kinds(kinds_ptr, b, token, num_tokens, 0, BLOCK_SIZE) & KIND) != 0


@triton.jit
def all_have_kind(kinds_ptr, b, token, num_tokens, KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Whether all of the tokens [BLOCK] that exist lie in blocks of a kind."""
    of_kind = (_load_kinds(kinds_ptr, b, token, num_tokens, KIND, BLOCK_SIZE) & KIND) != 0
    return tl.min(of_kind.to(tl.int32), 0) != 0


@triton.jit
def span_has_kind(
    kinds_ptr, b, first, last, num_tokens,
    KIND: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Whether all tokens of [first, last] that exist lie in blocks of a kind; past the last token,
    whether it does.

    False, too, where the span is longer than BLOCKS - 1 blocks.
    """
    token = tl.minimum(first + tl.arange(0, BLOCKS) * BLOCK_SIZE, tl.minimum(last, num_tokens - 1))
    of_kind = all_have_kind(kinds_ptr, b, token, num_tokens, KIND, BLOCK_SIZE)
    return of_kind & (last - first <= (BLOCKS - 1) * BLOCK_SIZE)
