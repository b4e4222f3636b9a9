"""The pages of one layer: where tokens and compressed rows lie, written and read by position."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig


def rows_per_page(page_size: int, config: NSAConfig) -> int:
    """Rows (Hkv, D) of one layer's page: keys, values, compressed keys, compressed values.

    Blocks end d tokens apart, so page_size / d of them end in each page. There is no memory for
    what no branch reads.

    Raises:
        ValueError: `compress_stride` does not divide `page_size`.
    """
    if page_size % config.compress_stride:
        raise ValueError(
            f"page_size={page_size} must be a multiple of compress_stride="
            f"{config.compress_stride}: each page keeps the compressed rows that end in it"
        )
    return sum(_rows(page_size, config))


def _rows(page_size: int, config: NSAConfig) -> tuple[int, int, int, int]:
    """Of each of the four."""
    blocks = page_size // config.compress_stride
    return (
        *(page_size, page_size),
        blocks if config.compresses else 0,
        blocks if config.has("compressed") else 0,
    )


class LayerPages(NamedTuple):
    """Views of an engine's memory, pages of one layer.

    key: (pages, page_size, Hkv, D), value: (pages, page_size, Hkv, Dv).
    compressed_key: (pages, page_size / d, Hkv, D), compressed_value likewise: row r of a page is
        of the block whose last token is token d·(r + 1) - 1 of the page. No rows of what no
        branch reads.
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.key.shape[1]

    @property
    def tokens_per_row(self) -> int:
        """d, tokens between the ends of two blocks."""
        return self.page_size // self.compressed_key.shape[1]

    @classmethod
    def carve(
        cls, memory: Tensor, first_row: int, rows_between: int, page_size: int, config: NSAConfig
    ) -> LayerPages:
        """The pages of a layer in memory that holds those of all layers.

        Args:
            memory: (rows, Hkv, D), contiguous.
            first_row: where page 0 of the layer begins.
            rows_between: from one page of the layer to the next.
            page_size: tokens of a page.
            config: for d and the branches.
        """
        num_pages = memory.shape[0] // rows_between
        views, row = [], first_row
        for length in _rows(page_size, config):
            heads, dim = memory.shape[1:]
            views.append(
                memory.as_strided(
                    (num_pages, length, heads, dim),
                    (rows_between * heads * dim, heads * dim, dim, 1),
                    memory.storage_offset() + row * heads * dim,
                )
            )
            row += length
        return cls(*views)

    def store(self, key: Tensor, value: Tensor, slots: Slots) -> None:
        """Write tokens, in place.

        Args:
            key: (T, Hkv, D), value: (T, Hkv, Dv).
            slots: of each token.
        """
        self.key[slots.page, slots.offset] = key
        self.value[slots.page, slots.offset] = value

    def store_compressed(self, key: Tensor, value: Tensor | None, last: Slots) -> None:
        """Write compressed rows, in place.

        Args:
            key: (N, Hkv, D), value: (N, Hkv, Dv); None where no branch reads them.
            last: slot of the last token of each row's block.
        """
        row = last.offset // self.tokens_per_row
        self.compressed_key[last.page, row] = key
        if value is not None:
            self.compressed_value[last.page, row] = value

    def slots(self, table: Tensor, tokens: Tensor) -> Slots:
        """Where tokens lie.

        Args:
            table: int (B, P), pages of each request in order.
            tokens: int (B, ...), positions; those outside the table give any slot of it.
        """
        tokens = tokens.clamp(0, table.shape[1] * self.page_size - 1)
        page = table.gather(1, (tokens // self.page_size).flatten(1).to(torch.int64))
        return Slots(page.view(tokens.shape), tokens % self.page_size)

    def context(self, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the first `length` keys (1, Hkv, length, D) and values of one request.

        Args:
            table: int (P,).
        """
        return _join(self.key, table, length), _join(self.value, table, length)

    def compressed_context(self, table: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
        """Copies of the compressed rows of requests, block 0 first.

        Args:
            table: int (B, P).

        Returns:
            (B, Hkv, N, D) and (B, Hkv, N, Dv) of the N blocks that end in P pages.
        """
        # The first block ends with token l - 1: l/d - 1 rows of the first page are of no block.
        skipped = config.compress_block_size // config.compress_stride - 1
        key, value = (
            x[table].flatten(1, 2)[:, skipped:].transpose(1, 2)
            for x in (self.compressed_key, self.compressed_value)
        )
        return key, value


class Slots(NamedTuple):
    """Places in pages.

    page: int64, index of the page; offset: token of the page. Of one shape.
    """

    page: Tensor
    offset: Tensor


def _join(pages: Tensor, table: Tensor, length: int) -> Tensor:
    return pages.index_select(0, table).flatten(0, 1)[:length].transpose(0, 1)[None]
