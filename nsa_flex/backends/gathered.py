"""Attention of few queries to the keys of their blocks, gathered: any device, differentiable.

Reads the keys of the blocks alone, where a mask would be over all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gathered_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Tensor,
    positions: Tensor,
    block_size: int,
    scale: float,
    slots: Tensor | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v over the tokens up to a query of its blocks; float32 or better.

    Args:
        query: (B, Hq, Sq, D), key: (B, Hkv, Sk, D), value: (B, Hkv, Sk, Dv).
        blocks: int (B, Hkv, Sq, n), no block twice, -1 for none; each query has one that it sees.
        positions: int (B or 1, Sq), index of each query among its row's tokens.
        slots: int (B, Sk), where in `key` and `value` a row's tokens are; None for in order.

    Returns:
        (B, Hq, Sq, Dv) in the dtype of `value`.
    """
    batch, heads, num_queries, _ = query.shape
    kv_heads, num_keys = key.shape[1:3]
    token = blocks[..., None] * block_size + torch.arange(block_size, device=query.device)
    visible = (blocks[..., None] >= 0) & (token <= positions[:, None, :, None, None])
    token = token.flatten(3).clamp(0, num_keys - 1).long()  # [B, Hkv, Sq, n * l']
    row = torch.arange(batch, device=query.device)[:, None, None, None]
    head = torch.arange(kv_heads, device=query.device)[:, None, None]
    slot = token if slots is None else slots[row, token]
    keys, values = key[row, head, slot], value[row, head, slot]  # [B, Hkv, Sq, n * l', D]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (kv_heads, -1)).transpose(2, 3)  # [B, Hkv, Sq, G, D]
    scores = grouped.to(dtype) @ keys.to(dtype).transpose(-1, -2) * scale
    scores = scores.masked_fill(~visible.flatten(3)[..., None, :], float("-inf"))
    output = scores.softmax(-1) @ values.to(dtype)
    return output.transpose(2, 3).reshape(batch, heads, num_queries, -1).to(value.dtype)
