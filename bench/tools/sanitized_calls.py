"""Small calls that reach every hand-written kernel, for `python -m bench.tools.sanitize`.

Odd lengths, several groups and dtypes, both modes of the backward; nothing is compared here. On a
machine without CUDA all but the core run in Triton's interpreter (`TRITON_INTERPRET=1`).

Example: python -m bench.tools.sanitized_calls merge
Example: python -m bench.tools.sanitized_calls core --call 1
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nsa_flex import NSAConfig
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.tools.kernel_calls import (
    FP16,
    PAPER,
    Core,
    paged,
    spans,
    step,
    store,
    tokens_first,
)
from nsa_flex.fallback_kernels.fused.gated_sum import gated_sum
from nsa_flex.fallback_kernels.ranges.interface import ranged_attention
from nsa_flex.fallback_kernels.selected.interface import selected_attention
from nsa_flex.fallback_kernels.topk.interface import select_topk_blocks
from nsa_flex.indexer import indexer_topk

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF, OTHER_HALF = (torch.bfloat16 if CUDA else FP16), FP16
NORMAL = tokens_first(DEVICE)
SMALL = NSAConfig(8, 4, 16, 5, window_size=20)
TILED = NSAConfig(8, 4, 16, 6, 0, 1, window_size=20, selection="tiled_top_k")

# B, Hq, Hkv, S, D, dtype
Shape = tuple[int, int, int, int, int, torch.dtype]
Calls = Sequence[Callable[[], None]]


def normal(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D) in (B, S, H, D) memory, ready for gradients."""
    return NORMAL(batch, heads, length, dim, dtype).requires_grad_()


