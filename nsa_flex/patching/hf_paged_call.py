"""What transformers' continuous batching passes to a patched decoder, read once for all layers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.paging import LayerPages, Length, PagedBatch, Slots
from nsa_flex.patching.hf_versions import take_paged_cache


class PagedCall(NamedTuple):
    """One forward pass of the engine.

    batch: whose tokens these are.
    layers: by layer index, its pages.
    """

    batch: PagedBatch
    layers: dict[int, LayerPages]


def read_paged_call(call: dict[str, Any]) -> PagedCall | None:
    """The engine's arguments among those of a decoder; None if it did not call.

    Takes its cache out of them.

    Raises:
        ValueError: the engine was set up without NSA's pages.
    """
    cache = take_paged_cache(call)
    if cache is None:
        return None
    pages = next(iter(getattr(cache, "cache_allocators", {}).values()), cache)
    if getattr(pages, "batches", None) is None:
        raise ValueError(
            f"the cache of continuous batching has a {type(pages).__name__}, which keeps no "
            "compressed rows: it was made before the model was patched; make a new manager "
            "(model.init_continuous_batching)"
        )
    num_keys = call["cu_seq_lens_k"][pages.layer_type].diff()
    batch = (
        _any_batch(call, cache, pages, num_keys)
        if call.get("block_table") is None
        else _batch_of_steps(call, pages, num_keys)
    )
    return PagedCall(batch, pages.layers)


def _any_batch(call: dict[str, Any], cache: Any, pages: Any, num_keys: Tensor) -> PagedBatch:
    """A batch for which the engine lists where each token goes, and the pages of each request."""
    lengths, cu_seqlens = pages.lengths(), call["cu_seq_lens_q"]
    num_tokens = sum(length.new for length in lengths)
    (written,), (blocks,) = call["write_index"], call["read_index"]
    between = pages.block_physical_stride
    written = written[:num_tokens]
    width = table_width(lengths, pages, cache.max_blocks_per_request, cu_seqlens.device)
    return PagedBatch.of(
        lengths,
        cu_seqlens,
        num_keys - cu_seqlens.diff(),
        Slots(written // between, written % between),
        _table(blocks, num_keys, width, pages.tokens_per_page),
        pages.write_trash_index // between,
        pages.nsa,
    )


def _batch_of_steps(call: dict[str, Any], pages: Any, num_keys: Tensor) -> PagedBatch:
    """A batch of single tokens, for which the engine gives a table; it may be captured."""
    lengths, page_size = pages.lengths(), pages.tokens_per_page
    table = call["block_table"][pages.index].clamp(min=0).to(torch.int64)
    is_captured = table.is_cuda and torch.cuda.is_current_stream_capturing()
    table = table[:, : table_width(lengths, pages, table.shape[1], table.device)]
    new = call["cu_seq_lens_q"].diff()
    past = num_keys - new
    unused = pages.write_trash_index // pages.block_physical_stride
    page = table.gather(1, (past // page_size).to(torch.int64)[:, None])[:, 0]
    # Padding rows bring no token: what they are given goes to the page that nobody reads.
    written = Slots(torch.where(new > 0, page, unused), past % page_size)
    return PagedBatch.of_steps(lengths, past, written, table, unused, is_captured=is_captured)


def table_width(lengths: tuple[Length, ...], pages: Any, usual: int, device: torch.device) -> int:
    """P, pages of a table for these requests.

    Kernels and launch plans are made for a width. On CUDA it is the usual one, that of captured
    passes, unless a request needs more; elsewhere operations go over all of it, and it is what
    the longest request needs.
    """
    needed = -(-max(map(sum, lengths)) // pages.tokens_per_page)
    return max(needed, usual) if device.type == "cuda" else needed


def _table(blocks: Tensor, num_keys: Tensor, width: int, page_size: int) -> Tensor | None:
    """Pages of each request, int64 (B, width), of the pages of all requests one after another."""
    if blocks.shape[0] == 0:
        return None
    num_pages = (num_keys + page_size - 1) // page_size
    first = num_pages.cumsum(0) - num_pages
    index = first[:, None] + torch.arange(width, device=blocks.device)
    return blocks[index.clamp(max=blocks.shape[0] - 1)]
