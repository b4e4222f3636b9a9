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
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.bench.command_line import parser_of
from nsa_flex.compression import Compression, mean_of_blocks, split_segments
from nsa_flex.config import CompressionKind
from nsa_flex.fallback_kernels.decode import interface as decode_kernels
from nsa_flex.fallback_kernels.decode import pages as decode_pages
from nsa_flex.fallback_kernels.decode import store_tokens as decode_store
from nsa_flex.fallback_kernels.fused.gated_sum import gated_sum
from nsa_flex.fallback_kernels.ranges.interface import ranged_attention
from nsa_flex.fallback_kernels.selected.interface import selected_attention
from nsa_flex.fallback_kernels.sliding.interface import sliding_attention
from nsa_flex.fallback_kernels.topk.interface import select_topk_blocks

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
HALF, OTHER_HALF = (torch.bfloat16 if CUDA else torch.float16), torch.float16
PAPER = NSAConfig()
SMALL = NSAConfig(8, 4, 16, 5, window_size=20)

# B, Hq, Hkv, S, D, dtype
Shape = tuple[int, int, int, int, int, torch.dtype]
Calls = Sequence[Callable[[], None]]


def normal(batch: int, heads: int, length: int, dim: int, dtype: torch.dtype) -> Tensor:
    """(B, H, S, D) in (B, S, H, D) memory, ready for gradients."""
    x = torch.randn(batch, length, heads, dim, device=DEVICE).to(dtype)
    return x.transpose(1, 2).requires_grad_()


