"""Calls whose kernels `matrix` compiles: together they reach every kernel and its usual tiles.

Each runs on meta tensors that say they are on a CUDA device; nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from nsa_flex import InfLLMV2Config, NSAConfig, infllm_v2_attention, selected_attention
from nsa_flex.bench.tools.kernel_calls import (
    BF16,
    FP16,
    FP32,
    PAPER,
    Core,
    paged,
    spans,
    step,
    store,
    tokens_first,
)
from nsa_flex.config import BranchName, CompressionKind
from nsa_flex.fallback_kernels.fused.bwd_gates import switch_gate_sign
from nsa_flex.fallback_kernels.topk.block_max import block_max

meta = tokens_first("meta")
SIZES = (16, 32, 64, 128)  # of selectable blocks
KINDS_OF_ROWS: tuple[dict[str, Any], ...] = (
    {},
    {"documents": True},
    {"tokens": 16384},
    {"queries": 512, "offset": 1024, "train": False},
)
SOME_BRANCHES: tuple[tuple[BranchName, ...], ...] = (
    ("selected",),
    ("compressed", "sliding"),
    ("sliding",),
)
NSA_1B = NSAConfig(16, 16, 16, 16, 0, 1, 128, "mean", selection="tiled_top_k")


def selected(group: int, tokens: int, dtype: torch.dtype, block_size: int) -> None:
    """Blocks that the caller selected, with their backward."""
    query, key, value = (meta(1, h, tokens, 128, dtype).requires_grad_() for h in (group, 1, 1))
    blocks = torch.empty(1, 1, tokens, 16, dtype=torch.int32, device="meta")
    out = selected_attention(query, key, value, blocks, block_size=block_size)
    out.backward(torch.empty_like(out))


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
        yield name, partial(step, meta, group, 1, dims, "mean")
    yield "decode, 4 new tokens", partial(step, meta, 4, 4, (128, 128), "mean")
    kinds: tuple[CompressionKind, ...] = ("mean", "weighted", "linear", "mlp")
    for kind in kinds[1:]:
        yield f"decode, φ {kind}", partial(step, meta, 4, 1, (128, 128), kind)
    yield "decode, float32", partial(step, meta, 4, 1, (128, 128), "mean", FP32)
    yield "decode, 64 rows", partial(step, meta, 8, 1, (128, 128), "mean", past=(0,) * 64)
    yield "decode, NSA-1B", partial(step, meta, 16, 1, (64, 64), "mean", config=NSA_1B)
    for branches in SOME_BRANCHES:
        some = replace(NSA_1B, branches=branches)
        yield (
            f"decode, {' and '.join(branches)}",
            partial(step, meta, 16, 1, (64, 64), "mean", config=some),
        )
    yield "pages", partial(paged, meta, 4, 128)
    for group in (4, 1):
        yield f"spans, group {group}", partial(spans, meta, group, (128, 128))
    for dtype, size in ((BF16, 128), (BF16, 64), (FP32, 128)):
        name = f"indexer, {dtype}, blocks of {size}"
        yield name.replace("torch.", ""), partial(indexed, dtype, size)
    for group, dim in ((16, 128), (4, 128), (1, 64)):
        yield f"InfLLM-V2, group {group}, head dim {dim}", partial(pooled, group, dim)
    yield "gates of a compiled backward", signs
    for kind in kinds[:2]:
        yield f"stored chunk, φ {kind}", partial(store, meta, 512, 8192, (128, 128), BF16, kind)


def sweep(
    groups: Sequence[int] = (1, 3, 4, 16, 64),
    dims: Sequence[tuple[int, int]] = ((64, 64), (128, 128), (192, 128), (256, 256)),
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Many more: groups, head dims, dtypes, block sizes and kinds of rows."""
    for group, (dim, value_dim), dtype, size in product(groups, dims, (BF16, FP32), SIZES):
        config = NSAConfig(16, 8, 16) if size == 16 else replace(PAPER, select_block_size=size)
        core = Core(group, 2048, dim, value_dim, dtype, config, kv_heads=2)
        for changes in KINDS_OF_ROWS:
            of_rows = replace(core, **changes)
            yield f"sweep, {of_rows.name}", of_rows
        if size == PAPER.select_block_size:
            name = f"sweep, decode, group {group}, head dims {dim} and {value_dim}, {dtype}"
            call = partial(step, meta, group, 1, (dim, value_dim), "mean", dtype, kv_heads=2)
            yield name.replace("torch.", ""), call


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
    yield Core(16, 32768, queries=16384, offset=16384)
    yield Core(4, 8192, queries=512, offset=-1, batch=2)
    yield Core(own=True)
    yield Core(backend={"compressed": "dense"}, tokens=8192)
    yield Core(4, 8192, deterministic=True)
    yield Core(16, 65536, kv_heads=1)
    yield Core(16, 16384, 64, 64, config=NSA_1B, kv_heads=2)
    yield Core(16, 8192, 64, 64, config=NSA_1B, kv_heads=2, documents=True, train=False)
    yield Core(16, 8192, 64, 64, config=NSA_1B, kv_heads=2, documents=True)
