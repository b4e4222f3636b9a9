"""What a call of the attention, and each branch of it, is asked to compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nsa_flex.backends.facts import FEW_QUERIES, Facts
from nsa_flex.config import NSAConfig
from nsa_flex.installed import HAS_TRITON


def is_whole(query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> bool:
    """Whether the queries are all the tokens there are."""
    if isinstance(query_offset, Tensor) or query.shape[2] != key.shape[2]:
        return False
    return query_offset is None or query_offset == 0


def known_offset(query: Tensor, key: Tensor, query_offset: int | Tensor | None) -> int | None:
    """Key index of query 0 where the host knows it; None where a tensor holds it."""
    if isinstance(query_offset, Tensor):
        return None
    return key.shape[2] - query.shape[2] if query_offset is None else query_offset


def query_positions(
    query: Tensor, key: Tensor, query_offset: int | Tensor | None
) -> tuple[Tensor | None, Tensor]:
    """Offsets int64 (B,), None where queries are all the tokens, and positions (1 or B, Sq)."""
    rows = torch.arange(query.shape[2], device=query.device)[None]
    if is_whole(query, key, query_offset):
        return None, rows
    if isinstance(query_offset, Tensor):
        offset = query_offset.long()
    else:
        first = key.shape[2] - query.shape[2] if query_offset is None else query_offset
        offset = torch.full((query.shape[0],), first, device=query.device)
    return offset, rows + offset[:, None]


class Inputs(NamedTuple):
    """The tensors of one call of `nsa_attention`, by name."""

    query: Tensor
    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor
    sliding_key: Tensor
    sliding_value: Tensor
    gates: Tensor

    def need_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self)

    def facts(
        self,
        config: NSAConfig,
        query_offset: int | Tensor | None,
        document_start: Tensor | None,
    ) -> Facts:
        """What dispatch looks at."""
        query, key = self.query, self.key
        whole = is_whole(query, key, query_offset)
        few = not whole and query.shape[2] <= FEW_QUERIES
        return Facts(
            device_type=query.device.type,
            dtype=query.dtype,
            head_dim=query.shape[-1],
            value_head_dim=self.value.shape[-1],
            num_query_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            num_queries=query.shape[2],
            whole=whole,
            documents=document_start is not None,
            needs_grad=self.need_grad(),
            select_block_size=config.select_block_size,
            num_selected_blocks=config.num_selected_blocks,
            branches=config.branches,
            selection=config.selection,
            known_offset=not isinstance(query_offset, Tensor),
            decode_problem=self._decode_problem(config) if few else None,
        )

    def seen(
        self, config: NSAConfig, query_offset: int | Tensor | None, needs_grad: bool
    ) -> Inputs:
        """Without the keys after the last query where kernels with gradients ask for that."""
        first = known_offset(self.query, self.key, query_offset)
        if first is None or not needs_grad:
            return self
        end = first + self.query.shape[2]
        if end >= self.key.shape[2]:
            return self
        num_blocks = config.num_compressed_blocks(end)
        key, value = self.key[:, :, :end], self.value[:, :, :end]
        shared = self.sliding_key is self.key and self.sliding_value is self.value
        return self._replace(
            key=key,
            value=value,
            compressed_key=self.compressed_key[:, :, :num_blocks],
            compressed_value=self.compressed_value[:, :, :num_blocks],
            sliding_key=key if shared else self.sliding_key[:, :, :end],
            sliding_value=value if shared else self.sliding_value[:, :, :end],
        )

    def _decode_problem(self, config: NSAConfig) -> str | None:
        """Why the decode kernels do not take these sizes; None if they do."""
        if self.sliding_key is not self.key or self.sliding_value is not self.value:
            return "the sliding branch has keys of its own"
        if not HAS_TRITON:
            return "triton is not installed"
        from nsa_flex.fallback_kernels.decode import checks

        sizes = (self.key.shape[1], self.key.shape[2], self.value.shape[3])
        return checks.sizes_unsupported_reason(self.query, *sizes, config)


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
