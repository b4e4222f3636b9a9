"""NSA's pages inside the memory of transformers' continuous batching.

The engine asks an allocator, by the type of a layer's attention, how many bytes a page takes and
where its tokens lie. For a patched model that allocator is `NSAPages`, whose pages hold compressed
rows too. So the engine's own bookkeeping covers them: what it plans memory for, shares between
requests with one prefix, copies for forks and moves to the host are whole pages.

Importing this module registers it. Models that are not patched get transformers' allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR
from transformers.generation.continuous_batching.cache_allocators import (
    FullAttentionCacheAllocator,
)

from nsa_flex.config import NSAConfig
from nsa_flex.paging import LayerPages, Length, rows_per_page


class NSAPages(FullAttentionCacheAllocator):
    """The pages of all layers of a patched model.

    Attributes:
        layers: by layer index, its `LayerPages`.
        batches: gives the inputs of the engine, which know the requests of a batch; its manager
            sets it.
    """

    def __init__(self, *, config: Any, page_size: int, layer_indices: list[int], **kwargs: Any):
        super().__init__(config=config, page_size=page_size, layer_indices=layer_indices, **kwargs)
        self.nsa = NSAConfig.from_dict(config.nsa_flex["config"])
        self.rows_of_page = rows_per_page(page_size, self.nsa)
        self.bytes_per_page = (
            self.rows_of_page * self.num_key_value_heads * self.head_dim
        ) * self.cache_dtype.itemsize
        self.bytes_per_block = self.bytes_per_page * self.pages_per_block
        # From a token's place in one block to the same in the next.
        self.block_physical_stride = self.rows_of_page * self.pages_per_block
        self.layers: dict[int, LayerPages] = {}
        self.batches: Callable[[], Any] | None = None

    def register_cache_tensor(
        self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
    ) -> None:
        """Carve the pages of each layer out of the engine's memory."""
        self.bytes_per_sector = bytes_per_sector
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = cache_tensor.view(self.cache_dtype).view(
            -1, self.num_key_value_heads, self.head_dim
        )
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, rows, pool)
        for index, layer_idx in enumerate(self.layer_indices):
            first = index * self.rows_of_page
            self.layers[layer_idx] = LayerPages.carve(
                rows, first, self.block_physical_stride, self.tokens_per_page, self.nsa
            )

    def lengths(self) -> tuple[Length, ...]:
        """Of each request of the batch that was prepared last, as the host knows them."""
        assert self.batches is not None
        batches = self.batches()
        if hasattr(batches, "io_pairs"):  # one is prepared while another runs
            batches = batches.io_pairs[batches.current_pair].host_io
        return tuple(
            Length(request.state.position_offset - request.query_length, request.query_length)
            for request in batches.requests_in_batch
        )

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The request's blocks in order: one number a page, where others read one a token."""
        num_pages = -(-(past_length + query_length) // self.tokens_per_page)
        return self.block_table[request_id][:num_pages]

    def fill_block_table(
        self, request_id: str, past_length: int, query_length: int, block_table: Tensor
    ) -> None:
        """Write the request's blocks into its row of the table, as their numbers."""
        blocks = torch.tensor(self.block_table[request_id], dtype=block_table.dtype)
        block_table[: len(blocks)].copy_(blocks, non_blocking=True)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refused: it gathers all tokens of all requests."""
        raise ValueError(
            "NSA reads its pages by itself: an attention layer that is not patched cannot run in "
            "the continuous batching of a patched model"
        )

    def get_cache_for_block_table(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Refused, likewise."""
        return self.update()


class _FullAttention(FullAttentionCacheAllocator):
    """What the engine makes for full attention: by the model's config, NSA's pages or its own."""

    def __new__(cls, *, config: Any, **kwargs: Any) -> Any:
        kind = NSAPages if hasattr(config, "nsa_flex") else FullAttentionCacheAllocator
        return kind(config=config, **kwargs)


ATTN_TYPE_TO_ALLOCATOR[FullAttentionCacheAllocator.layer_type] = _FullAttention
