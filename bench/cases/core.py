"""The whole attention core, q, k, v and gates to output, against dense causal attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from nsa_flex.attention import nsa_attention
from nsa_flex.bench.cases.case import Case, Skip
from nsa_flex.bench.cases.targets import (
    Function,
    Group,
    Target,
    Task,
    Tensors,
    compiled,
    compress,
    query_key_value,
    scale_of,
    scores_of,
    too_large,
    uniform_gates,
)
from nsa_flex.bench.measure import reference
from nsa_flex.config import NSAConfig
from nsa_flex.dispatch import Backend, BackendName, BranchName
from nsa_flex.fallback_kernels.sliding.fa2_varlen import varlen_attention
from nsa_flex.masks import sliding_block_mask

SDPA = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-math": SDPBackend.MATH,
}
NSA: dict[str, Backend] = {"nsa": "auto", "nsa-eager": "auto", "nsa-flex": "flex"}
PACKED = ("nsa-packed", "nsa-packed-told", "fa2-varlen")

# A choice by a smaller lead may fall otherwise in float32: such queries are not compared.
CLEAR_MARGIN = 1e-4


class Core(Target):
    """Mean compression, choice, three branches and gates; dense ignores the gates.

    * nsa: compiled, backends by `auto`. nsa-eager: without torch.compile around it.
    * nsa-flex: compiled, every branch on FlexAttention. nsa:sliding=flex,…: as named.
    * nsa-packed: compiled; the batch rows are documents of one row, in the same memory.
      nsa-packed-told: it is told the length of the longest, too, as FA-2 always is.
      fa2-varlen: dense attention of documents that FA-2 packs.
    * sdpa-*: causal `scaled_dot_product_attention`. flex-dense: causal FlexAttention, compiled.
    """

    name = "core"

    def implementations(self) -> tuple[str, ...]:
        return (*NSA, *SDPA, "flex-dense", *PACKED)

    def prepare(self, case: Case, device: torch.device) -> Task:
        tensors, facts = query_key_value(case, device)
        return Task({**tensors, "gates": uniform_gates(case, device)}, facts=facts)

    def unsupported_reason(self, case: Case, memory: int) -> str | None:
        return too_large(case, case.seq_len, memory) if _keeps_scores(case) else None

    def function(self, case: Case, task: Task, compiler: str) -> Function:
        config, name = case.config, case.implementation
        if name in SDPA:
            return dense_attention(SDPA[name])
        if name == "fa2-varlen":
            return _varlen
        if name.startswith("nsa-packed"):
            return _packed(case, task.arguments["key"].device, compiler)
        if name == "flex-dense":
            return _flex_dense(case, task.arguments["key"].device, compiler)
        backend = NSA[name] if name in NSA else named_backends(name)

        def core(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
            compressed = compress(key, config), compress(value, config)
            return nsa_attention(
                query, key, value, *compressed, gates, config=config, backend=backend
            )

        return core if name == "nsa-eager" else compiled(core, compiler)

    def reference(self, case: Case, task: Task, group: Group, arguments: Tensors) -> Tensor:
        query, key, value, gates = arguments.values()
        positions, config, scale = group.positions, case.config, scale_of(case)
        if not is_nsa(case):
            return reference.dense(query, key, value, positions, scale)
        compressed_key = _rounded(key, task.arguments["key"], group, config)
        compressed_value = _rounded(value, task.arguments["value"], group, config)
        blocks, _ = _choose(case, task, group)
        branches = (
            reference.compressed(
                query, compressed_key, compressed_value, positions, scale, config
            ),
            reference.selected(query, key, value, positions, scale, blocks, config),
            reference.sliding(query, key, value, positions, scale, config),
        )
        gated = [gates[..., c, None] * out for c, out in enumerate(branches)]
        return gated[0] + gated[1] + gated[2]

    def clear(self, case: Case, task: Task, group: Group) -> Tensor:
        if not is_nsa(case):
            return super().clear(case, task, group)
        return _choose(case, task, group)[1] > CLEAR_MARGIN


def is_nsa(case: Case) -> bool:
    """Whether the core is sparse."""
    return case.implementation.startswith("nsa")


def named_backends(implementation: str) -> dict[BranchName, BackendName]:
    """The mapping that an implementation spells out.

    >>> named_backends("nsa:compressed=sdpa,sliding=fa2")
    {'compressed': 'sdpa', 'sliding': 'fa2'}
    """
    pairs = (pair.split("=") for pair in implementation.removeprefix("nsa:").split(","))
    return dict(pairs)  # type: ignore[return-value]


def _keeps_scores(case: Case) -> bool:
    return case.implementation == "sdpa-math" or (is_nsa(case) and not torch.cuda.is_available())


def dense_attention(backend: SDPBackend) -> Function:
    """Causal attention of PyTorch by one of its kernels; it ignores gates."""

    def dense(query: Tensor, key: Tensor, value: Tensor, *_gates: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
            )

    return dense


def _varlen(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = varlen_attention(q, k, v, window=(-1, 0), scale=query.shape[-1] ** -0.5)
    return out.transpose(1, 2)


def _packed(case: Case, device: torch.device, compiler: str) -> Function:
    """The batch rows as documents of one row: a view of (B, S, H, D) memory, nothing is copied."""
    config, shape = case.config, (case.batch, case.seq_len)
    if case.seq_len % config.select_block_size:
        raise Skip(f"documents of {case.seq_len} tokens would have to be aligned")
    token = torch.arange(case.batch * case.seq_len, device=device, dtype=torch.int32)
    document_start = (token // case.seq_len * case.seq_len)[None]
    longest = case.seq_len if case.implementation == "nsa-packed-told" else None

    def core(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        packed = (x.transpose(1, 2).flatten(0, 1)[None] for x in (query, key, value, gates))
        q, k, v, g = (x.transpose(1, 2) for x in packed)
        compressed = compress(k, config), compress(v, config)
        out = nsa_attention(
            *(q, k, v, *compressed, g),
            config=config,
            document_start=document_start,
            max_document_length=longest,
        )
        return out.transpose(1, 2).squeeze(0).unflatten(0, shape).transpose(1, 2)

    return compiled(core, compiler)


def _flex_dense(case: Case, device: torch.device, compiler: str) -> Function:
    # A window over everything is the causal mask, without a pass over S x S.
    everything = NSAConfig(window_size=case.seq_len)
    mask = sliding_block_mask(everything, case.seq_len, case.seq_len, device, backward=case.train)

    def dense(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        grouped = query.shape[1] != key.shape[1]
        return flex_attention(query, key, value, block_mask=mask, enable_gqa=grouped)

    return compiled(dense, compiler)


def _rounded(x: Tensor, source: Tensor, group: Group, config: NSAConfig) -> Tensor:
    """The mean of each block of x (S, D), with the values that the source's own dtype gives it.

    Rounding a compressed key is part of the computation that is checked, not an error of it: it
    decides which blocks are chosen. Gradients pass as through the mean.
    """
    exact = compress(x[None, None], config)[0, 0]
    given = source.detach()[group.batch, group.head][None, None]
    return exact + (compress(given, config)[0, 0].to(x.dtype) - exact).detach()


def _choose(case: Case, task: Task, group: Group) -> tuple[Tensor, Tensor]:
    """The float64 choice of a group's sampled queries, and its margins."""
    query, key = (task.arguments[name].detach() for name in ("query", "key"))
    compressed_key = compress(key[group.batch, group.head][None, None], case.config)[0, 0]
    scored = scores_of(case, group, query, compressed_key)
    return reference.choice(scored, group.positions, case.config)
