"""Rotary position embedding in the half-split convention of Llama."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped


def rotary_cos_sin(
    positions: Shaped[Tensor, "*rows S"], rotary_dim: int, theta: int | float
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of `position · theta^(-2i / rotary_dim)`, i < rotary_dim / 2.

    Computed from the positions each time, in float32: no table whose length bounds S.

    Args:
        positions: (S,) or (B, S), integer or floating point.
        rotary_dim: even number of leading features that rotate.
        theta: base of the wavelengths.

    Returns:
        cos and sin, float32, (1 or B, 1, S, rotary_dim / 2).

    Raises:
        ValueError: `rotary_dim` is odd or less than 2, or `positions` is not 1- or 2-dimensional.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be even and at least 2")
    if positions.dim() not in (1, 2):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}; expected (tokens,) or (batch, tokens)"
        )
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = theta ** (-exponents / rotary_dim)
    angles = positions.to(torch.float32)[..., None] * frequencies  # [(B,) S, rotary_dim / 2]
    angles = angles[:, None] if positions.dim() == 2 else angles[None, None]
    return angles.cos(), angles.sin()


def apply_rotary(
    x: Float[Tensor, "B H S D"], cos: Float[Tensor, "#B 1 S R"], sin: Float[Tensor, "#B 1 S R"]
) -> Float[Tensor, "B H S D"]:
    """Rotate feature i against feature i + rotary_dim/2; features past rotary_dim pass through.

    Args:
        x: (B, H, S, D), D >= rotary_dim.
        cos: (1 or B, 1, S, rotary_dim / 2), as from `rotary_cos_sin`; so is `sin`.

    Returns:
        The shape and dtype of `x`, in memory ordered (B, S, H, D), which the kernels like best;
        computed in float32 (float64 for float64).

    Raises:
        ValueError: D is less than rotary_dim.

    >>> cos, sin = rotary_cos_sin(torch.arange(4), rotary_dim=8, theta=10000.0)
    >>> apply_rotary(torch.ones(1, 2, 4, 16), cos, sin).shape
    torch.Size([1, 2, 4, 16])
    """
    half = cos.shape[-1]
    if x.shape[-1] < 2 * half:
        raise ValueError(f"x has head dim {x.shape[-1]}; rotary_dim={2 * half} must not exceed it")
    wide = torch.promote_types(x.dtype, torch.float32)
    x, cos, sin = x.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2)
    first, second = x[..., :half].to(wide), x[..., half : 2 * half].to(wide)
    turned = (first * cos - second * sin, second * cos + first * sin)
    rest = () if x.shape[-1] == 2 * half else (x[..., 2 * half :],)
    return torch.cat([*(part.to(x.dtype) for part in turned), *rest], dim=-1).transpose(1, 2)
