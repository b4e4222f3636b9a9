"""Sizes of tiles, and rows of dense tensors in and out of them."""

from __future__ import annotations

import triton
import triton.language as tl

MIN_DOT = 16  # columns that tl.dot wants at least


# Triton's cdiv and next_power_of_2 unwrap constexprs, 5 us a call: a launch asks dozens of times.


def cdiv(size: int, divisor: int) -> int:
    """`size / divisor`, rounded up."""
    return -(-size // divisor)


def next_power_of_2(size: int) -> int:
    """Least power of two that is not below `size`, which is positive."""
    return 1 << (size - 1).bit_length()


def round_up(size: int, multiple: int) -> int:
    """Least multiple of `multiple` that is not below `size`."""
    return cdiv(size, multiple) * multiple


def tile_width(size: int) -> int:
    """BLOCK_D of a tile that holds `size` columns: a power of two that tl.dot takes."""
    return max(MIN_DOT, next_power_of_2(size))


@triton.constexpr_function
def width_of(size):
    """`tile_width`, inside a kernel."""
    return max(MIN_DOT, 1 << (size - 1).bit_length())


@triton.constexpr_function
def precision_of(dtype):
    """`input_precision` of a product, inside a kernel: float32 is multiplied as such."""
    return "ieee" if dtype.primitive_bitwidth == 32 else "tf32"


@triton.jit
def store_zeros(ptr, size, BLOCK: tl.constexpr):
    """Sets a share of `size` numbers to 0, of which CTAs along the first axis have one each."""
    ctas = tl.num_programs(0)
    tiles = (size + BLOCK - 1) // BLOCK
    for turn in range((tiles + ctas - 1) // ctas):
        tile = (turn * ctas + tl.program_id(0)).to(tl.int64)
        offset = tile * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        tl.store(ptr + offset, tl.zeros([BLOCK], ptr.dtype.element_ty), mask=offset < size)


@triton.jit
def group_rows(
    base_ptr, batch, head, num_queries, kv_heads, GROUP: tl.constexpr, DIM: tl.constexpr
):
    """Where the rows of a KV head's group start in a dense (B, Sq, Hq, DIM) tensor."""
    return base_ptr + (batch * num_queries * kv_heads + head) * GROUP * DIM


@triton.jit
def load_rows(
    base_ptr,
    row,
    INT64_OFFSETS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEEP_IN_CACHE: tl.constexpr = False,
):
    """[BLOCK_M, BLOCK_D]: rows of a dense (rows, DIM) matrix, all of them real; 0 past DIM.

    INT64_OFFSETS: offsets need 64 bits, which costs registers.
    """
    if INT64_OFFSETS:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    pointer = base_ptr + (row * DIM)[:, None] + column[None, :]
    policy: tl.constexpr = "evict_last" if KEEP_IN_CACHE else ""
    if DIM == BLOCK_D:
        tile = tl.load(pointer, eviction_policy=policy)
    else:
        mask = (column < DIM)[None, :]
        tile = tl.load(pointer, mask=mask, other=0.0, eviction_policy=policy)
    return tile  # [BLOCK_M, BLOCK_D]


@triton.jit
def load_masked_rows(
    base_ptr,
    row,
    row_mask,
    INT64_OFFSETS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    READ_ONCE: tl.constexpr = False,
):
    """`load_rows`, with 0 for masked rows.

    READ_ONCE: not read again, as partial outputs are not; they should leave the cache first.
    """
    if INT64_OFFSETS:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    pointer = base_ptr + (row * DIM)[:, None] + column[None, :]
    mask = row_mask[:, None]
    if DIM != BLOCK_D:
        mask = mask & (column < DIM)[None, :]
    policy: tl.constexpr = "evict_first" if READ_ONCE else ""
    return tl.load(pointer, mask=mask, other=0.0, eviction_policy=policy)  # [BLOCK_M, BLOCK_D]


@triton.jit
def store_rows(
    base_ptr,
    row,
    tile,
    row_mask,
    INT64_OFFSETS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    READ_ONCE: tl.constexpr = False,
):
    """Inverse of `load_masked_rows`."""
    if INT64_OFFSETS:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK_D)
    pointer = base_ptr + (row * DIM)[:, None] + column[None, :]
    mask = row_mask[:, None]
    if DIM != BLOCK_D:
        mask = mask & (column < DIM)[None, :]
    tile = tile.to(base_ptr.dtype.element_ty)  # [BLOCK_M, BLOCK_D]
    tl.store(pointer, tile, mask=mask, eviction_policy="evict_first" if READ_ONCE else "")
