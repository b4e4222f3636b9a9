"""One new token of each of several requests, over their pages.

Reads the compressed rows of a request, the tokens of its chosen blocks and its window, through the
table of its pages. Constant shapes and no host sync, whatever the lengths are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from nsa_flex.attention import gated_sum
from nsa_flex.backends.dense import masked_attention
from nsa_flex.compression import Compression, compress_both
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend
from nsa_flex.installed import HAS_TRITON
from nsa_flex.paging.pages import LayerPages, Slots
from nsa_flex.selection import choose_blocks


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
    compressed = compress_both(compress_key, compress_value, *blocks)
    key, value = (x[:, :, 0] for x in compressed)  # [B, Hkv, D]
    ends = (positions + 1 >= block) & ((positions + 1) % stride == 0)
    row = Slots(torch.where(ends, last.page, unused), last.offset)
    pages.store_compressed(key, value, row)


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
    outputs = []
    if config.has("compressed"):
        ends = torch.arange(compressed_key.shape[2], device=table.device) * config.compress_stride
        visible = ends + config.compress_block_size - 1 <= positions[:, None]  # [B, N]
        compressed, _ = masked_attention(
            query, compressed_key, compressed_value, visible[:, None, None], scale
        )
        outputs.append(compressed)
    if config.has("selected"):
        blocks = choose_blocks(
            query,
            compressed_key,
            config=config,
            scale=scale,
            num_blocks=config.num_select_blocks(table.shape[1] * pages.page_size),
            positions=positions[:, None],
        )
        outputs.append(_selected(pages, query, blocks, table, positions, config, scale))
    if config.has("sliding"):
        outputs.append(_sliding(pages, query, table, positions, config, scale))
    return gated_sum(outputs, gates)


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


def _selected(
    pages: LayerPages,
    query: Tensor,
    blocks: Tensor,
    table: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """Attention to the tokens of the chosen blocks (B, Hkv, 1, n), gathered for each KV head."""
    size, kv_heads = config.select_block_size, blocks.shape[1]
    tokens = blocks[..., None] * size + torch.arange(size, device=table.device)
    visible = (blocks >= 0)[..., None] & (tokens <= positions[:, None, None, None, None])
    slots = pages.slots(table, tokens.flatten(2).clamp(min=0))  # [B, Hkv, n * l']
    head = torch.arange(kv_heads, device=table.device)[:, None]
    key, value = (
        x[slots.page, slots.offset, head].flatten(0, 1)[:, None]  # [B * Hkv, 1, n * l', D]
        for x in (pages.key, pages.value)
    )
    alone = query.unflatten(1, (kv_heads, -1)).flatten(0, 1)  # [B * Hkv, G, 1, D]
    mask = visible.flatten(2).flatten(0, 1)[:, None, None]
    out, _ = masked_attention(alone, key, value, mask, scale)
    return out.unflatten(0, (-1, kv_heads)).flatten(1, 2)  # [B, Hq, 1, Dv]


def _sliding(
    pages: LayerPages,
    query: Tensor,
    table: Tensor,
    positions: Tensor,
    config: NSAConfig,
    scale: float,
) -> Tensor:
    """Attention to the gathered tokens of the windows."""
    back = torch.arange(1 - config.window_size, 1, device=table.device)
    tokens = positions[:, None] + back  # [B, w]
    slots = pages.slots(table, tokens)
    key, value = (x[slots.page, slots.offset].transpose(1, 2) for x in (pages.key, pages.value))
    out, _ = masked_attention(query, key, value, (tokens >= 0)[:, None, None], scale)
    return out
