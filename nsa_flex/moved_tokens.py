"""Moving tokens by a gather whose backward is a gather too.

The backward of an indexing operation adds into zeros, with atomics, since an index may occur
twice. Where tokens only change their places, both directions are known beforehand: gradients go
back as one read and one write, in an order that does not vary, and Inductor fuses either
direction with what stands before it (a rotary embedding, for example).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def move_tokens(x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor | None) -> Tensor:
    """The tokens of x at `index`.

    Args:
        x: (B, H, S, D), any strides.
        index: int64 (B', S'), flat indices b * S + s.
        inverse: int64 (B, S), for each token of x its flat index b' * S' + s' in the output.
        unused: bool (B, S), tokens of x that `inverse` does not speak for: they get gradient 0.

    Returns:
        (B', H, S', D), in memory ordered (B', S', H, D). Where `index` names a token more than
        once, its gradient is that of the occurrence in `inverse` alone.
    """
    moved: Tensor = _MovedTokens.apply(x, index, inverse, unused)
    return moved


class _MovedTokens(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor | None) -> Tensor:
        tokens = x.transpose(1, 2).flatten(0, 1)  # [B * S, H, D]
        moved = tokens.index_select(0, index.flatten())
        return moved.unflatten(0, index.shape).transpose(1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        index, inverse, unused = ctx.saved_tensors
        moved = move_tokens(grad, inverse, index, None)
        if unused is not None:
            moved = moved.masked_fill(unused[:, None, :, None], 0)
        return moved, None, None, None
