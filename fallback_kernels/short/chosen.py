"""Rows so short that they are attended whole, and blocks that a query did not choose masked.

A few words hold which blocks a query chose. Where a call is small, launches and latency are what
it takes: up to twice as many keys as a choice has cost less than reading those of the choice from
where they are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.ranges.config import RangesPlan

WORDS = 2
BITS = 32
MAX_BLOCKS = WORDS * BITS  # of a row
MASKED_TIMES = 2  # so many times the tokens of a choice
# As measured on an H200: with more tiles of queries, or of D 128, an index and lists win.
MOST_TILES = 768
MOST_DIM = 64


def is_masked(query: Tensor, key: Tensor, value: Tensor, config: NSAConfig) -> bool:
    """Whether queries (B, Hq, S, D) of one document a row attend it whole, masked by their choice.

    Each tile of keys lies in one block then.
    """
    batch, heads, tokens, _ = query.shape
    if max(query.shape[3], value.shape[3]) > MOST_DIM:
        return False
    size, tiles = config.select_block_size, RangesPlan.of(query, key, value).fwd
    return (
        tokens <= MASKED_TIMES * config.num_selected_tokens
        and tokens <= MAX_BLOCKS * size
        and size % tiles.block_n == 0
        and batch * heads * cdiv(tokens, tiles.block_m) <= MOST_TILES
    )


@triton.jit
def chosen_words(blocks_ptr, query, row_mask, NUM_SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr):
    """A bit for each block that a query chose, int32 [BLOCK_M] each: blocks 0 to 31, and to 63.

    blocks_ptr: int32 (S, n) of a KV head, -1 where a query has fewer.
    """
    slot = tl.arange(0, PADDED_SLOTS)
    mask = row_mask[:, None] & (slot < NUM_SLOTS)[None, :]
    block = tl.load(blocks_ptr + query[:, None] * NUM_SLOTS + slot[None, :], mask=mask, other=-1)
    bit = 1 << (block & 31)  # [BLOCK_M, PADDED_SLOTS]
    low = tl.sum(tl.where((block >= 0) & (block < 32), bit, 0), 1)
    high = tl.sum(tl.where(block >= 32, bit, 0), 1)
    return low, high


@triton.jit
def has_block(low, high, block):
    """Whether each row chose `block`: bool [BLOCK_M]."""
    return ((tl.where(block < 32, low, high) >> (block & 31)) & 1) != 0


def slots(config: NSAConfig) -> dict[str, int]:
    """Arguments of the kernels that read choices."""
    count = config.num_selected_blocks
    return {
        "SELECT": config.select_block_size,
        "NUM_SLOTS": count,
        "PADDED_SLOTS": next_power_of_2(count),
    }
