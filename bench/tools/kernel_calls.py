"""Calls of the package at given shapes, on random numbers or, on the meta device, on none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.compression import Compression
from nsa_flex.config import CompressionKind
from nsa_flex.fallback_kernels.decode import interface as decode_kernels
from nsa_flex.fallback_kernels.decode import pages as decode_pages
from nsa_flex.fallback_kernels.decode import store_tokens as decode_store
from nsa_flex.fallback_kernels.decode.attend_spans import attend_spans
from nsa_flex.fallback_kernels.decode.config import DecodePlan

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAPER = NSAConfig()
DOCUMENTS = (0, 640, 704, 704)  # where they begin: a long one, one block, an empty one, the rest

New = Callable[..., Tensor]  # (B, heads, tokens, width, dtype) to a tensor (B, H, S, D)


def tokens_first(device: str) -> New:
    """Random numbers in memory (B, S, H, D), as projections leave them."""

    def new(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
        x = torch.randn(batch, tokens, heads, dim, device=device).to(dtype)
        return x.transpose(1, 2)

    return new


@dataclass(frozen=True)
class Core:
    """A call of `nsa_attention`: query heads a KV head, tokens, head dims and what else it has.

    offset: of the first of `queries`, -1 for one of each row, on the device. documents: whether
    there are several; longest: tokens of the longest one, where told. own: keys and values of the
    window's own. heads_first: the gradient lies as (B, H, S, D), not as the output.
    """

    group: int = 4
    tokens: int = 16384
    dim: int = 128
    value_dim: int = 128
    dtype: torch.dtype = BF16
    config: NSAConfig = PAPER
    train: bool = True
    queries: int | None = None
    offset: int | None = None
    documents: bool = False
    longest: int | None = None
    own: bool = False
    heads_first: bool = False
    backend: Any = "auto"
    deterministic: bool = False
    batch: int = 1
    kv_heads: int = 4
    device: str = "meta"

    @property
    def name(self) -> str:
        """What tells it from the paper's shape."""
        parts = ["core"]
        for name, value in vars(self).items():
            if value != getattr(Core(), name) or name in ("group", "tokens", "dim"):
                shown = value.select_block_size if isinstance(value, NSAConfig) else value
                parts.append(f"{name} {shown}".replace("torch.", ""))
        return ", ".join(parts)

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.train):
            out = self._output()
            if self.train:
                grad = torch.randn_like(out)
                out.backward(grad.contiguous() if self.heads_first else grad)

    def _output(self) -> Tensor:
        queries = self.tokens if self.queries is None else self.queries
        heads, blocks = self.group * self.kv_heads, self.config.num_compressed_blocks(self.tokens)
        inputs = [self._tensor(heads, queries, self.dim)]
        for length in (self.tokens, blocks):
            inputs += [self._tensor(self.kv_heads, length, x) for x in (self.dim, self.value_dim)]
        options: dict[str, Any] = {"config": self.config, "backend": self.backend}
        if self.offset is not None:
            rows = torch.zeros(self.batch, dtype=torch.int64, device=self.device)
            options["query_offset"] = rows if self.offset < 0 else self.offset
        if self.documents:
            edges = torch.tensor(DOCUMENTS, dtype=torch.int32)
            start = edges[torch.searchsorted(edges, torch.arange(queries).int(), right=True) - 1]
            options["document_start"] = start.repeat(self.batch, 1).to(self.device)
            options["max_document_length"] = self.longest
        if self.own:
            options["sliding_key"] = self._tensor(self.kv_heads, self.tokens, self.dim)
            options["sliding_value"] = self._tensor(self.kv_heads, self.tokens, self.value_dim)
        attend: Callable[..., Tensor] = nsa_attention
        return attend(*inputs, self._tensor(heads, queries, 3), **options)

    def _tensor(self, heads: int, tokens: int, dim: int) -> Tensor:
        x = tokens_first(self.device)(self.batch, heads, tokens, dim, self.dtype)
        return x.requires_grad_(self.train)


