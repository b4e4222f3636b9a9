"""The core where every query selects every block of its document: three launches in all.

No block is scored or chosen: the selected branch is causal attention within the document.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.fallback_kernels.short.bwd_dkdv import key_gradients
from nsa_flex.fallback_kernels.short.bwd_dq import query_gradients
from nsa_flex.fallback_kernels.short.fwd import ShortResults


def longest_short(config: NSAConfig) -> int:
    """n * l': tokens of the longest document whose queries have all blocks up to their own."""
    return config.num_selected_blocks * config.select_block_size


def selects_every_block(
    num_tokens: int, documents: bool, max_document_length: int | None, config: NSAConfig
) -> bool:
    """Whether each query has all blocks of its document, as far as the host knows.

    Args:
        num_tokens: of a row, which is one document unless there are `documents`.
        max_document_length: tokens of the longest document; None if nobody knows.
    """
    longest = num_tokens
    if documents and max_document_length is not None:
        longest = min(longest, max_document_length)
    return longest <= longest_short(config)


def every_block(
    query: Tensor, kv_heads: int, document_start: Tensor | None, config: NSAConfig
) -> Tensor:
    """int32 (B, Hkv, S, n): the blocks from a document's first to the own one, -1 behind them."""
    batch, _, tokens, _ = query.shape
    options: dict = {"dtype": torch.int32, "device": query.device}
    size, slots = config.select_block_size, config.num_selected_blocks
    own = torch.arange(tokens, **options)[None, :, None] // size  # [1, S, 1]
    block = torch.arange(slots, **options)[None, None]  # [1, 1, n]
    if document_start is not None:
        block = block + document_start[:, :, None] // size  # [B, S, n]
    blocks = torch.where(block <= own, block, -1)
    return blocks[:, None].expand(batch, kv_heads, tokens, slots).contiguous()


def short_backward(
    grad: Tensor,
    tensors: tuple[Tensor, ...],
    own: tuple[Tensor, Tensor] | None,
    results: ShortResults,
    document_start: Tensor | None,
    config: NSAConfig,
    scale: float,
    reach: int,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, compressed key and value, gates, and of `own` if given.

    Those of compressed keys and values are (B, Hkv, N, D), the others (B, S, H, D). Arguments as
    of `short_forward`; grad (B, Hq, S, Dv).
    """
    query, key, value, compressed_key, compressed_value, _ = tensors
    of_queries = query_gradients(grad, tensors, own, results, document_start, config, scale, reach)
    rest = (of_queries.stats, document_start, config, scale, reach)
    compressed = (compressed_key, compressed_value)
    of_keys = key_gradients(
        grad, query, (key, value), compressed, *rest, near=own is None, far=True
    )
    of_window: list[Tensor] = []
    if own is not None:
        of_window = key_gradients(grad, query, own, None, *rest, near=True, far=False)
    return (of_queries.query, *of_keys, of_queries.gates, *of_window)
