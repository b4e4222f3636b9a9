"""The compressed branch, folded, on cuDNN's fused attention through torch's SDPA operator."""

from __future__ import annotations

import torch
from torch import Tensor

from nsa_flex.backends.branch import Branch
from nsa_flex.backends.fold import fold_queries, repeat_keys, unfold_outputs


def compressed(branch: Branch) -> tuple[Tensor, Tensor]:
    """Branch 1 of one document whose queries are all the tokens; the log-sum-exp comes along."""
    config, query = branch.config, branch.query
    num_tokens, num_blocks = query.shape[2], branch.key.shape[2]
    folded = fold_queries(query, num_blocks, config)
    group = branch.group_size
    key, value = (
        repeat_keys(x, config).repeat_interleave(group, 1) for x in (branch.key, branch.value)
    )
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        folded, key, value, None, True, 0.0, True, False, scale=branch.scale
    )
    lse = lse.reshape(folded.shape[:3]).detach()
    return (
        unfold_outputs(out, num_tokens, config, 0.0),
        unfold_outputs(lse, num_tokens, config, float("-inf")),
    )
