"""Times the prefill of one layer's cache: all tokens at once, or in chunks of one size.

A chunk's keys and values enter the cache, blocks that they complete are compressed, and its
queries attend to all that is cached, at an offset: range attention, where a whole prefill has
cuDNN. bfloat16, batch 1, head dim 128, the paper's configuration, a static cache. Queries, keys
and values lie in memory as projections leave them, (B, S, H, D). Rows of JSON: milliseconds of all
chunks together.

Example: python -m nsa_flex.bench.cases.decode_prefill --out decode_prefill.json
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_flex.bench.cases.decode_inputs import CONFIG, HEAD_DIM
from nsa_flex.bench.measure.timing import Call, Times, measure
from nsa_flex.cache.columns import IncomingBatch
from nsa_flex.cache.layer import LayerCache, advance
from nsa_flex.compression import Compression

BUDGET_MS = 200.0


def prefill(cache: LayerCache, tokens: tuple[Tensor, ...], chunk: int) -> list[Tensor]:
    """Outputs (B, Hq, chunk, D) of all tokens, which an empty cache takes in chunks."""
    cache.reset()
    out = []
    for part in zip(*(x.split(chunk, dim=2) for x in tokens), strict=True):
        found, incoming = attend(cache, part)
        out.append(found)
        advance([cache], incoming)
    return out


def attend(cache: LayerCache, tokens: tuple[Tensor, ...]) -> tuple[Tensor, IncomingBatch]:
    """Output of new tokens, which the cache has taken but not counted yet."""
    query, key, value, gates = tokens
    incoming = IncomingBatch(query.shape[2])
    cache.expect(incoming)
    keys, values = cache.update(key, value)
    return cache.attend(query, keys, values, gates)[0], incoming


def make(heads: str, length: int) -> tuple[LayerCache, tuple[Tensor, ...]]:
    """An empty cache for `length` tokens, and random queries, keys, values and gates."""
    query_heads, kv_heads = (int(x) for x in heads.split("/"))

    def normal(count: int, width: int = HEAD_DIM) -> Tensor:
        x = torch.randn(1, length, count, width, device="cuda", dtype=torch.bfloat16)
        return x.transpose(1, 2)

    phi = [Compression(CONFIG, kv_heads, HEAD_DIM, "mean") for _ in range(2)]
    cache = LayerCache(*phi, max_length=length)
    tokens = (normal(query_heads), normal(kv_heads), normal(kv_heads))
    return cache, (*tokens, normal(query_heads, 3).sigmoid())


def time_prefill(call: Call) -> Times:
    return measure(lambda mark: call(), torch.device("cuda"), BUDGET_MS)["whole"]


def rows_of(heads: str, length: int, chunks: list[int]) -> list[dict[str, Any]]:
    """All in one call, in chunks, and the last chunk alone."""
    cache, tokens = make(heads, length)
    whole = prefill(cache, tokens, length)[0].double()
    shared = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "batch": 1,
        "heads": heads,
        "head_dim": HEAD_DIM,
        "seq_len": length,
    }
    rows = []
    for chunk in (length, *chunks):
        start = time.perf_counter()
        out = torch.cat(prefill(cache, tokens, chunk), 2)
        torch.cuda.synchronize()
        first = time.perf_counter() - start  # with compilation, unless that was cached
        error = float((out.double() - whole).norm() / whole.norm())
        assert error < 2**-7, f"chunks of {chunk} are off by {error:.1e}"
        times = time_prefill(partial(prefill, cache, tokens, chunk))
        row = {
            "what": "prefill of a cache",
            **shared,
            "chunk": chunk,
            **times.columns(),
            "first_ms": round(1e3 * first, 1),
            "error": float(f"{error:.1e}"),
        }
        rows.append(row)
        print(heads, length, "chunk", chunk, row["median_ms"], "ms, first", row["first_ms"])
        if chunk < length:
            prefill(cache, tuple(x[:, :, : length - chunk] for x in tokens), chunk)
            last = tuple(x[:, :, length - chunk :] for x in tokens)
            times = time_prefill(partial(attend, cache, last))
            row = {"what": "last chunk", **shared, "chunk": chunk, **times.columns()}
            rows.append(row)
            print(heads, length, "last chunk of", chunk, row["median_ms"], "ms")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", default=["64/4"], help="Hq/Hkv")
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--chunk", nargs="+", type=int, default=[8192, 2048])
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for heads in arguments.heads:
            rows += rows_of(heads, arguments.seq_len, arguments.chunk)
            arguments.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
