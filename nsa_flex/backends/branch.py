"""What one branch of the attention is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig


@dataclass(frozen=True)
class Branch:
    """Inputs of one branch, validated before they get here.

    Args:
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D), or (B, Hkv, N, D) for the compressed branch.
        value: (B, Hkv, Sk or N, Dv).
        config: block sizes and window.
        scale: factor of query . key before the softmax.
        offset: int64 (B,), key index of query 0; None where the queries are all the tokens.
        known_offset: the same where it is one number that the host knows; None where a tensor
            holds it.
        document_start: int (B, Sq), first key of each query's document; None for one document.
        blocks: int32 (B, Hkv, Sq, n), selected branch only.
        need_lse: whether the log-sum-exp is wanted.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    config: NSAConfig
    scale: float
    offset: Tensor | None = None
    known_offset: int | None = 0
    document_start: Tensor | None = None
    blocks: Tensor | None = None
    need_lse: bool = False

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        inputs = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.query.shape[1] // self.key.shape[1]
