"""What can be measured: each target makes its inputs, its implementations and its reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa_flex.bench.cases import patterns
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.measure import reference
from nsa_flex.compression import mean_of_blocks, split_segments
from nsa_flex.config import NSAConfig

# Arguments with one row a query, (B, Hq, S, ...); the others have one row a key, (B, Hkv, ...).
PER_QUERY = ("query", "gates", "compressed_out", "selected_out", "sliding_out")

Function = Callable[..., Tensor]
Tensors = dict[str, Tensor]


@dataclass
class Task:
    """Tensors of one case.

    Args:
        arguments: what the function takes, in its order; leaves that want gradients if trained.
        constants: what it needs besides.
        facts: columns of the row that only the tensors tell.
    """

    arguments: Tensors
    constants: Tensors = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Sampled queries of one batch row and one KV head with its G query heads."""

    batch: int
    head: int
    positions: Tensor  # int64 (R,)


class Target:
    """One entry of the registry; subclasses say what it is."""

    name: str
    trains = True  # whether there is a backward

    def implementations(self) -> tuple[str, ...]:
        """Names for `Case.implementation`, ours first."""
        raise NotImplementedError

    def prepare(self, case: Case, device: torch.device) -> Task:
        """Inputs, drawn from torch's seeded generators."""
        raise NotImplementedError

    def unsupported_reason(self, case: Case, memory: int) -> str | None:
        """Why this case cannot be run with so many bytes, as far as can be said in advance."""
        return None

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        """What is timed: arguments -> output; `compiler` is a backend of torch.compile."""
        raise NotImplementedError

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        """The output of a group's sampled queries, (G, R, Dv), in the arguments' dtype.

        arguments: those of the task cut to the group: (G, R, ...) or (S, ...).
        """
        raise NotImplementedError

    def clear(self, case: Case, task: Task, group: Group) -> Tensor:
        """bool (R,): queries whose output does not hang on a rounding of the scores."""
        return torch.ones_like(group.positions, dtype=torch.bool)


def compiled(function: Function, compiler: str) -> Function:
    """One graph for this shape alone.

    It hands its result on with the tokens first, as a model's reshape does: for a result of
    another order torch 2.11 lays the incoming gradient out anew, a copy that no model has.
    """

    def tokens_first(*arguments: Tensor) -> Tensor:
        return function(*arguments).transpose(1, 2)

    graph = torch.compile(tokens_first, fullgraph=True, dynamic=False, backend=compiler)
    return lambda *arguments: graph(*arguments).transpose(1, 2)


def normal(
    case: Case, heads: int, length: int, width: int, device: torch.device, *, grad: bool = True
) -> Tensor:
    """Normal (B, H, S, D) numbers in (B, S, H, D) memory, wanting gradients if trained."""
    shape = (case.batch, length, heads, width)
    x = torch.randn(shape, device=device, dtype=case.torch_dtype).transpose(1, 2)
    return x.requires_grad_(grad and case.train)


def uniform_gates(case: Case, device: torch.device) -> Tensor:
    """(B, Hq, S, 3) between 0 and 1."""
    x = normal(case, case.query_heads, case.seq_len, 3, device, grad=False).sigmoid()
    return x.requires_grad_(case.train)


def query_key_value(case: Case, device: torch.device) -> tuple[Tensors, dict[str, Any]]:
    """q, k, v of the case's pattern, and the overlap of the choices that they lead to."""
    key = normal(case, case.kv_heads, case.seq_len, case.head_dim, device)
    value = normal(case, case.kv_heads, case.seq_len, case.value_dim, device)
    if case.pattern == "overlap":
        query = patterns.overlapping_queries(case, key.detach()).requires_grad_(case.train)
    else:
        query = normal(case, case.query_heads, case.seq_len, case.head_dim, device)
    tensors = {"query": query, "key": key, "value": value}
    facts = {}
    if case.pattern == "overlap":
        share = patterns.sampled_overlap(query.detach(), key.detach(), case.config)
        facts["overlap"] = round(share, 4)
    return tensors, facts


def compress(x: Tensor, config: NSAConfig) -> Tensor:
    """Mean of each block in x's dtype, (B, H, S, D) -> (B, H, N, D)."""
    return mean_of_blocks(split_segments(x, config), config).to(x.dtype)


def scale_of(case: Case) -> float:
    """1 / sqrt(D)."""
    return case.head_dim**-0.5


def scores_of(case: Case, group: Group, query: Tensor, compressed_key: Tensor) -> Tensor:
    """Eq. 9 and 10 in float64 of a group's sampled queries.

    query: (B, Hq, S, D); compressed_key: (N, D) of the group's KV head.
    """
    heads = slice(group.head * case.group_size, (group.head + 1) * case.group_size)
    sampled = query[group.batch, heads, group.positions].double()
    positions, scale = group.positions, scale_of(case)
    return reference.scores(sampled, compressed_key.double(), positions, scale, case.config)


def scores_in_memory(case: Case, keys: int) -> int:
    """Bytes at the peak where all scores are kept: float32 or the like, twice, more if trained."""
    entries = case.batch * case.query_heads * case.seq_len * keys
    return entries * 4 * (4 if case.train else 2)


def too_large(case: Case, keys: int, memory: int) -> str | None:
    """Why an implementation that keeps all scores cannot run, or None."""
    needed = scores_in_memory(case, keys)
    if needed <= 0.9 * memory:
        return None
    return f"its scores take about {needed / 2**30:.0f} GiB of {memory / 2**30:.0f}"
