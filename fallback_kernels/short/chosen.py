"""Rows so short that they are attended whole, and blocks that a query did not choose masked.

A few words hold which blocks a query chose. In the backward, up to twice as many keys as a choice
has cost less than reading those of the choice from where they are; in the forward they do where a
call is small, and launches and latency are what it takes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.common.tiles import cdiv, next_power_of_2
from nsa_flex.fallback_kernels.short.config import chosen_tiles, plan_of

WORDS = 2
BITS = 32
MAX_BLOCKS = WORDS * BITS  # of a row
MASKED_TIMES = 2  # so many times the tokens of a choice
# As measured: of D 128 unions win in the forward; with more tiles of queries and longer rows also
# for 16 query heads a group, whose products fill up a tile.
MOST_TILES = 768
MOST_DIM = 64
MOST_DIM_ALONE = 128  # of query heads that share their keys with no other
UNION_GROUP = 16
MANY_TIMES = 1.5  # so many times the tokens of a choice
MOST_DIM_BACKWARD = 128


def longest_of(query: Tensor, document_start: Tensor | None, longest: int | None) -> int:
    """Tokens of the longest document that rows (B, Hq, S, D) may have; `longest`: as told."""
    tokens = query.shape[2]
    return tokens if document_start is None or longest is None else min(longest, tokens)


def is_masked(query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, longest: int) -> bool:
    """Whether the forward of queries (B, Hq, S, D) attends documents whole and masks by choice.

    longest: tokens of the longest document, S at most.
    """
    batch, heads, tokens, _ = query.shape
    tiles = chosen_tiles(query, key, value)
    group = heads // key.shape[1]
    beats_unions = (
        batch * heads * cdiv(tokens, tiles.block_m) <= MOST_TILES
        or longest <= MANY_TIMES * config.num_selected_tokens
        or group < UNION_GROUP
        or group != next_power_of_2(group)
    )
    most_dim = MOST_DIM_ALONE if group == 1 else MOST_DIM
    return beats_unions and _fits(query, value, config, tiles.block_n, most_dim, longest)


def is_masked_in_two(query: Tensor, value: Tensor) -> bool:
    """Whether a masked forward of documents has launches of its own for their first queries.

    These need no words and no range attention; of narrow heads that does not make up for it.
    """
    return max(query.shape[3], value.shape[3]) > MOST_DIM


def is_masked_backward(
    query: Tensor, key: Tensor, value: Tensor, config: NSAConfig, longest: int
) -> bool:
    """As `is_masked`, of the backward."""
    plan = plan_of(query, key, value)
    block_n = max(plan.bwd_dq.block_n, plan.bwd_dkdv.block_n)
    return _fits(query, value, config, block_n, MOST_DIM_BACKWARD, longest)


def masked_tokens(
    query: Tensor, key: Tensor, value: Tensor, document_start: Tensor | None, config: NSAConfig
) -> int:
    """Documents of up to so many tokens have a backward of their own in packed rows; 0: none.

    For rows that may have longer ones besides.
    """
    most = min(MASKED_TIMES * config.num_selected_tokens, MAX_BLOCKS * config.select_block_size)
    if document_start is None or not is_masked_backward(query, key, value, config, most):
        return 0
    return most


def _fits(
    query: Tensor, value: Tensor, config: NSAConfig, block_n: int, most_dim: int, longest: int
) -> bool:
    """Each tile of keys lies in one block, and two words hold which blocks a query chose."""
    size = config.select_block_size
    return (
        max(query.shape[3], value.shape[3]) <= most_dim
        and longest <= MASKED_TIMES * config.num_selected_tokens
        and longest <= MAX_BLOCKS * size
        and size % block_n == 0
    )


@triton.jit
def chosen_words(
    blocks_ptr, query, row_mask, first_block, NUM_SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr
):
    """A bit for each block that a query chose, int32 [BLOCK_M] each: blocks 0 to 31, and to 63.

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
    """Whether each row chose `block` of the row: bool [BLOCK_M]; the others as of `chosen_words`.

    Of another document than a row's it may say anything.
    """
    if first_block is not None:
        block = block - first_block
    return ((tl.where(block < 32, low, high) >> (block & 31)) & 1) != 0


def slots(config: NSAConfig) -> dict[str, int]:
    """Arguments of the kernels that read choices."""
    count = config.num_selected_blocks
    return {
        "SELECT": config.select_block_size,
        "NUM_SLOTS": count,
        "PADDED_SLOTS": next_power_of_2(count),
    }