def step(
    new: New,
    group: int,
    tokens: int,
    dims: tuple[int, int],
    kind: CompressionKind,
    dtype: torch.dtype = BF16,
    capacity: int = 65536,
    kv_heads: int = 4,
    config: NSAConfig = PAPER,
    past: tuple[int, ...] = (0,),
) -> None:
    """New tokens of each row, which has a past, are stored, and attend."""
    blocks, batch = config.num_compressed_blocks(capacity), len(past)
    sizes = [(n, dim) for n in (tokens, capacity, blocks) for dim in dims]
    widths = (dims[0], len(config.branches))
    query, gates = (new(batch, kv_heads * group, tokens, x, dtype) for x in widths)
    tensors = [query, *(new(batch, kv_heads, *size, dtype) for size in sizes), gates]
    run: Callable[..., object] = decode_kernels.step
    run(
        *(*tensors, torch.tensor(past, dtype=torch.int32, device=query.device)),
        config=config,
        phi=decode_kernels.Phi(
            kind, *(_weights(config, kv_heads, dim, kind, query) for dim in dims)
        ),
    )


def paged(
    new: New,
    group: int,
    dim: int,
    dtype: torch.dtype = BF16,
    lengths: tuple[int, ...] = (1,) * 8,
    page_size: int = 64,
    pages_a_row: int = 64,
    kv_heads: int = 4,
    config: NSAConfig = PAPER,
) -> None:
    """One query a request, whose pages lie apart in a shared memory."""
    rows = len(lengths)
    query, gates = (new(rows, group * kv_heads, 1, x, dtype) for x in (dim, 3))
    device = query.device
    table = torch.randperm(rows * pages_a_row).int().view(rows, pages_a_row).to(device)
    sizes = (page_size, page_size, page_size // config.compress_stride)
    key, value, compressed = (
        torch.randn(table.numel(), size, kv_heads, dim, device=device).to(dtype) for size in sizes
    )
    decode_pages.attend(
        *(query, key, value, compressed, compressed.clone(), gates, table),
        torch.tensor(lengths, dtype=torch.int32, device=device) - 1,
        config=config,
        scale=dim**-0.5,
    )


def store(
    new: New,
    tokens: int,
    capacity: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    kind: CompressionKind,
    kv_heads: int = 4,
    config: NSAConfig = PAPER,
    past: tuple[int, ...] = (0,),
) -> None:
    """A chunk of a prefill is stored behind each row's past."""
    lengths = (tokens, capacity, config.num_compressed_blocks(capacity))
    stored = [new(len(past), kv_heads, length, dim, dtype) for length in lengths for dim in dims]
    weights = (_weights(config, kv_heads, dim, kind, stored[0]) for dim in dims)
    with torch.no_grad():
        decode_store.store(
            *stored,
            torch.tensor(past, dtype=torch.int32, device=stored[0].device),
            [x for each in weights for x in each],
            True,
            config.counts,
        )


def spans(
    new: New,
    group: int,
    dims: tuple[int, int],
    dtype: torch.dtype = BF16,
    capacity: int = 65536,
    rows: int = 1,
    kv_heads: int = 4,
    config: NSAConfig = PAPER,
) -> None:
    """Spans of a part of a cache that ranks share: some whole, some cut short, some empty."""
    key, value = (new(rows, kv_heads, capacity, dim, dtype) for dim in dims)
    query = new(rows, kv_heads * group, 1, dims[0], dtype)
    compressed = new(rows, kv_heads, config.num_compressed_blocks(capacity), dims[0], dtype)
    plan = DecodePlan.of(query, key, value, compressed, config)
    size = config.select_block_size
    first = torch.arange(config.num_selected_blocks, device=query.device).int() * size
    stop = first + torch.tensor([size, 0, 5], device=query.device).repeat(len(first))[: len(first)]
    table = torch.stack((first, stop.int()), -1).expand(rows, kv_heads, -1, -1)
    attend_spans(plan, query, (key, value), (key, value), table.contiguous(), 3, 0.1)


def _weights(
    config: NSAConfig, kv_heads: int, dim: int, kind: CompressionKind, like: Tensor
) -> tuple[Tensor, ...]:
    """Parameters of φ, on the device and of the dtype of `like`."""
    phi = Compression(config, kv_heads, dim, kind, device=like.device, dtype=like.dtype)
    return tuple(phi.parameters())
