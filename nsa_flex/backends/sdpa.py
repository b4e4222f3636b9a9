"""The compressed branch, folded, on cuDNN's fused attention through torch's SDPA operator."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.backends.fold import fold_queries, repeat_keys, unfold_outputs


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1 of one document whose queries are all the tokens; the log-sum-exp comes along."""
    config, query = branch.config, branch.query
    num_tokens = query.shape[2]
    side = max(branch.key.shape[2], 2)  # cuDNN has no backward for one row and one key
    folded = fold_queries(query, side, config)
    key, value = (
        repeat_keys(_lengthen(x, side), config).repeat_interleave(branch.group_size, 1)
        for x in (branch.key, branch.value)
    )
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        folded, key, value, None, True, 0.0, True, False, scale=branch.scale
    )
    lse = lse.reshape(folded.shape[:3]).detach()
    return (
        unfold_outputs(out, num_tokens, config, 0.0),
        unfold_outputs(lse, num_tokens, config, float("-inf")),
    )


def _lengthen(x: Tensor, length: int) -> Tensor:
    """Zero rows at the end of (B, H, N, D): keys behind every query that counts."""
    return F.pad(x, (0, 0, 0, length - x.shape[2]))
