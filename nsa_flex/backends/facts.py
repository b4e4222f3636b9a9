"""What dispatch looks at, and the names it speaks in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from nsa_flex.config import BRANCHES, BranchName, SelectionRule

BackendName = Literal["auto", "dense", "flex", "sdpa", "fa2", "triton"]
Backend = BackendName | Mapping[BranchName, BackendName]

# Why kernels that run a whole call do not take it, where a backend is named.
ALL_BRANCHES = "they run all branches together"

# Queries against a longer past: up to so many, tables cost more than they save.
FEW_QUERIES = 16


@dataclass(frozen=True)
class Facts:
    """All that dispatch looks at."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    value_head_dim: int
    num_query_heads: int
    num_kv_heads: int
    num_queries: int
    whole: bool  # the queries are all the tokens, from position 0
    documents: bool
    needs_grad: bool
    select_block_size: int = 64
    num_selected_blocks: int = 16
    branches: tuple[BranchName, ...] = BRANCHES
    selection: SelectionRule = "top_k"
    known_offset: bool = True  # the host knows where the queries are
    # Why the decode kernels do not take such sizes; None if they do.
    decode_problem: str | None = ALL_BRANCHES

    @property
    def few(self) -> bool:
        """Whether a few queries meet a longer past."""
        return not self.whole and self.num_queries <= FEW_QUERIES

    @property
    def half(self) -> bool:
        """Whether the dtype is one that flash kernels take."""
        return self.dtype in (torch.float16, torch.bfloat16)

    @property
    def group_size(self) -> int:
        """G, query heads per KV head."""
        return self.num_query_heads // self.num_kv_heads
