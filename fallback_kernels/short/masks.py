"""Masks of documents that are attended whole: which blocks a query selected, as bits of words."""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_flex.config import NSAConfig

MAX_BLOCKS = 64  # of a document: the bits of two words


@triton.jit
def selected_words(
    blocks_ptr, query, row_mask, first_block, NUM_SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr
):
    """A bit for each block that a query selected, int32 [BLOCK_M] each: blocks 0 to 31, and to 63.

    Counted from first_block [BLOCK_M], the first of a query's document; None: from the row's.
    blocks_ptr: int32 (S, n) of a KV head, -1 where a query has fewer.
    """
    slot = tl.arange(0, PADDED_SLOTS)
    mask = row_mask[:, None] & (slot < NUM_SLOTS)[None, :]
    block = tl.load(blocks_ptr + query[:, None] * NUM_SLOTS + slot[None, :], mask=mask, other=-1)
    if first_block is not None:
        block = tl.where(block >= 0, block - first_block[:, None], -1)
    bit = 1 << (block & 31)  # [BLOCK_M, PADDED_SLOTS]
    low = tl.sum(tl.where((block >= 0) & (block < 32), bit, 0), 1)
    high = tl.sum(tl.where((block >= 32) & (block < 64), bit, 0), 1)
    return low, high


@triton.jit
def has_block(low, high, first_block, block):
    """Whether each row selected `block` of the row: bool [BLOCK_M]; see `selected_words`.

    Undefined for a block of another document than the row's.
    """
    if first_block is not None:
        block = block - first_block
    return ((tl.where(block < 32, low, high) >> (block & 31)) & 1) != 0


def slots(config: NSAConfig) -> dict[str, int]:
    """Arguments of the kernels that read selected blocks."""
    count = config.num_selected_blocks
    return {
        "SELECT": config.select_block_size,
        "NUM_SLOTS": count,
    }
