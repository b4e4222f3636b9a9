"""The same mask_mods, materialised: any device, differentiable, O(Sq * Sk) memory.

For training on CPUs, for debugging, and for few queries against many keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.masks import (
    compressed_mask_mod,
    materialize,
    selected_mask_mod,
    sliding_mask_mod,
)
from nsa_flex.masks.block_mask import MaskMod


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1 over materialised scores."""
    mod = compressed_mask_mod(
        branch.config, offset=branch.offset, document_start=branch.document_start
    )
    return _attend(branch, mod)


def selected(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 2 over materialised scores; the mask does not depend on the head inside a group."""
    assert branch.blocks is not None
    return _attend(branch, selected_mask_mod(branch.config, branch.blocks, offset=branch.offset))


def sliding(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 3 over materialised scores."""
    mod = sliding_mask_mod(
        branch.config, offset=branch.offset, document_start=branch.document_start
    )
    return _attend(branch, mod)


def _attend(branch: Branch, mask_mod: MaskMod) -> tuple[Tensor, Tensor]:
    batch, _, q_len, _ = branch.query.shape
    kv_heads, kv_len = branch.key.shape[1:3]
    per_batch = branch.offset is not None or branch.document_start is not None
    rows = batch if per_batch or branch.blocks is not None else 1
    heads = kv_heads if branch.blocks is not None else 1
    mask = materialize(mask_mod, rows, heads, q_len, kv_len, branch.query.device)
    return masked_attention(branch.query, branch.key, branch.value, mask, branch.scale)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Softmax attention under a boolean mask (B or 1, Hkv or 1, Sq, Sk); float32 softmax.

    Written out rather than left to `scaled_dot_product_attention`, which gives no log-sum-exp.
    Gradients of rows that see nothing are zero, not NaN.
    """
    kv_heads = key.shape[1]
    grouped = query.unflatten(1, (kv_heads, -1))  # [B, Hkv, G, Sq, D]
    precision = torch.promote_types(query.dtype, torch.float32)
    if query.dtype == torch.float16:  # whose products may be infinite before they are scaled
        grouped, key = grouped.to(precision), key.to(precision)
    scores = (grouped @ key[:, :, None].mT).to(precision) * scale  # [B, Hkv, G, Sq, Sk]
    hidden = ~mask[:, :, None]
    scores = scores.masked_fill(hidden, float("-inf"))
    blind = hidden.all(-1)  # [B, Hkv, 1, Sq]
    # A row of -inf has no softmax: give it zeros on the way in and take them out again.
    scores = scores.masked_fill(blind[..., None], 0.0)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp().masked_fill(blind[..., None], 0.0)
    out = weights.to(value.dtype) @ value[:, :, None]
    lse = lse.detach().float().masked_fill(blind, float("-inf"))
    return out.flatten(1, 2), lse.flatten(1, 2)