def heads_of(shape: Shape, value_dim: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of a shape."""
    batch, query_heads, kv_heads, length, dim, dtype = shape
    return (
        normal(batch, query_heads, length, dim, dtype),
        normal(batch, kv_heads, length, dim, dtype),
        normal(batch, kv_heads, length, value_dim or dim, dtype),
    )


def differentiate(
    outputs: tuple[Tensor, ...], inputs: tuple[Tensor, ...], *, heads_first: bool = False
) -> None:
    """The backward of random gradients, in memory as outputs lie or (B, H, S, D)."""
    grads = tuple(torch.randn_like(x) for x in outputs)
    if heads_first:
        grads = tuple(x.contiguous() for x in grads)
    torch.autograd.grad(outputs, inputs, grads)


def core() -> Calls:
    """The whole function as `auto` runs it, with and without a backward."""
    # shape, Dv, documents, keys of the window's own
    cases: tuple[tuple[Shape, int, bool, bool], ...] = (
        ((1, 4, 1, 1290, 128, torch.bfloat16), 128, False, False),
        ((1, 4, 1, 1290, 128, torch.bfloat16), 128, True, False),
        ((1, 4, 1, 1040, 128, torch.bfloat16), 128, True, True),
        ((1, 8, 2, 1030, 192, torch.bfloat16), 128, False, False),
        ((1, 6, 2, 2101, 80, torch.bfloat16), 80, False, False),  # tiles that no rows fill
        ((1, 2, 1, 8210, 64, torch.float16), 64, False, False),  # long enough for the fold
    )
    # Queries behind a past, with keys after them; the last with keys of its own for the window.
    chunks: tuple[tuple[Shape, int, int, bool], ...] = (
        ((1, 16, 1, 515, 128, torch.bfloat16), 1021, 1600, False),
        ((2, 8, 2, 130, 128, torch.bfloat16), 0, 1100, False),
        ((1, 4, 1, 333, 64, torch.float16), 900, 1300, False),
        ((1, 7, 1, 141, 96, torch.bfloat16), 1001, 1300, False),
        ((1, 6, 1, 141, 64, torch.float16), 1001, 1142, True),
    )
    return [
        *(partial(differentiate_core, *case) for case in cases),
        *(partial(attend_at_offset, *case) for case in chunks),
    ]


def short() -> Calls:
    """Rows of up to twice a choice, masked, and of no more than one; packed documents of that."""
    cases: tuple[tuple[Shape, int, bool, bool], ...] = (
        ((1, 4, 1, 1290, 128, torch.bfloat16), 128, False, False),
        ((2, 6, 2, 1041, 64, torch.bfloat16), 64, False, False),
        ((2, 6, 2, 1041, 64, torch.float16), 64, False, True),
        ((1, 8, 2, 130, 192, torch.bfloat16), 128, False, False),
        ((2, 6, 2, 141, 64, torch.float16), 64, False, True),
    )
    packed = ((1, 4, 1, 1290, 128, torch.bfloat16), 128, True, False)
    return [
        *(partial(differentiate_core, *case) for case in cases),
        partial(differentiate_core, *packed, max_document_length=640),
    ]


def attend_at_offset(shape: Shape, offset: int, keys: int, own: bool) -> None:
    """A forward without gradients of queries at an offset."""
    q = heads_of(shape)[0].detach()
    k, v = (x.detach() for x in heads_of((*shape[:3], keys, *shape[4:]))[1:])
    ck, cv = (mean_of_blocks(split_segments(x, PAPER), PAPER).to(q.dtype) for x in (k, v))
    gates = normal(shape[0], shape[1], shape[3], 3, shape[5]).detach()
    nsa_attention(
        *(q, k, v, ck, cv, gates),
        config=PAPER,
        query_offset=offset,
        backend="triton",
        sliding_key=k.clone() if own else None,
        sliding_value=v.clone() if own else None,
    )


def differentiate_core(
    shape: Shape,
    value_dim: int,
    documents: bool,
    own: bool,
    max_document_length: int | None = None,
) -> None:
    """Both backwards, then a forward without gradients."""
    q, k, v = heads_of(shape, value_dim)
    gates = normal(shape[0], shape[1], shape[3], 3, shape[5])
    options: dict[str, Any] = {"config": PAPER}
    if documents:  # a long one, one token, an empty one, the rest
        edges = torch.tensor([0, 640, 704, 704], dtype=torch.int32, device=q.device)
        token = torch.arange(shape[3], device=q.device)
        start = edges[torch.searchsorted(edges, token, right=True) - 1]
        options["document_start"] = start.repeat(shape[0], 1)
        options["max_document_length"] = max_document_length
    inputs = [q, k, v, gates]
    if own:
        of_window = heads_of(shape, value_dim)[1:]
        options |= dict(zip(("sliding_key", "sliding_value"), of_window, strict=True))
        inputs += of_window
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        compressed = (mean_of_blocks(split_segments(x, PAPER), PAPER) for x in (k, v))
        ck, cv = (x.to(q.dtype) for x in compressed)
        out = nsa_attention(q, k, v, ck, cv, gates, **options)
        assert isinstance(out, Tensor)
        differentiate((out,), tuple(inputs), heads_first=deterministic)
    with torch.no_grad():
        nsa_attention(q, k, v, ck, cv, gates, **options)
    torch.use_deterministic_algorithms(False)


def sliding() -> Calls:
    """Windows shorter and longer than the row; Dv other than D; rows of float32."""
    cases: tuple[tuple[Shape, int, int], ...] = (
        ((1, 16, 1, 300, 128, HALF), 128, 100),
        ((2, 6, 2, 141, 64, OTHER_HALF), 48, 512),
        ((1, 4, 1, 70, 32, torch.float32), 32, 7),
    )
    return [partial(differentiate_window, *case) for case in cases]


def differentiate_window(shape: Shape, value_dim: int, window: int) -> None:
    q, k, v = heads_of(shape, value_dim)
    start = torch.arange(shape[3], dtype=torch.int32, device=q.device) // 64 * 64
    for documents in (None, start.repeat(shape[0], 1)):
        both = sliding_attention(q, k, v, window_size=window, scale=0.2, document_start=documents)
        differentiate(both, (q, k, v))


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
    )
    return [partial(choose, *case) for case in cases]


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
    # Hkv, G, T, lengths, capacity, D, Dv, dtype, config, kind of φ
    cases: tuple[tuple[Any, ...], ...] = (
        (2, 2, 1, (280, 0), 300, 16, 16, torch.float32, SMALL, "mean"),
        (1, 3, 5, (151, 7), 300, 24, 40, torch.float32, SMALL, "weighted"),
        (2, 1, 1, (151, 7), 300, 24, 40, torch.float32, SMALL, "linear"),
        (1, 4, 5, (150, 5), 300, 32, 16, OTHER_HALF, SMALL, "mlp"),
        *([(2, 16, 1, (2175, 1503), 2200, 128, 128, HALF, PAPER, "mlp")] if CUDA else []),
    )
    paged = (
        partial(decode_in_pages, (151, 3), 16, SMALL),
        partial(decode_in_pages, (1503,), 64, PAPER),
    )
    chunks = (
        partial(store_chunk, 37, (150, 7), (24, 40), torch.float32, SMALL, "weighted"),
        partial(store_chunk, 101, (0, 203), (64, 64), HALF, PAPER, "mean"),
    )
    steps = [partial(decode_step, *case) for case in cases]
    return [*steps, *(paged if CUDA else paged[:1]), *chunks]


def store_chunk(
    tokens: int,
    past: tuple[int, ...],
    dims: tuple[int, int],
    dtype: torch.dtype,
    config: NSAConfig,
    kind: CompressionKind,
) -> None:
    """Of two KV heads, the last row up to the end of the cache."""
    capacity = max(past) + tokens - 3
    phi = [Compression(config, 2, dim, kind, device=DEVICE) for dim in dims]

    def numbers(length: int) -> list[Tensor]:
        return [normal(len(past), 2, length, dim, dtype).detach() for dim in dims]

    with torch.no_grad():
        decode_store.store(
            *numbers(tokens),
            *numbers(capacity),
            *numbers(config.num_compressed_blocks(capacity)),
            torch.tensor(past, dtype=torch.int32, device=DEVICE),
            [x for each in phi for x in each.parameters()],
            True,
            config.counts,
        )


def decode_in_pages(lengths: tuple[int, ...], page_size: int, config: NSAConfig) -> None:
    """One query a request, whose pages lie apart in a shared memory."""
    rows, dim = len(lengths), 64
    per_row = -(-max(lengths) // page_size)
    table = torch.randperm(rows * per_row, device=DEVICE).int().view(rows, per_row)
    sizes = (page_size, page_size, page_size // config.compress_stride)
    key, value, compressed = (
        torch.randn(table.numel(), size, 2, dim, device=DEVICE).to(HALF) for size in sizes
    )
    decode_pages.attend(
        torch.randn(rows, 8, 1, dim, device=DEVICE).to(HALF),
        key,
        value,
        compressed,
        compressed.clone(),
        torch.rand(rows, 8, 1, 3, device=DEVICE),
        table,
        torch.tensor(lengths, dtype=torch.int32, device=DEVICE) - 1,
        config=config,
        scale=dim**-0.5,
    )


def decode_step(
    kv_heads: int,
    group: int,
    tokens: int,
    past: tuple[int, ...],
    capacity: int,
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    config: NSAConfig,
    kind: CompressionKind,
) -> None:
    blocks = config.num_compressed_blocks(capacity)

    def numbers(heads: int, length: int, width: int) -> Tensor:
        return torch.randn(len(past), heads, length, width, device=DEVICE).to(dtype)

    phi = [
        tuple(Compression(config, kv_heads, width, kind, device=DEVICE, dtype=dtype).parameters())
        for width in (dim, value_dim)
    ]
    decode_kernels.step(
        numbers(kv_heads * group, tokens, dim),
        numbers(kv_heads, tokens, dim),
        numbers(kv_heads, tokens, value_dim),
        numbers(kv_heads, capacity, dim),
        numbers(kv_heads, capacity, value_dim),
        numbers(kv_heads, blocks, dim),
        numbers(kv_heads, blocks, value_dim),
        numbers(kv_heads * group, tokens, 3),
        torch.tensor(past, dtype=torch.int32, device=DEVICE),
        config=config,
        phi=decode_kernels.Phi(kind, *phi),
    )


FAMILIES: dict[str, Calls] = {
    f.__name__: f() for f in (core, short, sliding, ranges, selection, choice, merge, decode)
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
