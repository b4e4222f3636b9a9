"""What lies between the branches: compression, choice of blocks, gated sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import functional_call

from nsa_flex.attention import gated_sum
from nsa_flex.bench.cases.case import Case
from nsa_flex.bench.cases.targets import (
    Function,
    Group,
    Target,
    Task,
    Tensors,
    compiled,
    compress,
    normal,
    query_key_value,
    scale_of,
    scores_of,
    uniform_gates,
)
from nsa_flex.bench.measure import reference
from nsa_flex.compression import Compression
from nsa_flex.selection import choose_blocks

if TYPE_CHECKING:
    from nsa_flex.config import NSAConfig


class Choice(Target):
    """Eq. 9, 10 and the best n, given the compressed branch's log-sum-exp.

    * auto: what `choose_blocks` takes, the fused kernels on CUDA. operations: PyTorch's.
      Compiled; auto-eager is not.
    """

    name = "choice"
    trains = False

    def implementations(self) -> tuple[str, ...]:
        return ("auto", "operations", "auto-eager")

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        query, key = (tensors[name].detach() for name in ("query", "key"))
        compressed_key = compress(key, case.config)
        constants = {"lse": log_sum_exp(case, query, compressed_key)}
        return Task({"query": query, "compressed_key": compressed_key}, constants, facts)

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        config, scale, lse = case.config, scale_of(case), task.constants["lse"]
        num_blocks = config.num_select_blocks(case.seq_len)
        positions = torch.arange(case.seq_len, device=lse.device)[None]

        def fused(query: Tensor, compressed_key: Tensor) -> Tensor:
            return choose_blocks(
                query,
                compressed_key,
                config=config,
                scale=scale,
                num_blocks=num_blocks,
                positions=positions,
                lse=lse,
            )

        def operations(query: Tensor, compressed_key: Tensor) -> Tensor:
            return torch.ops.nsa_flex.choose_blocks(
                query, compressed_key, positions, None, scale, num_blocks, config.counts
            )

        if case.implementation == "auto-eager":
            return fused
        return compiled(operations if case.implementation == "operations" else fused, compiler)

    def excess(self, case: Case, task: Task, group: Group, chosen: Tensor) -> float:
        """By what share the best block left out outscores the worst taken, in float64; 0 if none.

        chosen: int (R, n) of the group's queries.
        """
        query, key = task.arguments.values()
        scored = scores_of(case, group, query, key[group.batch, group.head])
        wanted, _ = reference.choice(scored, group.positions, case.config)
        taken, right = (_membership(x, scored.shape[1]) for x in (chosen.long(), wanted))
        if not torch.equal(taken.sum(-1), right.sum(-1)):
            return torch.inf
        missed = scored.masked_fill(~(right & ~taken), -torch.inf).amax(-1)
        extra = scored.masked_fill(~(taken & ~right), torch.inf).amin(-1)
        excess = ((missed - extra) / missed).masked_fill(torch.isinf(missed), 0.0)
        return excess.max().item()


def _membership(blocks: Tensor, num_blocks: int) -> Tensor:
    """bool (R, num_blocks) of the blocks (R, n), -1 for none."""
    return (blocks[..., None] == torch.arange(num_blocks, device=blocks.device)).any(-2)


def log_sum_exp(case: Case, query: Tensor, compressed_key: Tensor) -> Tensor:
    """float32 (B, Hq, S) of the compressed branch, a head and some thousand queries at a time."""
    lse = torch.empty(query.shape[:3], device=query.device)
    for head in range(case.query_heads):
        key = compressed_key[:, head // case.group_size].float()
        for start in range(0, case.seq_len, 4096):
            span = slice(start, start + 4096)
            positions = torch.arange(case.seq_len, device=query.device)[span]
            seen = reference.compressed_seen(key.shape[1], positions, case.config)
            scores = query[:, head, span].float() @ key.mT * scale_of(case)
            lse[:, head, span] = scores.masked_fill(~seen, -torch.inf).logsumexp(-1)
    return lse


class Merge(Target):
    """The gated sum, by the operator or (expression) left to the compiler; auto-eager: neither."""

    name = "merge"

    def implementations(self) -> tuple[str, ...]:
        return ("auto", "expression", "auto-eager")

    def prepare(self, case: Case, device: torch.device) -> Task:
        outs = {
            f"{branch}_out": normal(case, case.query_heads, case.seq_len, case.value_dim, device)
            for branch in ("compressed", "selected", "sliding")
        }
        return Task({**outs, "gates": uniform_gates(case, device)})

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        def auto(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
            return gated_sum([compressed, selected, sliding], gates)

        if case.implementation == "auto-eager":
            return auto
        return compiled(_expression if case.implementation == "expression" else auto, compiler)

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        return _expression(*arguments.values())


def _expression(compressed: Tensor, selected: Tensor, sliding: Tensor, gates: Tensor) -> Tensor:
    gate = gates.to(torch.promote_types(gates.dtype, torch.float32))
    total = compressed * gate[..., 0, None]
    total = total + selected * gate[..., 1, None] + sliding * gate[..., 2, None]
    return total.to(compressed.dtype)


class CompressionTarget(Target):
    """φ of the keys, of the kind that the case's config names; parameters train along."""

    name = "compression"

    def implementations(self) -> tuple[str, ...]:
        return ("compiled", "eager")

    def prepare(self, case: Case, device: torch.device) -> Task:
        module = Compression(
            case.config, case.kv_heads, case.head_dim, device=device, dtype=case.torch_dtype
        )
        with torch.no_grad():  # at its start mlp is the mean: its products would go unchecked
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=parameter.shape[-1] ** -1.0)
        weights = {
            name: parameter.detach().requires_grad_(case.train)
            for name, parameter in module.named_parameters()
        }
        return Task(
            {"key": normal(case, case.kv_heads, case.seq_len, case.head_dim, device), **weights}
        )

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        function = module_function(case, list(task.arguments)[1:])
        return function if case.implementation == "eager" else compiled(function, compiler)


def module_function(case: Case, names: list[str]) -> Function:
    """`Compression` as a function of its input and of its parameters."""
    with torch.device("meta"):
        module = Compression(case.config, case.kv_heads, case.head_dim)

    def compression(key: Tensor, *weights: Tensor) -> Tensor:
        return functional_call(module, dict(zip(names, weights, strict=True)), (key,))

    return compression


def compression_by_definition(
    key: Tensor, weights: dict[str, Tensor], config: NSAConfig
) -> Tensor:
    """Eq. 7 written out over windows of l tokens: (B, H, S, D) -> (B, H, N, D)."""
    windows = key.unfold(2, config.compress_block_size, config.compress_stride).mT
    if config.compression == "weighted":
        shares = weights["logits"].softmax(-1)  # [H, l]
        return torch.einsum("bhnld,hl->bhnd", windows, shares)
    if config.compression == "linear":
        return torch.einsum("bhnld,hlde->bhne", windows, weights["weight"])
    if config.compression == "mean":
        return windows.mean(-2)
    placed = windows + weights["position"]
    gelu = torch.nn.functional.gelu
    first, second = (
        gelu(torch.einsum("bhnld,lde->bhne", placed, weights["hidden_weight"][half]))
        @ weights["output_weight"][half]
        for half in (0, 1)
    )
    return placed.mean(-2) + first - second
