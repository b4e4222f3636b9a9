"""Times one decode step of one layer against dense attention.

The step is what a layer's static cache runs: append, compress where a block completes (as it does
at the timed length), score, choose, attend, gate; dense is one query token over all S, by SDPA on
cuDNN and on FA-2. bfloat16, head dim 128, the paper's configuration with φ of three kinds. Over as
many copies of the inputs as keep the L2 from holding them, as one CUDA graph of two dozen steps
("graph") or launched by Python one by one ("eager").

What does not fit the device has a row that says so. Before anything is timed, what a step stores,
its output and its choice are held to float64.

Example: python -m nsa_flex.bench.cases.decode --out decode.json
Example: python -m nsa_flex.bench.cases.decode --batch 1 --seq-len 65536 --kinds --out mean.json
"""

from __future__ import annotations

import argparse
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_flex.bench.cases.core import SDPA
from nsa_flex.bench.cases.decode_inputs import (
    CONFIG,
    HEAD_DIM,
    Inputs,
    Shape,
    check,
    make_inputs,
    step,
)
from nsa_flex.bench.command_line import row_parser
from nsa_flex.bench.measure.machine import commit
from nsa_flex.bench.measure.timing import Call, Times, measure_burst
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.config import CompressionKind

BANDWIDTH = 4.8e12  # bytes a second, an H200's data sheet
LENGTHS = (512, 2048, 8192, 65536, 262144)
SIXTEEN = CONFIG.compress_stride  # steps, one of which completes a block
PRODUCTS: tuple[CompressionKind, ...] = ("linear", "mlp")
Measured = tuple[str, str, Callable[[], dict[str, float]]]


def whole(inputs: Inputs) -> Call:
    return lambda: step(*inputs.arguments())


def advancing(inputs: Inputs) -> Call:
    """Sixteen steps, one of which completes a block.

    Counting is not in it: a model counts once a token, for all its layers.
    """
    steps = [whole(inputs.earlier(SIXTEEN - 1 - i)) for i in range(SIXTEEN)]

    def run() -> None:
        for each in steps:
            each()

    return run


def sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    """Dense attention of the same query over all stored tokens."""

    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                inputs.query, inputs.key, inputs.value, enable_gqa=True
            )

    return run


@dataclass(frozen=True)
class Clock:
    """How much is measured: most calls of a burst, and how often it is timed."""

    steps: int = 24
    repeats: int = 11

    def in_a_graph(self, calls: Sequence[Call]) -> dict[str, float]:
        """µs of `calls`, in turn, captured."""
        return _microseconds(measure_burst(calls, self.repeats, captured=True, most=self.steps))

    def one_by_one(self, calls: Sequence[Call]) -> dict[str, float]:
        """µs of `calls`, in turn, launched by Python: what the host needs, if it is slower."""
        return _microseconds(measure_burst(calls, self.repeats, captured=False, most=self.steps))


def _microseconds(times: Times) -> dict[str, float]:
    names = ("median", "p20", "p80", "wall")
    return {f"{name}_us": round(1e3 * getattr(times, f"{name}_ms"), 2) for name in names}


def measurements(
    shape: Shape, clock: Clock, kinds: Sequence[CompressionKind]
) -> Iterator[Measured]:
    """Name, mode and what measures it; the sets of inputs of a kind of φ are made once."""
    every: tuple[CompressionKind, ...] = ("mean", *kinds)
    for kind in every:
        sets = [make_inputs(shape, kind) for _ in range(shape.copies)]
        check(sets[0])
        name = "nsa" if kind == "mean" else f"nsa, {kind}"
        yield from _both(name, [whole(x) for x in sets], clock)
        sixteen = [advancing(x) for x in sets]
        yield f"{name}, mean of 16 steps", "graph", partial(_mean, clock, sixteen)
        if kind == "mean":
            for each in ("sdpa-cudnn", "sdpa-flash"):
                yield from _both(each, [sdpa(x, SDPA[each]) for x in sets], clock)


def _both(name: str, calls: list[Call], clock: Clock) -> Iterator[Measured]:
    yield name, "graph", partial(clock.in_a_graph, calls)
    yield name, "eager", partial(clock.one_by_one, calls)


def _mean(clock: Clock, sixteen: list[Call]) -> dict[str, float]:
    found = clock.in_a_graph(sixteen)
    return {name: round(time / SIXTEEN, 2) for name, time in found.items()}


def rows_of(shape: Shape, clock: Clock, options: argparse.Namespace) -> Iterator[Row]:
    """A row each of what is measured of a shape; `options` are of the command line."""
    about: Row = {
        "what": "decode step",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "dtype": "bfloat16",
        "batch": shape.batch,
        "heads": f"{shape.query_heads}/{shape.kv_heads}",
        "head_dim": HEAD_DIM,
        "seq_len": shape.seq_len,
        "commit": commit(),
    }
    total = torch.cuda.get_device_properties(0).total_memory
    if 1.1 * shape.stored > total:
        error = f"{shape.stored / 1e9:.0f} GB of keys and values do not fit {total / 1e9:.0f} GB"
        yield {**about, "implementation": "all", "mode": "all", "error": error}
        return
    for name, mode, measure in measurements(shape, clock, options.kinds):
        row = {**about, "implementation": name, "mode": mode, "copies": shape.copies}
        try:
            row |= measure()
        except Exception as error:  # what cannot run is told, the rest is still measured
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if name.startswith("nsa") and "median_us" in row:
            row["must_read_bytes"] = shape.must_read
            share = shape.must_read / (1e-6 * row["median_us"]) / BANDWIDTH
            row["share_of_bandwidth"] = round(share, 3)
        yield row


def with_ratios(rows: list[Row]) -> list[Row]:
    """Dense ÷ NSA, of the best dense implementation of the same shape in a graph."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        dense = row["implementation"].startswith("sdpa") and row["mode"] == "graph"
        if dense and "median_us" in row:
            place = row["batch"], row["heads"], row["seq_len"]
            best[place] = min(best.get(place, float("inf")), row["median_us"])
    for row in rows:
        place = row["batch"], row["heads"], row["seq_len"]
        if row["implementation"].startswith("nsa") and place in best and "median_us" in row:
            row["dense_over_nsa"] = round(best[place] / row["median_us"], 2)
    return rows


def main() -> None:
    parser = row_parser(__doc__, "64/4", "32/8")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seq-len", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument(
        "--kinds", nargs="*", choices=PRODUCTS, default=PRODUCTS, help="of φ, beside the mean"
    )
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[Row] = []
    for length, heads, batch in itertools.product(
        arguments.seq_len, arguments.heads, arguments.batch
    ):
        for row in rows_of(Shape.of(batch, heads, length), Clock(), arguments):
            rows.append(row)
            told = row.get("median_us", row.get("error"))
            print(*(row[x] for x in ("heads", "batch", "seq_len", "implementation", "mode")), told)
        torch.cuda.empty_cache()
        write_rows(arguments.out, with_ratios(rows))


if __name__ == "__main__":
    main()
