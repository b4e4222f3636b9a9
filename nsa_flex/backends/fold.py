"""The fold: the compressed branch as plain causal attention.

`t >= i*d + l - 1` is `(t - l + 1) // d >= i`. Leave out the first l - 1 queries, which see no
block, and call query t row `(t - l + 1) // d` of head `((t - l + 1) % d, h)`: the staircase
becomes the causal mask of an N x N problem with d times the heads, which every tuned kernel
knows. In memory ordered (B, S, H, D) the fold is a view.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nsa_flex.config import NSAConfig


def fold_queries(query: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """(B, H, S, D) -> (B, d * H, N, D); rows past the last token are zero."""
    reach, stride = config.compress_block_size - 1, config.compress_stride
    rows = query.transpose(1, 2)  # [B, S, H, D]
    rows = F.pad(rows, (0, 0, 0, 0, 0, reach + num_blocks * stride - rows.shape[1]))
    rows = rows[:, reach:].unflatten(1, (num_blocks, stride))  # [B, N, d, H, D]
    return rows.flatten(2, 3).transpose(1, 2)


def unfold_outputs(folded: Tensor, num_tokens: int, config: NSAConfig, fill: float) -> Tensor:
    """(B, d * H, N, ...) -> (B, H, S, ...), with `fill` for the first l - 1 tokens."""
    reach, stride = config.compress_block_size - 1, config.compress_stride
    trailing = [0, 0] * (folded.dim() - 3)
    rows = folded.transpose(1, 2).unflatten(2, (stride, -1))  # [B, N, d, H, ...]
    rows = rows.flatten(1, 2)
    rows = F.pad(rows, (*trailing, 0, 0, reach, 0), value=fill)
    return rows[:, :num_tokens].transpose(1, 2)


def repeat_keys(key: Tensor, config: NSAConfig) -> Tensor:
    """(B, Hkv, N, D) -> (B, d * Hkv, N, D): head r * Hkv + h serves folded heads of residue r."""
    batch, heads, length, dim = key.shape
    repeated = key[:, None].expand(batch, config.compress_stride, heads, length, dim)
    return repeated.reshape(batch, config.compress_stride * heads, length, dim)
