"""Calls whose kernels `matrix` compiles: together they reach every kernel and its usual tiles.

Each runs on meta tensors that say they are on a CUDA device; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nsa_flex import (
    InfLLMV2Config,
    NSAConfig,
    infllm_v2_attention,
    nsa_attention,
    selected_attention,
)
from nsa_flex.compression import Compression
from nsa_flex.config import CompressionKind
from nsa_flex.fallback_kernels.decode import interface as decode_kernels
from nsa_flex.fallback_kernels.decode import pages as decode_pages
from nsa_flex.fallback_kernels.decode import store_tokens as decode_store
from nsa_flex.fallback_kernels.fused.bwd_gates import switch_gate_sign
from nsa_flex.fallback_kernels.topk.block_max import block_max
from nsa_flex.fallback_kernels.topk.block_scores import block_scores

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAPER = NSAConfig()
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", selection="tiled_top_k")


@dataclass(frozen=True)
class Core:
    """A call of `nsa_attention`: query heads a KV head, tokens, head dims and what else it has.

    offset: of the first of `queries`, -1 for one of each row, on the device. documents: whether
    there are several; longest: tokens of the longest one, where told.
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
    backend: Any = "auto"
    deterministic: bool = False
    batch: int = 1
    kv_heads: int = 4

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
                out.backward(torch.empty_like(out))

    def _output(self) -> Tensor:
        queries = self.tokens if self.queries is None else self.queries
        heads, blocks = self.group * self.kv_heads, self.config.num_compressed_blocks(self.tokens)
        inputs = [self._tensor(heads, queries, self.dim)]
        for length in (self.tokens, blocks):
            inputs += [self._tensor(self.kv_heads, length, x) for x in (self.dim, self.value_dim)]
        options: dict[str, Any] = {"config": self.config, "backend": self.backend}
        if self.offset is not None:
            rows = torch.empty(self.batch, dtype=torch.int64, device="meta")
            options["query_offset"] = rows if self.offset < 0 else self.offset
        if self.documents:
            shape = (self.batch, queries)
            options["document_start"] = torch.empty(shape, dtype=torch.int32, device="meta")
            options["max_document_length"] = self.longest
        if self.own:
            options["sliding_key"] = self._tensor(self.kv_heads, self.tokens, self.dim)
            options["sliding_value"] = self._tensor(self.kv_heads, self.tokens, self.value_dim)
        attend: Callable[..., Tensor] = nsa_attention
        return attend(*inputs, self._tensor(heads, queries, 3), **options)

    def _tensor(self, heads: int, tokens: int, dim: int) -> Tensor:
        return meta(self.batch, heads, tokens, dim, self.dtype).requires_grad_(self.train)


def meta(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D) in memory (B, S, H, D)."""
    return torch.empty(batch, tokens, heads, dim, dtype=dtype, device="meta").transpose(1, 2)


def selected(group: int, tokens: int, dtype: torch.dtype, block_size: int) -> None:
    """Blocks that the caller selected, with their backward."""
    query, key, value = (meta(1, h, tokens, 128, dtype).requires_grad_() for h in (group, 1, 1))
    blocks = torch.empty(1, 1, tokens, 16, dtype=torch.int32, device="meta")
    out = selected_attention(query, key, value, blocks, block_size=block_size)
    out.backward(torch.empty_like(out))


def step(
    group: int,
    tokens: int,
    dims: tuple[int, int],
    kind: CompressionKind,
    dtype: torch.dtype = BF16,
    capacity: int = 65536,
    batch: int = 1,
    config: NSAConfig = PAPER,
) -> None:
    """New tokens of each row are stored, and attend."""
    kv_heads, blocks = 4, config.num_compressed_blocks(capacity)
    sizes = [(n, dim) for n in (tokens, capacity, blocks) for dim in dims]
    new_key, new_value, key, value, compressed_key, compressed_value = (
        meta(batch, kv_heads, *size, dtype) for size in sizes
    )
    phi = [
        tuple(Compression(config, kv_heads, dim, kind, device="meta", dtype=dtype).parameters())
        for dim in dims
    ]
    query, gates = (meta(batch, kv_heads * group, tokens, x, dtype) for x in (dims[0], 3))
    lengths = torch.empty(batch, dtype=torch.int32, device="meta")
    phi_of_both = decode_kernels.Phi(kind, *phi)
    decode_kernels.step(
        query,
        new_key,
        new_value,
        key,
        value,
        compressed_key,
        compressed_value,
        gates,
        lengths,
        config=config,
        phi=phi_of_both,
    )


def paged(group: int, dim: int) -> None:
    """One query a request, over keys in pages."""
    requests, page_size = 8, 64
    sizes = (page_size, page_size, page_size // PAPER.compress_stride)
    key, value, compressed = (
        torch.empty(512, size, 4, dim, dtype=BF16, device="meta") for size in sizes
    )
    decode_pages.attend(
        meta(requests, 4 * group, 1, dim, BF16),
        key,
        value,
        compressed,
        torch.empty_like(compressed),
        meta(requests, 4 * group, 1, 3, BF16),
        torch.empty(requests, 64, dtype=torch.int32, device="meta"),
        torch.empty(requests, dtype=torch.int32, device="meta"),
        config=PAPER,
        scale=dim**-0.5,
    )


def stored(dim: int, kind: CompressionKind) -> None:
    """A chunk of a prefill is stored."""
    phi = [Compression(PAPER, 4, dim, kind, device="meta", dtype=BF16) for _ in range(2)]
    lengths = [512, 8192, PAPER.num_compressed_blocks(8192)]
    decode_store.store(
        *(meta(1, 4, length, dim, BF16) for length in lengths for _ in range(2)),
        torch.empty(1, dtype=torch.int32, device="meta"),
        [x for each in phi for x in each.parameters()],
        True,
        PAPER.counts,
    )


def indexed(dtype: torch.dtype, block_size: int) -> None:
    """Scores of an indexer."""
    query, key = meta(1, 4, 4096, 128, dtype), meta(1, 1, 16384, 128, dtype)
    position = torch.empty(1, 4096, dtype=torch.int32, device="meta")
    block_max(query, key, position, None, block_size)


def pooled(group: int, dim: int) -> None:
    """InfLLM-V2's attention with its choice of blocks, and the backward."""
    query, key, value = (meta(1, h, 16384, dim, BF16).requires_grad_() for h in (group, 1, 1))
    out = infllm_v2_attention(query, key, value, config=InfLLMV2Config())
    out.backward(torch.empty_like(out))


