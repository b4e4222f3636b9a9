"""What a picture of a mask shows: visible pairs, the tiles that kernels work on, documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nsa_flex.config import NSAConfig
from nsa_flex.documents import align_packed
from nsa_flex.masks.block_mask import cdiv, materialize
from nsa_flex.masks.compressed import compressed_block_mask, folded_block_mask
from nsa_flex.masks.selected import selected_block_mask
from nsa_flex.masks.sliding import sliding_block_mask
from nsa_flex.selection import best_blocks

PictureName = Literal["compressed", "folded", "selected", "sliding"]
PICTURES: tuple[PictureName, ...] = get_args(PictureName)

CPU = torch.device("cpu")


class Cell(IntEnum):
    """What a cell of a picture, one or more (query, key) pairs, holds."""

    SKIPPED = 0  # tiles that no kernel touches
    HIDDEN = 1  # computed, then masked
    SOME = 2  # some pairs visible
    VISIBLE = 3  # all pairs visible, in tiles that the mask_mod is evaluated on
    FULL = 4  # all pairs visible, in tiles that need no mask_mod


@dataclass(frozen=True)
class Picture:
    """One mask, row 0 of the batch and head 0.

    Args:
        name: which one.
        title: what a row and a column are.
        visible: bool (rows, columns), padding rows all False.
        tiles: uint8 (tile rows, tile columns): 0 skipped, 1 partial, 2 full, as the BlockMask has.
        tile_size: rows and columns of one tile.
        row_starts, column_starts: first row and column of each document.
    """

    name: PictureName
    title: str
    visible: np.ndarray
    tiles: np.ndarray
    tile_size: tuple[int, int]
    row_starts: tuple[int, ...]
    column_starts: tuple[int, ...]

    def cells(self, rows_per_cell: int = 1, columns_per_cell: int = 1) -> np.ndarray:
        """`Cell` values, uint8 (ceil(rows / rows_per_cell), ceil(columns / columns_per_cell))."""
        rows, columns = self.visible.shape
        tiles = self.tiles.repeat(self.tile_size[0], 0).repeat(self.tile_size[1], 1)
        tiles = tiles[:rows, :columns]
        hidden = np.where(tiles > 0, np.uint8(Cell.HIDDEN), np.uint8(Cell.SKIPPED))
        shown = np.where(tiles == 2, np.uint8(Cell.FULL), np.uint8(Cell.VISIBLE))
        pairs = np.where(self.visible, shown, hidden)
        low = _reduce(np.minimum, pairs, rows_per_cell, columns_per_cell)
        high = _reduce(np.maximum, pairs, rows_per_cell, columns_per_cell)
        some = np.where(high >= Cell.VISIBLE, np.uint8(Cell.SOME), high)
        return np.where(low >= Cell.VISIBLE, low, some)


def _reduce(function: np.ufunc, x: np.ndarray, rows: int, columns: int) -> np.ndarray:
    by_row = function.reduceat(x, np.arange(0, x.shape[0], rows), axis=0)
    return function.reduceat(by_row, np.arange(0, x.shape[1], columns), axis=1)


@dataclass(frozen=True)
class Places:
    """Rows of the pictures: tokens, or the aligned places of packed documents.

    start: int32 (1, length), first place of each place's document; None for one document.
    real: bool (length,), False at places behind a document's end.
    """

    length: int
    start: Tensor | None
    real: np.ndarray

    @classmethod
    def of(cls, config: NSAConfig, seq_len: int, documents: Sequence[int] | None) -> Places:
        """Places of `seq_len` tokens, aligned as `align_packed` does if there are documents."""
        if documents is None:
            return cls(seq_len, None, np.ones(seq_len, dtype=bool))
        lengths = torch.tensor(documents)
        layout = align_packed(torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), seq_len, config)
        assert layout.start is not None
        size = config.select_block_size
        length = sum(cdiv(document, size) * size for document in documents)
        real = np.zeros(length, dtype=bool)
        real[layout.target[0].numpy()] = True
        return cls(length, layout.start[:, :length], real)

    @property
    def document_starts(self) -> tuple[int, ...]:
        """First place of each document."""
        return (0,) if self.start is None else tuple(self.start[0].unique().tolist())


def random_blocks(config: NSAConfig, places: Places, seed: int) -> Tensor:
    """A choice of blocks from uniformly random scores, int32 (1, 1, length, n)."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, places.length, config.num_select_blocks(places.length))
    scores = torch.rand(shape, generator=generator)
    return best_blocks(scores, torch.arange(places.length)[None], places.start, config)


def make_picture(
    name: PictureName, config: NSAConfig, places: Places, blocks: Tensor | None = None
) -> Picture:
    """The picture of one mask; `blocks` int32 (1, 1, length, n) is for the selected branch."""
    length, start = places.length, places.start
    num_blocks = max(1, config.num_compressed_blocks(length))
    real, row_starts = places.real, places.document_starts
    token_starts = row_starts
    block_starts = tuple(first // config.compress_stride for first in row_starts)
    if name == "compressed":
        title = f"query x compressed block of {config.compress_block_size} tokens"
        options = {"document_start": start, "backward": False}
        mask = compressed_block_mask(config, length, num_blocks, CPU, **options)  # type: ignore[arg-type]
        starts = row_starts, block_starts
    elif name == "folded":
        title = f"row of {config.compress_stride} queries x compressed block"
        mask = folded_block_mask(config, num_blocks, 1, CPU, document_start=start, backward=False)
        # Row j of residue 0 is query j * d + l - 1.
        reach, stride = config.compress_block_size - 1, config.compress_stride
        rows = np.arange(num_blocks) * stride + reach
        real = np.append(real, False)[np.minimum(rows, length)]
        starts = tuple(cdiv(max(0, t - reach), stride) for t in row_starts), block_starts
    elif name == "selected":
        assert blocks is not None
        title = f"query x key, {config.num_selected_blocks} blocks of {config.select_block_size}"
        mask = selected_block_mask(config, blocks, length, backward=False)
        starts = row_starts, token_starts
    else:
        title = f"query x key, window of {config.window_size}"
        mask = sliding_block_mask(
            config, length, length, CPU, document_start=start, backward=False
        )
        starts = row_starts, token_starts
    q_len, kv_len = mask.seq_lengths
    visible = materialize(mask.mask_mod, 1, 1, q_len, kv_len)[0, 0].numpy() & real[:, None]
    tiles = tile_kinds(mask)
    return Picture(name, title, visible, tiles, mask.BLOCK_SIZE, *starts)


def tile_kinds(mask: BlockMask) -> np.ndarray:
    """Tables of a BlockMask as uint8 (tile rows, tile columns): 0 skipped, 1 partial, 2 full."""
    columns = cdiv(mask.seq_lengths[1], mask.BLOCK_SIZE[1])
    kinds = np.zeros((mask.kv_num_blocks.shape[-1], columns), dtype=np.uint8)
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    tables = (
        (1, mask.kv_num_blocks, mask.kv_indices),
        (2, mask.full_kv_num_blocks, mask.full_kv_indices),
    )
    for kind, counts, indices in tables:
        listed = np.arange(indices.shape[-1]) < counts[0, 0].numpy()[:, None]
        row, slot = np.nonzero(listed)
        kinds[row, indices[0, 0].numpy()[row, slot]] = kind
    return kinds