def heads_of(shape: Shape, value_dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a shape."""
    batch, query_heads, kv_heads, length, dim, dtype = shape
    return (
        normal(batch, query_heads, length, dim, dtype),
        normal(batch, kv_heads, length, dim, dtype),
        normal(batch, kv_heads, length, value_dim or dim, dtype),
    )


def differentiate(outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...]) -> None:
    """The backward of random gradients, in memory as outputs lie."""
    torch.autograd.grad(outputs, inputs, tuple(torch.randn_like(x) for x in outputs))


def core() -> Calls:
    """The whole function as `auto` runs it, with and without a backward."""
    calls = (
        Core(4, 1290, kv_heads=1),
        Core(4, 1290, documents=True, kv_heads=1),
        Core(4, 1040, documents=True, own=True, kv_heads=1),
        Core(4, 1030, 192, kv_heads=2),
        Core(3, 2101, 80, 80, kv_heads=2),  # tiles that no rows fill
        Core(2, 8210, 64, 64, FP16, kv_heads=1),  # long enough for the fold
        Core(2, 9250, 64, 64, FP16, queries=8210, offset=1040, kv_heads=1),  # and behind a past
    )
    # Queries behind a past, with keys after them; the last with keys of its own for the window.
    chunks = (
        Core(16, 1600, queries=515, offset=1021, kv_heads=1),
        Core(4, 1100, queries=130, offset=0, batch=2, kv_heads=2),
        Core(4, 1300, 64, 64, FP16, queries=333, offset=900, kv_heads=1),
        Core(7, 1300, 96, 96, queries=141, offset=1001, kv_heads=1),
        Core(6, 1142, 64, 64, FP16, queries=141, offset=1001, own=True, kv_heads=1),
    )
    return [
        *(partial(in_both_modes, each) for each in calls),
        *(replace(each, train=False, backend="triton", device=DEVICE) for each in chunks),
    ]


def short() -> Calls:
    """Rows of up to twice a choice, masked, and of no more than one; packed documents of that."""
    calls = (
        Core(4, 1290, kv_heads=1),
        Core(3, 1041, 64, 64, batch=2, kv_heads=2),
        Core(3, 1041, 64, 64, FP16, own=True, batch=2, kv_heads=2),
        Core(4, 130, 192, kv_heads=2),
        Core(3, 141, 64, 64, FP16, own=True, batch=2, kv_heads=2),
        Core(4, 1290, documents=True, longest=640, kv_heads=1),
    )
    return [partial(in_both_modes, each) for each in calls]


def in_both_modes(call: Core) -> None:
    """Both backwards, then a forward without gradients."""
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        replace(call, heads_first=deterministic, device=DEVICE)()
    replace(call, train=False, device=DEVICE)()
    torch.use_deterministic_algorithms(False)


def ranges() -> Calls:
    """Ranges of keys, some of them empty: documents, a window; heads of a group apart."""
    cases: tuple[tuple[Shape, int], ...] = (
        ((1, 16, 1, 300, 128, HALF), 128),
        ((2, 6, 2, 141, 64, OTHER_HALF), 48),
        ((1, 4, 1, 70, 32, torch.float32), 32),
    )
    return [partial(differentiate_ranges, *case) for case in cases]


def differentiate_ranges(shape: Shape, value_dim: int) -> None:
    q, k, v = heads_of(shape, value_dim)
    token = torch.arange(shape[3], dtype=torch.int32, device=q.device)[None]
    first = token // 96 * 96
    end = torch.maximum(first, token - 30)  # the first queries of a document see nothing
    differentiate(ranged_attention(q, k, v, first, end, scale=0.2), (q, k, v))


def chosen(shape: Shape, config: NSAConfig, offset: int, alike: bool) -> Tensor:
    """int32 (B, Hkv, S, n): forced blocks and random ones; `alike`: of all queries the same."""
    batch, _, kv_heads, length, _, _ = shape
    own = (torch.arange(length) + offset) // config.select_block_size
    block = torch.arange(config.num_select_blocks(length + offset))
    scores = torch.rand(batch, kv_heads, 1 if alike else length, len(block))
    scores = scores.repeat(1, 1, length, 1) if alike else scores
    near = (block <= own[:, None]) & (block > own[:, None] - config.num_local_blocks)
    scores = scores + 2.0 * (near | (block < config.num_initial_blocks))
    scores = scores.masked_fill(block > own[:, None], -1.0)
    best = scores.topk(min(config.num_selected_blocks, len(block)))
    last = torch.iinfo(torch.int32).max
    blocks = best.indices.masked_fill(best.values < 0, last).sort().values
    return blocks.masked_fill(blocks == last, -1).int().to(DEVICE)


def selection() -> Calls:
    """Choices that share nothing and all; queries that follow others; few blocks and many."""
    cases: tuple[tuple[Shape, int], ...] = (
        ((1, 1, 1, 128, 64, OTHER_HALF), 448),
        ((2, 3, 1, 45, 32, HALF), 100),
        ((1, 32, 2, 48, 128, HALF), 140),
        ((1, 4, 1, 700 if CUDA else 70, 64, HALF), 0),
        ((1, 8, 8, 48, 32, HALF), 17000 if CUDA else 60),
    )
    return [partial(differentiate_selection, *case) for case in cases]


def differentiate_selection(shape: Shape, offset: int) -> None:
    q, _, _ = heads_of(shape)
    _, k, v = heads_of((*shape[:3], shape[3] + offset, *shape[4:]))
    config = PAPER if shape[3] > 500 else SMALL
    for alike, deterministic in product((False, True), repeat=2):
        both = selected_attention(
            q,
            k,
            v,
            chosen(shape, config, offset, alike),
            block_size=config.select_block_size,
            num_initial_blocks=config.num_initial_blocks,
            num_local_blocks=config.num_local_blocks,
            scale=0.2,
            query_offset=offset,
            deterministic=deterministic,
        )
        differentiate(both, (q, k, v))


def choice() -> Calls:
    """With and without the log-sum-exp; a past; documents; nothing forced at the start."""
    # shape, config, past, documents, whether the log-sum-exp is given
    cases: tuple[tuple[Shape, NSAConfig, int, bool, bool], ...] = (
        ((1, 4, 2, 1500 if CUDA else 100, 64, HALF), PAPER, 0, False, False),
        ((4, 8, 2, 1300 if CUDA else 100, 128, HALF), PAPER, 0, False, True),
        ((1, 2, 2, 1300 if CUDA else 100, 128, OTHER_HALF), PAPER, 0, False, True),
        ((1, 16, 1, 1300 if CUDA else 100, 128, HALF), PAPER, 0, True, True),
        ((4, 8, 2, 1301 if CUDA else 20, 128, HALF), PAPER, 20000 if CUDA else 80, False, True),
        ((1, 2, 2, 300, 80, OTHER_HALF), SMALL, 0, False, False),
        ((1, 2, 1, 200, 16, torch.float32), SMALL, 60, False, False),
        ((1, 3, 1, 400, 32, HALF), SMALL, 0, True, False),
        ((1, 1, 1, 9, 32, OTHER_HALF), NSAConfig(4, 4, 4, 32, 2, 3), 4400, False, False),
        ((1, 2, 1, 250, 32, HALF), NSAConfig(8, 4, 16, 3, 0, 1), 0, False, False),
        ((1, 4, 1, 500, 32, HALF), replace(SMALL, selection="max_pool"), 0, True, True),
        ((2, 4, 2, 300, 64, OTHER_HALF), replace(SMALL, selection="max_pool"), 60, False, False),
        ((1, 4, 2, 500, 64, HALF), TILED, 0, False, True),
        ((1, 2, 1, 200, 32, OTHER_HALF), TILED, 160, True, False),
    )
    shapes = ((1, 4, 1, 300, 128, HALF), (2, 2, 1, 141, 32, torch.float32))
    by_keys = (partial(choose_by_keys, *each) for each in zip(shapes, (False, True), strict=True))
    return [*(partial(choose, *case) for case in cases), *by_keys]


def choose_by_keys(shape: Shape, documents: bool) -> None:
    """As of an indexer: by keys themselves, the highest of a block."""
    batch, _, _, length, _, _ = shape
    q, k, _ = heads_of(shape)
    starts = torch.arange(length, device=DEVICE, dtype=torch.int32) // 96 * 96
    indexer_topk(
        q,
        k,
        block_size=32,
        num_blocks=3,
        num_local_blocks=1,
        document_start=starts.expand(batch, -1) if documents else None,
    )


def choose(shape: Shape, config: NSAConfig, past: int, documents: bool, has_lse: bool) -> None:
    batch, query_heads, kv_heads, length, dim, dtype = shape
    q = normal(batch, query_heads, length, dim, dtype)
    k = normal(batch, kv_heads, config.num_compressed_blocks(length + past), dim, dtype)
    positions = torch.arange(length, device=DEVICE)[None] + past
    edge = 11 * config.select_block_size
    starts = (positions // edge * edge).int().expand(batch, -1).contiguous()
    select_topk_blocks(
        q,
        k,
        torch.full(q.shape[:3], 3.0, device=DEVICE) if has_lse else None,
        positions,
        starts if documents else None,
        config=config,
        scale=dim**-0.5,
        num_blocks=config.num_select_blocks(length + past),
    )


def merge() -> Calls:
    """The gated sum as an operator of its own."""
    return [differentiate_merge]


def differentiate_merge() -> None:
    a, b, c, gates = (normal(2, 3, 37, width, HALF) for width in (24, 24, 24, 3))
    differentiate((gated_sum(a, b, c, gates),), (a, b, c, gates))


def decode() -> Calls:
    """Steps of one token and of several on rows of different lengths, φ of every kind; chunks."""
    # G, T, D and Dv, kind of φ, dtype, capacity, Hkv, config, tokens of the past
    cases: tuple[tuple[Any, ...], ...] = (
        (2, 1, (16, 16), "mean", torch.float32, 300, 2, SMALL, (280, 0)),
        (3, 5, (24, 40), "weighted", torch.float32, 300, 1, SMALL, (151, 7)),
        (1, 1, (24, 40), "linear", torch.float32, 300, 2, SMALL, (151, 7)),
        (4, 5, (32, 16), "mlp", OTHER_HALF, 300, 1, SMALL, (150, 5)),
        *([(16, 1, (128, 128), "mlp", HALF, 2200, 2, PAPER, (2175, 1503))] if CUDA else []),
    )
    steps = [partial(step, heads_first, *case) for case in cases]
    in_pages = (
        partial(paged, NORMAL, 4, 64, HALF, (151, 3), 16, 10, 2, SMALL),
        partial(paged, NORMAL, 4, 64, HALF, (1503,), 64, 24, 2),
    )
    chunks = (
        partial(store, NORMAL, 37, 184, (24, 40), torch.float32, "weighted", 2, SMALL, (150, 7)),
        partial(store, NORMAL, 101, 301, (64, 64), HALF, "mean", 2, PAPER, (0, 203)),
    )
    parts = (partial(spans, NORMAL, 3, (32, 16), torch.float32, 300, 2, 2, SMALL),)
    return [*steps, *(in_pages if CUDA else in_pages[:1]), *chunks, *parts]


def heads_first(batch: int, heads: int, tokens: int, dim: int, dtype: torch.dtype) -> Tensor:
    """Random numbers in memory (B, H, S, D), as a cache has them."""
    return torch.randn(batch, heads, tokens, dim, device=DEVICE).to(dtype)


FAMILIES: dict[str, Calls] = {
    f.__name__: f() for f in (core, short, ranges, selection, choice, merge, decode)
}


def count_launches() -> Counter[str]:
    """A count, by name, of the Triton kernels that this process launches from now on."""
    from triton import knobs

    launches = Counter[str]()
    knobs.runtime.launch_enter_hook.add(lambda data: launches.update([data.get()["name"]]))
    return launches


def main() -> None:
    """Runs a family, or one call of it, and prints the kernels launched as a line of JSON."""
    parser = parser_of(__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--call", type=int, help="only this one of the family's, from 0")
    options = parser.parse_args()
    name, only = options.family, options.call
    torch.manual_seed(0)
    torch.autograd.set_multithreading_enabled(False)  # its threads may still run at the exit
    launches = count_launches()
    for call in FAMILIES[name] if only is None else [FAMILIES[name][only]]:
        call()
    if CUDA:
        torch.cuda.synchronize()
    print(json.dumps({"family": name, "launches": dict(sorted(launches.items()))}))


if __name__ == "__main__":
    main()
