"""BlockMask tables from closed-form ranges of visible blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, overload

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128  # rows and columns of one block of the sliding and compressed masks


@overload
def cdiv(numerator: int, denominator: int) -> int: ...
@overload
def cdiv(numerator: Tensor, denominator: int) -> Tensor: ...
def cdiv(numerator: Tensor | int, denominator: int) -> Tensor | int:
    """Integer division rounded up; exact for negative numerators too."""
    return -(-numerator // denominator)


def num_tiles(num_tokens: int) -> int:
    """Tiles that cover so many tokens; traced, two at least, the second perhaps for no token.

    torch.compile makes a graph of its own for a table of size one.
    """
    tiles = cdiv(num_tokens, TILE)
    return max(2, tiles) if torch.compiler.is_compiling() else tiles


@torch.library.custom_op("nsa_flex::table", mutates_args=())
def _copy(x: Tensor) -> Tensor:
    return x.new_empty(x.shape).copy_(x)


@_copy.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def as_table(x: Tensor | None) -> Tensor | None:
    """`x` in memory of its own, for a mask_mod to capture; None stays None.

    Inductor's C++ template refuses a captured tensor that it could have fused, and a captured
    table made by a traced scatter reads as zeros: what comes out of a custom op has neither fault.
    """
    return None if x is None else _copy(x)


def token_table(x: Tensor | None, num_tokens: int) -> Tensor | None:
    """`as_table` of (B, S) `x`, lengthened with zeros to at least `num_tokens` tokens and a tile.

    Kernels evaluate a mask on whole tiles; what they read past the end is never used.
    """
    if x is None:
        return None
    return as_table(torch.nn.functional.pad(x, (0, cdiv(num_tokens, TILE) * TILE - x.shape[1])))


def index_range(length: int, device: torch.device) -> Tensor:
    """`torch.arange(length)`, opaque to the compiler on the CPU.

    Inductor's C++ code for a quotient of its own loop index is wrong in the vectorised tail (torch
    2.13: compiled `arange(150) // 16` ends in garbage); a quotient of loaded numbers is right.
    """
    indices = torch.arange(length, device=device)
    return _copy(indices) if device.type == "cpu" else indices


class BlockRanges(NamedTuple):
    """Blocks that each row of blocks needs: `low..high`, of which `full_low..full_high` whole.

    All are inclusive integer tensors `[..., rows]`; `high < low` means none. Blocks in the full
    range need no mask_mod; the full range lies inside the whole one wherever it is not empty.
    """

    low: Tensor
    high: Tensor
    full_low: Tensor
    full_high: Tensor


class BlockTables(NamedTuple):
    """Counts `[..., rows]` and indices `[..., rows, width]` in the form BlockMask takes, int32."""

    num_blocks: Tensor
    indices: Tensor
    full_num_blocks: Tensor
    full_indices: Tensor


def tables_from_ranges(ranges: BlockRanges, num_columns: int, width: int) -> BlockTables:
    """Lists the partial and the full blocks of each row; `width` bounds a row's block count.

    Both index tables have one shape and contiguous strides, which FlexAttention's lowering in
    torch 2.11 relies on.
    """
    low = ranges.low.clamp(min=0)
    high = ranges.high.clamp(max=num_columns - 1)
    full_low = torch.maximum(ranges.full_low, low)
    full_high = torch.minimum(ranges.full_high, high)
    num_full = (full_high - full_low + 1).clamp(min=0)
    num_all = (high - low + 1).clamp(min=0)

    slot = torch.arange(width, device=low.device)
    partial = low[..., None] + slot
    skip = (num_full > 0)[..., None] & (partial >= full_low[..., None])
    partial = torch.where(skip, partial + num_full[..., None], partial)
    full = full_low[..., None] + slot
    tables = BlockTables(
        (num_all - num_full).to(torch.int32),
        partial.clamp(0, num_columns - 1).to(torch.int32).contiguous(),
        num_full.to(torch.int32),
        full.clamp(0, num_columns - 1).to(torch.int32).contiguous(),
    )
    if low.shape[0] == 1:
        return tables
    # The kernels step from row to row of the batch by the head's stride. With one tile of queries
    # Inductor may give that dimension any stride; a new tensor has the one that counts.
    return BlockTables(*(_copy(table) for table in tables))


def build_block_mask(
    mask_mod: MaskMod,
    seq_lengths: tuple[int, int],
    block_size: tuple[int, int],
    kv_tables: BlockTables,
    q_tables: BlockTables | None,
) -> BlockMask:
    """A BlockMask from tables; without `q_tables` (the transposed ones) it serves the forward."""
    if q_tables is None:
        q_tables = BlockTables(None, None, None, None)  # type: ignore[arg-type]
    return BlockMask(
        seq_lengths=seq_lengths,
        kv_num_blocks=kv_tables.num_blocks,
        kv_indices=kv_tables.indices,
        full_kv_num_blocks=kv_tables.full_num_blocks,
        full_kv_indices=kv_tables.full_indices,
        q_num_blocks=q_tables.num_blocks,
        q_indices=q_tables.indices,
        full_q_num_blocks=q_tables.full_num_blocks,
        full_q_indices=q_tables.full_indices,
        BLOCK_SIZE=block_size,
        mask_mod=mask_mod,
    )


def table_width(needed: int, num_columns: int, device: torch.device) -> int:
    """Columns of an index table: the CPU lowering reads full width, CUDA what is listed."""
    if device.type == "cpu":
        return num_columns
    return min(needed, num_columns)


def tile_rows(num_tokens: int, device: torch.device) -> Tensor:
    """First token of each tile of rows, shaped [1, 1, tiles] to broadcast over batch and head."""
    return index_range(num_tiles(num_tokens), device)[None, None] * TILE


def offset_rows(offset: Tensor | None) -> Tensor | int:
    """`offset` (B,) shaped [B, 1, 1]; 0 where queries start at key 0."""
    return 0 if offset is None else offset[:, None, None]


def materialize(
    mask_mod: MaskMod,
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The boolean mask (batch, heads, q_len, kv_len) that `mask_mod` stands for.

    For the dense backend, pictures and tests: it takes batch * heads * q_len * kv_len bytes.
    Head or batch may be 1 where the mask does not depend on it.

    >>> materialize(lambda b, h, q, kv: q >= kv, 1, 1, 2, 2)[0, 0].tolist()
    [[True, False], [True, True]]
    """
    device = torch.device(device)
    b = index_range(batch, device)[:, None, None, None]
    h = index_range(heads, device)[None, :, None, None]
    q = index_range(q_len, device)[None, None, :, None]
    kv = index_range(kv_len, device)[None, None, None, :]
    return mask_mod(b, h, q, kv).expand(batch, heads, q_len, kv_len)
