"""The fold: the compressed branch as plain causal attention.

`t >= i*d + l - 1` is `(t - l + 1) // d >= i`. Leave out the first l - 1 queries, which see no
block, and call query t row `(t - l + 1) // d` of head `((t - l + 1) % d, h)`: the staircase
becomes the causal mask of an N x N problem with d times the heads, which every tuned kernel
knows. In memory ordered (B, S, H, D) the fold is a view.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.config import NSAConfig


def fold_queries(query: Tensor, num_blocks: int, config: NSAConfig) -> Tensor:
    """(B, H, S, D) -> (B, d * H, N, D); rows past the last token are zero."""
    return _fold(query, num_blocks, config.compress_block_size - 1, config.compress_stride)


def _fold(x: Tensor, num_rows: int, reach: int, stride: int) -> Tensor:
    rows = x.transpose(1, 2)  # [B, S, H, D]
    rows = F.pad(rows, (0, 0, 0, 0, 0, reach + num_rows * stride - rows.shape[1]))
    rows = rows[:, reach:].unflatten(1, (num_rows, stride))  # [B, N, d, H, D]
    return rows.flatten(2, 3).transpose(1, 2)


def unfold_outputs(folded: Tensor, num_tokens: int, config: NSAConfig, fill: float) -> Tensor:
    """(B, d * H, N, D) or (B, d * H, N) -> (B, H, S, ...), `fill` for the first l - 1 tokens.

    An operator of its own: fused into the merge of the branches, its index arithmetic makes
    Inductor of torch 2.11 raise CantSplit for batches of more than one row.
    """
    reach, stride = config.compress_block_size - 1, config.compress_stride
    return _unfold(folded, num_tokens, reach, stride, fill).transpose(1, 2)


@torch.library.custom_op("nsa_flex::unfold", mutates_args=())
def _unfold(folded: Tensor, num_tokens: int, reach: int, stride: int, fill: float) -> Tensor:
    rows = folded.transpose(1, 2).unflatten(2, (stride, -1)).flatten(1, 2)  # [B, N * d, H, ...]
    out = rows.new_full((rows.shape[0], num_tokens, *rows.shape[2:]), fill)
    seen = num_tokens - reach
    if seen > 0:
        out[:, reach:] = rows[:, :seen]
    return out


@_unfold.register_fake
def _(folded: Tensor, num_tokens: int, reach: int, stride: int, fill: float) -> Tensor:
    batch, heads, _, *rest = folded.shape
    return folded.new_empty((batch, num_tokens, heads // stride, *rest))


def _keep_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    folded, _, ctx.reach, ctx.stride, _ = inputs
    ctx.num_rows = folded.shape[2]


def _fold_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    assert grad.dim() == 4, "the log-sum-exp carries no gradient"
    folded = _fold(grad.transpose(1, 2), ctx.num_rows, ctx.reach, ctx.stride)
    return folded, None, None, None, None


_unfold.register_autograd(_fold_gradient, setup_context=_keep_shape)


def repeat_keys(key: Tensor, config: NSAConfig) -> Tensor:
    """(B, Hkv, N, D) -> (B, d * Hkv, N, D): head r * Hkv + h serves folded heads of residue r."""
    batch, heads, length, dim = key.shape
    repeated = key[:, None].expand(batch, config.compress_stride, heads, length, dim)
    return repeated.reshape(batch, config.compress_stride * heads, length, dim)
