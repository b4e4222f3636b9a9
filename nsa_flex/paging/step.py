"""One new token of each of several requests, over their pages.

Kernels read the compressed rows of a request, the tokens of its selected blocks and its window
through the table of its pages; PyTorch operations copy the pages first. Constant shapes and no
host sync, whatever the lengths are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_flex.compression import Compression, compress_what_is_read
from nsa_flex.config import NSAConfig
from nsa_flex.decoding import Stored, step_by_operations
from nsa_flex.dispatch import Backend
from nsa_flex.installed import HAS_TRITON
from nsa_flex.paging.pages import LayerPages, Slots


def compress_step(
    pages: LayerPages,
    compress_key: Compression,
    compress_value: Compression,
    table: Tensor,
    positions: Tensor,
    last: Slots,
    unused: int,
) -> None:
    """Write the row of the block that ends at each request's new token, if one does, in place.

    Args:
        pages: of the layer, with the new tokens in it.
        compress_key, compress_value: φ.
        table: int64 (B, P).
        positions: int (B,), of the new tokens.
        last: their slots.
        unused: a page for the rows of requests where no block ends.
    """
    config = compress_key.config
    block, stride = config.compress_block_size, config.compress_stride
    back = torch.arange(1 - block, 1, device=positions.device)
    slots = pages.slots(table, positions[:, None] + back)  # [B, l]
    blocks = (x[slots.page, slots.offset].transpose(1, 2) for x in (pages.key, pages.value))
    key, value = compress_what_is_read(compress_key, compress_value, *blocks)
    assert key is not None
    ends = (positions + 1 >= block) & ((positions + 1) % stride == 0)
    row = Slots(torch.where(ends, last.page, unused), last.offset)
    pages.store_compressed(key[:, :, 0], None if value is None else value[:, :, 0], row)


def attend_step(
    pages: LayerPages,
    query: Tensor,
    gates: Tensor,
    table: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
    backend: Backend = "auto",
) -> Tensor:
    """NSA of one query a request at `positions`, the tokens before it and itself in pages.

    Args:
        pages: of the layer.
        query: (B, Hq, 1, D).
        gates: (B, Hq, 1, C), of the config's branches.
        table: int64 (B, P).
        positions: int (B,).
        config: NSA's sizes.
        scale: factor of query . key.
        backend: "auto" runs Triton kernels where they take the inputs, else PyTorch operations;
            any other PyTorch operations.

    Returns:
        (B, Hq, 1, Dv) in the query's dtype.
    """
    config.specialize()
    if backend == "auto" and unsupported_reason(pages, query, table, config) is None:
        from nsa_flex.fallback_kernels.decode import pages as kernels

        inputs = (query, *pages, gates, table, positions)
        return kernels.attend(*inputs, config=config, scale=scale)
    compressed_key, compressed_value = (
        F.pad(x, (0, 0, 0, 1)) if x.shape[2] == 0 else x
        for x in pages.compressed_context(table, config)
    )
    key, value = (x[table].flatten(1, 2).transpose(1, 2) for x in (pages.key, pages.value))
    stored = Stored(key, value, compressed_key, compressed_value, positions)
    out, _ = step_by_operations(query, stored, gates, config, scale)
    return out


def unsupported_reason(
    pages: LayerPages, query: Tensor, table: Tensor, config: NSAConfig
) -> str | None:
    """Why no Triton kernels take a step; None if they do. Arguments as of `attend_step`."""
    if query.device.type != "cuda":
        return f"the decode kernels need a CUDA device, got {query.device.type}"
    if not HAS_TRITON:
        return "triton is not installed"
    from nsa_flex.fallback_kernels.decode import pages as kernels

    return kernels.unsupported_reason(query, pages.key, pages.value, table, config)
