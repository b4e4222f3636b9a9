"""φ by the formulas of `Compression`'s docstring, one block after the other, in float64 NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from nsa_flex.compression import Compression


def by_definition(compress: Compression, x: Tensor) -> np.ndarray:
    """The formulas of the class docstring, one block after the other, in float64."""
    x = x.detach().double().numpy()
    weights = {name: p.detach().double().cpu().numpy() for name, p in compress.named_parameters()}
    block, stride = compress.config.compress_block_size, compress.config.compress_stride
    starts = range(0, x.shape[2] - block + 1, stride)
    return np.stack([one_block(weights, x[:, :, i : i + block]) for i in starts], axis=2)


def one_block(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """(B, H, l, D) -> (B, H, D)."""
    if "logits" in weights:
        odds = np.exp(weights["logits"])
        return np.einsum("bhpd,hp->bhd", tokens, odds / odds.sum(-1, keepdims=True))
    if "weight" in weights:
        return np.einsum("bhpd,hpde->bhe", tokens, weights["weight"])
    if "position" in weights:
        z = tokens + weights["position"]
        out = z.mean(2)
        for sign, inner, outer in zip(
            (1, -1), weights["hidden_weight"], weights["output_weight"], strict=True
        ):
            hidden = torch.from_numpy(np.einsum("bhpd,pde->bhe", z, inner))
            out = out + sign * nn.functional.gelu(hidden).numpy() @ outer
        return out
    return tokens.mean(2)
