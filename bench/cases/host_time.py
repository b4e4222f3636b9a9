"""Times what one call of `nsa_attention` costs the host: until it returns, its kernels queued.

Eager and compiled, without gradients, with them, and with the backward; nothing captured. The
device is idle before each call, as it is where the host is what one waits for. Beside it causal
attention of PyTorch on the same tensors. bfloat16, batch 1, head dim 128, the paper's
configuration. Rows of JSON: medians in milliseconds, and the memory of a forward and backward,
bytes above inputs and incoming gradient at the peak, by PyTorch's counter.

Example: python -m nsa_flex.bench.cases.host_time --tokens 2048 65536 --out host_time.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.bench.command_line import pair_of, row_parser
from nsa_flex.bench.measure.machine import device_name
from nsa_flex.bench.measure.timing import PeakMemory
from nsa_flex.bench.report.rows import Row, write_rows

CONFIG = NSAConfig()
HEAD_DIM = 128
WARM_UP = 5  # calls: compilation, and the recording of launch plans


def make(heads: str, tokens: int, device: str, config: NSAConfig = CONFIG) -> list[Tensor]:
    """Query, key, value, compressed key and value, gates: leaves in memory order (B, S, H, D)."""
    query_heads, kv_heads = pair_of(heads)
    blocks = config.num_compressed_blocks(tokens)
    sizes = [(query_heads, tokens), (kv_heads, tokens), (kv_heads, tokens)]
    sizes += [(kv_heads, blocks), (kv_heads, blocks)]
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    leaves = [torch.randn((1, s, h, HEAD_DIM), **options).transpose(1, 2) for h, s in sizes]
    leaves.append(torch.rand((1, tokens, query_heads, 3), **options).transpose(1, 2))
    return [x.requires_grad_() for x in leaves]


def host_ms(call: Callable[[], object], repeats: int) -> float:
    """Median of `call`'s time on the host, from an idle device."""
    synchronise = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(WARM_UP + repeats):
        synchronise()
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(times[WARM_UP:]), 3)


def dense(query: Tensor, key: Tensor, value: Tensor, *_others: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def peak_bytes(step: Callable[[], object], leaves: list[Tensor]) -> int | None:
    """Memory at the peak of a step above what is there, without gradients of the leaves."""
    for leaf in leaves:
        leaf.grad = None
    peak = PeakMemory(leaves[0].device)
    with peak:
        step()
    return peak.bytes


def row_of(what: str, forward: Callable[..., Tensor], leaves: list[Tensor], repeats: int) -> Row:
    grad = torch.ones_like(forward(*leaves))

    def without_gradients() -> None:
        with torch.no_grad():
            forward(*leaves)

    def step() -> None:
        forward(*leaves).backward(grad)

    return {
        "what": what,
        "forward_without_gradients_ms": host_ms(without_gradients, repeats),
        "forward_ms": host_ms(lambda: forward(*leaves), repeats),
        "forward_backward_ms": host_ms(step, repeats),
        "forward_backward_peak_bytes": peak_bytes(step, leaves),
    }


def rows_of(
    heads: str, tokens: int, documents: int, device: str, repeats: int, compiled: bool
) -> list[Row]:
    """Rows of one shape; `documents` of equal length, 1 for none."""
    leaves = make(heads, tokens, device)
    start = None
    if documents > 1:
        length = -(-tokens // documents // 64) * 64
        start = (torch.arange(tokens, device=device) // length * length)[None]
    ours = partial(nsa_attention, config=CONFIG, document_start=start)
    rows = [row_of("nsa_attention", ours, leaves, repeats)]
    if compiled:
        rows.append(row_of("nsa_attention, compiled", torch.compile(ours), leaves, repeats))
    if documents == 1:
        rows.append(row_of("dense", dense, leaves, repeats))
    about: Row = {"device": device_name(torch.device(device)), "torch": torch.__version__}
    about |= {"heads": heads, "tokens": tokens, "documents": documents}
    return [about | row for row in rows]


def main() -> None:
    parser = row_parser(__doc__, "32/8")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 65536])
    parser.add_argument("--documents", nargs="+", type=int, default=[1, 8], help="a row of tokens")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=50, help="calls a median is of")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for shape in itertools.product(arguments.heads, arguments.tokens, arguments.documents):
        found = rows_of(*shape, arguments.device, arguments.repeats, arguments.compiled)
        rows += found
        write_rows(arguments.out, rows)
        print(*map(json.dumps, found), sep="\n")


if __name__ == "__main__":
    main()