def scores() -> None:
    """Of 128 queries, by sums."""
    query, key = meta(1, 4, 128, 128, FP32), meta(1, 1, 1023, 128, FP32)
    lse = torch.empty(1, 4, 128, device="meta")
    position = torch.empty(1, 128, dtype=torch.int32, device="meta")
    block_scores(query, key, lse, position, None, 0.1, 256, PAPER)


def signs() -> None:
    """What the backward of compiled code launches beside all that eager code does."""
    tokens, heads = 16384, 16
    gates = meta(1, heads, tokens, 3, BF16)
    switch_gate_sign(meta(1, heads, tokens, 128, BF16).transpose(1, 2), gates[..., :2])


def calls() -> Iterator[tuple[str, Callable[[], None]]]:
    """Each with a name of its own."""
    for core in cores():
        yield core.name, core
    for group, tokens, dtype, size in ((4, 8192, BF16, 64), (1, 8192, FP32, 32)):
        name = f"selected_attention, group {group}, {dtype}, blocks of {size}"
        yield name.replace("torch.", ""), partial(selected, group, tokens, dtype, size)
    for group, dims in ((4, (128, 128)), (1, (64, 64)), (16, (128, 128)), (8, (192, 128))):
        name = f"decode, group {group}, head dims {dims[0]} and {dims[1]}"
        yield name, partial(step, group, 1, dims, "mean")
    yield "decode, 4 new tokens", partial(step, 4, 4, (128, 128), "mean")
    kinds: tuple[CompressionKind, ...] = ("mean", "weighted", "linear", "mlp")
    for kind in kinds[1:]:
        yield f"decode, φ {kind}", partial(step, 4, 1, (128, 128), kind)
    yield "decode, float32", partial(step, 4, 1, (128, 128), "mean", FP32)
    yield "decode, 64 rows", partial(step, 8, 1, (128, 128), "mean", batch=64)
    yield "decode, NSA-1B", partial(step, 16, 1, (64, 64), "mean", config=NSA_1B)
    yield "pages", partial(paged, 4, 128)
    for dtype, size in ((BF16, 128), (BF16, 64), (FP32, 128)):
        name = f"indexer, {dtype}, blocks of {size}"
        yield name.replace("torch.", ""), partial(indexed, dtype, size)
    for group, dim in ((16, 128), (4, 128), (1, 64)):
        yield f"InfLLM-V2, group {group}, head dim {dim}", partial(pooled, group, dim)
    yield "scores of blocks, float32", scores
    yield "gates of a compiled backward", signs
    for kind in kinds[:2]:
        yield f"stored chunk, φ {kind}", partial(stored, 128, kind)


def cores() -> Iterator[Core]:
    """Calls of the whole function: the paper's shapes, then what differs in one thing."""
    yield from (Core(tokens=tokens) for tokens in (1024, 2048, 16384))
    yield Core(train=False)
    yield from (Core(group) for group in (1, 16))
    for group, tokens, dims in ((4, 2048, (64, 64)), (4, 16384, (64, 64)), (7, 16384, (80, 80))):
        yield Core(group, tokens, *dims)
    for dims in ((192, 128), (256, 256)):
        yield Core(4, 16384, *dims)
    for config in (NSAConfig(16, 8, 16), replace(PAPER, select_block_size=128)):
        yield Core(4, 4096, config=config)
    yield Core(dtype=FP16, train=False)
    yield Core(4, 4096, dtype=FP32)
    yield Core(4, 8192, documents=True)
    yield Core(4, 8192, documents=True, longest=1024)
    yield Core(4, 8192, queries=512, offset=4096, train=False)
    yield Core(4, 8192, queries=512, offset=4096)
    yield Core(4, 8192, queries=512, offset=-1, batch=2)
    yield Core(own=True)
    yield Core(backend={"compressed": "dense"}, tokens=8192)
    yield Core(4, 8192, deterministic=True)
    yield Core(16, 65536, kv_heads=1)
    yield Core(16, 16384, 64, 64, config=NSA_1B, kv_heads=2)
    yield Core(16, 8192, 64, 64, config=NSA_1B, kv_heads=2, documents=True, train=False)
