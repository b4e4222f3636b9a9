"""What transformers' continuous batching passes to a patched decoder, read once for all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.paging import LayerPages, PagedBatch, Slots


class PagedCall(NamedTuple):
    """One forward pass of the engine.

    batch: whose tokens these are.
    layers: by layer index, its pages.
    """

    batch: PagedBatch
    layers: dict[int, LayerPages]


def read_paged_call(call: dict[str, Any]) -> PagedCall | None:
    """The engine's arguments among those of a decoder; None if it did not call.

    Raises:
        ValueError: the engine was set up without NSA's pages, or pads its batches.
    """
    cache = call.get("cache")
    if cache is None:
        return None
    pages = next(iter(cache.cache_allocators.values()))
    if not hasattr(pages, "lengths"):
        raise ValueError(
            f"the cache of continuous batching has a {type(pages).__name__}, which keeps no "
            "compressed rows: it was made before the model was patched; make a new manager "
            "(model.init_continuous_batching)"
        )
    lengths, cu_seqlens = pages.lengths(), call["cu_seq_lens_q"]
    num_tokens = call["position_ids"].shape[1]
    if sum(length.new for length in lengths) != num_tokens:
        raise ValueError(
            f"the batch holds {sum(length.new for length in lengths)} tokens, and {num_tokens} "
            "came: padded batches (CUDA graphs, compilation) are not supported in continuous "
            "batching with NSA"
        )
    num_keys = call["cu_seq_lens_k"][pages.layer_type]
    past = num_keys.diff() - cu_seqlens.diff()
    (written,), (blocks,) = call["write_index"], call["read_index"]
    between, unused = pages.block_physical_stride, pages.write_trash_index
    batch = PagedBatch.of(
        lengths,
        cu_seqlens,
        past,
        Slots(written // between, written % between),
        _table(blocks, num_keys.diff(), max(map(sum, lengths)), pages.tokens_per_page),
        unused // between,
        pages.nsa,
    )
    return PagedCall(batch, pages.layers)


def _table(blocks: Tensor, num_keys: Tensor, longest: int, page_size: int) -> Tensor | None:
    """Pages of each request, int64 (B, P), of the pages of all requests one after another."""
    if blocks.shape[0] == 0:
        return None
    num_pages = (num_keys + page_size - 1) // page_size
    first = num_pages.cumsum(0) - num_pages
    widest = -(-longest // page_size)
    index = first[:, None] + torch.arange(widest, device=blocks.device)
    return blocks[index.clamp(max=blocks.shape[0] - 1)]
