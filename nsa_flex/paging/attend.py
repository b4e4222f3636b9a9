"""NSA of the new tokens of a batch of requests whose past lies in pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_flex.attention import nsa_attention
from nsa_flex.compression import Compression, compress_what_is_read, what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.documents import DocumentLayout
from nsa_flex.paging.batch import PagedBatch, Run
from nsa_flex.paging.pages import LayerPages, Slots
from nsa_flex.paging.step import attend_step, compress_step


class PagedLayer(NamedTuple):
    """What a layer has of its own.

    pages: its pages.
    compress_key, compress_value: φ.
    backend: as of `nsa_attention`; of single tokens as of `attend_step`.
    """

    pages: LayerPages
    compress_key: Compression
    compress_value: Compression
    backend: Backend = "auto"

    @property
    def config(self) -> NSAConfig:
        """NSA's sizes."""
        return self.compress_key.config

    def compress(self, key: Tensor, value: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """φ of keys and of values (B, Hkv, S, D); None for what no branch reads."""
        return compress_what_is_read(self.compress_key, self.compress_value, key, value)

    def store_compressed(self, key: Tensor, value: Tensor | None, last: Slots) -> None:
        """Write what `compress` gave of the first blocks, whose last tokens' slots are `last`."""
        count = last.page.shape[0]
        if count:
            values = None if value is None else _rows(value)[:count]
            self.pages.store_compressed(_rows(key)[:count], values, last)


class NewTokens(NamedTuple):
    """One row of T tokens.

    query: (1, Hq, T, D), key: (1, Hkv, T, D), value: (1, Hkv, T, Dv), after position embedding.
    gates: (1, Hq, T, 3).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Tensor

    def of(self, run: Run) -> NewTokens:
        """The tokens of a run."""
        return NewTokens(*(x[:, :, run.tokens] for x in self))


def attend(layer: PagedLayer, new: NewTokens, batch: PagedBatch, scale: float) -> Tensor:
    """Store the new tokens in their pages, compress the blocks they complete, and attend.

    Of what lies in pages, a request that brings one token reads its compressed rows, its blocks
    and its window; one that brings more reads its own context.

    Args:
        layer: pages and φ.
        new: the tokens of all requests.
        batch: which is whose.
        scale: factor of query . key.

    Returns:
        (1, Hq, T, Dv) in the query's dtype, zeros for padding.
    """
    num_padding = new.key.shape[2] - batch.num_tokens
    if num_padding:
        new = NewTokens(*(x[:, :, : batch.num_tokens] for x in new))
    layer.pages.store(_rows(new.key), _rows(new.value), batch.written)
    attend_run = {"step": _attend_step, "chunk": _attend_chunk, "packed": _attend_packed}
    outputs = [attend_run[run.kind](layer, new.of(run), batch, run, scale) for run in batch.runs]
    if num_padding:
        batch_size, heads, _, dim = outputs[-1].shape
        outputs.append(outputs[-1].new_zeros((batch_size, heads, num_padding, dim)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _attend_step(
    layer: PagedLayer, new: NewTokens, batch: PagedBatch, run: Run, scale: float
) -> Tensor:
    """Requests of one token each: rows of a batch."""
    assert batch.table is not None
    table, positions = batch.table[run.requests], batch.past[run.requests]
    if batch.may_complete_block(run.requests, layer.config):
        phi = (layer.compress_key, layer.compress_value)
        last = Slots(*(x[run.tokens] for x in batch.written))
        compress_step(layer.pages, *phi, table, positions, last, batch.unused)
    query, gates = (x[0].transpose(0, 1)[:, :, None] for x in (new.query, new.gates))
    out = attend_step(
        layer.pages, query, gates, table, positions, layer.config, scale, layer.backend
    )
    return out[:, :, 0].transpose(0, 1)[None]  # [1, Hq, T, Dv]


def _attend_chunk(
    layer: PagedLayer, new: NewTokens, batch: PagedBatch, run: Run, scale: float
) -> Tensor:
    """Several tokens of one request, after those in its pages."""
    past, num_new = batch.lengths[run.requests.start]
    key, value, config = new.key, new.value, layer.config
    if past:
        assert batch.table is not None
        num_pages = -(-(past + num_new) // layer.pages.page_size)
        table = batch.table[run.requests.start, :num_pages]
        key, value = layer.pages.context(table, past + num_new)
    before, after = (config.num_compressed_blocks(n) for n in (past, past + num_new))
    compressed: Any = (key[:, :, :0], value[:, :, :0])
    if after > before and config.compresses:
        fresh = slice(before * config.compress_stride, None)
        compressed = layer.compress(key[:, :, fresh], value[:, :, fresh])
        first = before * config.compress_stride + config.compress_block_size - 1 - past
        last = Slots(*(x[run.tokens][first :: config.compress_stride] for x in batch.written))
        layer.store_compressed(compressed[0], compressed[1], last)
    if before:
        compressed = layer.pages.compressed_context(table[None], config)
    compressed = (None if x is None else x[:, :, :after] for x in compressed)
    return nsa_attention(
        *(new.query, key, value, *what_is_read(config, *compressed), new.gates),
        config=config,
        scale=scale,
        backend=layer.backend,
        query_offset=past,
    )


def _attend_packed(
    layer: PagedLayer, new: NewTokens, batch: PagedBatch, run: Run, scale: float
) -> Tensor:
    """NSA of whole prompts, packed."""
    layout = run.layout
    assert layout is not None
    query, key, value, gates = (layout.align(x) for x in new)
    rows, value_rows = layer.compress(key, value)
    if rows is not None:
        layer.store_compressed(rows, value_rows, _last_slots(layout, batch, run, layer.config))
    out = nsa_attention(
        *(query, key, value, rows, value_rows, gates),
        config=layer.config,
        scale=scale,
        backend=layer.backend,
        document_start=layout.start,
    )
    return layout.restore(out)


def _last_slots(layout: DocumentLayout, batch: PagedBatch, run: Run, config: NSAConfig) -> Slots:
    """The slot of the last token of each block of the aligned row, unused if it is not whole."""
    assert layout.start is not None
    source, start, target = layout.source[0], layout.start[0], layout.target[0]
    block, stride = config.compress_block_size, config.compress_stride
    count = config.num_compressed_blocks(source.shape[0])
    last = torch.arange(count, device=source.device) * stride + block - 1
    token = source[last]
    # Behind a document's end places repeat a token, whose own place is another.
    whole = (start[last] == start[last - block + 1]) & (target[token] == last)
    page, offset = (x[run.tokens][token] for x in batch.written)
    return Slots(torch.where(whole, page, batch.unused), offset)


def _rows(x: Tensor) -> Tensor:
    """(1, H, T, D) as (T, H, D)."""
    return x[0].transpose(0, 1)
