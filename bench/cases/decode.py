"""Times one decode step of one layer: NSA as a whole and by parts, against dense attention.

The step is what a layer's static cache runs: append, compress where a block completes (as it does
at the timed length), score, choose, attend, gate; dense is one query token over all S. bfloat16,
head dim 128, the paper's configuration with φ of three kinds. Over as many copies of the inputs as
keep the L2 from holding them, in modes

    graph            two dozen steps captured as one CUDA graph
    eager            launched by Python, one by one
    compiled         torch.compile, one graph for all lengths; eager otherwise
    compiled graph   the same, captured
    reduce-overhead  torch.compile with this mode, which captures by itself; one copy

What does not fit the device has a row that says so. Rows go to a JSON file, with --plot also a
picture. With --quick everything runs once, to fill caches of compiled code: several processes can
do that, each with its --shard.

Before anything is timed, what a step stores, its output and its choice are held to float64.

Example: python -m nsa_flex.bench.cases.decode --out decode.json --plot decode.png
Example: python -m nsa_flex.bench.cases.decode --short --seq-len 65536 --out short.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend

from nsa_flex.bench.cases import decode_dense as dense
from nsa_flex.bench.cases.decode_inputs import (
    CONFIG,
    HEAD_DIM,
    Inputs,
    Shape,
    check,
    make_inputs,
    step,
)
from nsa_flex.bench.measure.machine import commit
from nsa_flex.bench.measure.timing import Call, Times, measure_burst
from nsa_flex.config import CompressionKind
from nsa_flex.fallback_kernels.decode import launch
from nsa_flex.fallback_kernels.decode.config import DecodePlan

BANDWIDTH = 4.8e12  # bytes a second, an H200's data sheet
LENGTHS = (512, 2048, 8192, 65536, 262144)
SIXTEEN = CONFIG.compress_stride  # steps, one of which completes a block
PRODUCTS: tuple[CompressionKind, ...] = ("linear", "mlp")
Measured = tuple[str, str, Callable[[], dict[str, Any]]]


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


def one_of_sixteen(found: dict[str, float]) -> dict[str, float]:
    return {name: round(time / SIXTEEN, 2) for name, time in found.items()}


def parts(inputs: Inputs) -> Iterator[tuple[str, Call]]:
    """Each kernel of the step alone; selected and sliding, which share one, each by itself."""
    x = inputs
    cache = launch.Cache(*x.cache.buffers.tensors, x.cache.lengths)
    plan = DecodePlan.of(x.query, x.key, x.value, cache.compressed_key, CONFIG)
    new, phi = launch.NewTokens(x.new_key, x.new_value), launch.Phi()
    gates = launch.Gating(*x.gates)
    workspace = plan.workspace(x.query.device)
    out, _, lse = launch.run(plan, x.query, cache, gates, HEAD_DIM**-0.5, new=new, phi=phi)
    first = (plan, x.query, cache)
    attend = (*first, (x.key, x.value), workspace, HEAD_DIM**-0.5, new)
    yield (
        "compressed, append, compress",
        lambda: launch.launch_compressed(*first, workspace, HEAD_DIM**-0.5, new, phi),
    )
    yield "choice", lambda: launch.launch_topk(plan, cache, workspace)
    yield "selected", lambda: launch.launch_selected_sliding(*attend, sliding_window=False)
    yield "sliding", lambda: launch.launch_selected_sliding(*attend, selected=False)
    yield "merge", lambda: launch.launch_combine(plan, cache, workspace, gates, out, lse)


def measurements(
    shape: Shape, clock: Clock, kinds: Sequence[CompressionKind], *, short: bool
) -> Iterator[Measured]:
    """Name, mode and what measures it; the sets of inputs of a kind of φ are made once.

    `short` leaves out what no ratio needs: parts, compiled steps, slower dense attention.
    """
    yield from steps_and_parts(shape, clock, short=short)
    for kind in kinds:
        yield from steps_of(checked_inputs(shape, kind), clock, f"nsa, {kind}")


def steps_and_parts(shape: Shape, clock: Clock, *, short: bool) -> Iterator[Measured]:
    """With φ the mean; dense attention beside it."""
    sets = checked_inputs(shape)
    yield from steps_of(sets, clock, "nsa")
    if not short:
        apart = [dict(parts(x)) for x in sets]
        for name in apart[0]:
            yield name, "graph", partial(clock.in_a_graph, [each[name] for each in apart])
        yield from compiled_steps(sets, clock)
    yield from sdpa_steps(sets, clock)
    if not short:
        yield from other_dense_steps(shape, sets, clock)


def checked_inputs(shape: Shape, kind: CompressionKind = "mean") -> list[Inputs]:
    """Sets of inputs to use in turn; the first one's step is right."""
    sets = [make_inputs(shape, kind) for _ in range(shape.copies)]
    check(sets[0])
    return sets


def steps_of(sets: Sequence[Inputs], clock: Clock, name: str) -> Iterator[Measured]:
    """Steps which complete a block, and the mean of sixteen."""
    calls = [whole(x) for x in sets]
    yield name, "graph", lambda: clock.in_a_graph(calls)
    yield name, "eager", lambda: clock.one_by_one(calls)
    sixteen = [advancing(x) for x in sets]
    yield (
        f"{name}, mean of 16 steps",
        "graph",
        lambda: one_of_sixteen(clock.in_a_graph(sixteen)),
    )


def compiled_steps(sets: Sequence[Inputs], clock: Clock) -> Iterator[Measured]:
    call = dense.compiled(step)
    wrapped = [partial(call, *x.arguments()) for x in sets]
    yield "nsa", "compiled", lambda: clock.one_by_one(wrapped)
    yield "nsa", "compiled graph", lambda: clock.in_a_graph(wrapped)
    replayed = dense.compiled(step, "reduce-overhead")
    yield "nsa", "reduce-overhead", lambda: counted(replayed, sets[0], clock)


def counted(call: Callable[..., Any], inputs: Inputs, clock: Clock) -> dict[str, Any]:
    """Times of a compiled step, and how often Inductor left its CUDA graph out."""
    from torch._dynamo.utils import counters

    for tensor in inputs.tensors():
        torch._dynamo.mark_static_address(tensor)
    before = counters["inductor"]["cudagraph_skips"]

    def run() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call(*inputs.arguments())

    found = clock.one_by_one([run])
    return {**found, "graphs_skipped": counters["inductor"]["cudagraph_skips"] - before}


def sdpa_steps(sets: Sequence[Inputs], clock: Clock) -> Iterator[Measured]:
    backends = {
        "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
        "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    }
    for name, backend in backends.items():
        calls = [dense.sdpa(x, backend) for x in sets]
        yield name, "graph", partial(clock.in_a_graph, calls)
        yield name, "eager", partial(clock.one_by_one, calls)


def other_dense_steps(shape: Shape, sets: Sequence[Inputs], clock: Clock) -> Iterator[Measured]:
    call = dense.compiled(dense.attend)
    wrapped = [partial(call, x.query, x.key, x.value) for x in sets]
    yield "sdpa", "compiled", lambda: clock.one_by_one(wrapped)
    yield "sdpa", "compiled graph", lambda: clock.in_a_graph(wrapped)
    first = sets[0]
    fa2 = Lazy(partial(fitting, shape, partial(dense.varlen, first)))
    yield "fa2-varlen", "graph", lambda: clock.in_a_graph([fa2()])
    yield "fa2-varlen", "eager", lambda: clock.one_by_one([fa2()])
    flex = Lazy(partial(dense.flex, first))
    yield "flex", "compiled", lambda: clock.one_by_one([flex()])
    yield "flex", "compiled graph", lambda: clock.in_a_graph([flex()])


class Lazy:
    """What `make` returns, made when it is asked for first."""

    def __init__(self, make: Callable[[], Call]) -> None:
        self.make = make
        self.made: Call | None = None

    def __call__(self) -> Call:
        if self.made is None:
            self.made = self.make()
        return self.made


def fitting(shape: Shape, make: Callable[[], Call]) -> Call:
    """`make`, which copies keys and values once more, if there is memory for them."""
    free, _ = torch.cuda.mem_get_info()
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if shape.stored > 0.9 * free:
        raise MemoryError(f"a copy of {shape.stored / 1e9:.0f} GB does not fit")
    return make()


def rows_of(shape: Shape, clock: Clock, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row each of what is measured of a shape; `options` are of the command line."""
    about: dict[str, Any] = {
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
    for name, mode, measure in measurements(shape, clock, options.kinds, short=options.short):
        if name in options.skip:
            continue
        row = {**about, "implementation": name, "mode": mode, "copies": shape.copies}
        if mode == "reduce-overhead" or name in ("flex", "fa2-varlen"):
            row["copies"] = 1
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


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Dense ÷ NSA, of the best dense implementation of the same shape in a graph."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        is_dense = row["implementation"].startswith(("sdpa", "fa2", "flex"))
        if is_dense and "graph" in row["mode"] and "median_us" in row:
            place = row["batch"], row["heads"], row["seq_len"]
            best[place] = min(best.get(place, float("inf")), row["median_us"])
    for row in rows:
        place = row["batch"], row["heads"], row["seq_len"]
        if row["implementation"].startswith("nsa") and place in best and "median_us" in row:
            row["dense_over_nsa"] = round(best[place] / row["median_us"], 2)
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Dense ÷ NSA over the length, a line a batch, a panel a count of heads."""
    import matplotlib.pyplot as plt

    shown = [r for r in rows if r["implementation"] == "nsa" and r["mode"] == "graph"]
    heads = sorted({r["heads"] for r in shown})
    figure, axes = plt.subplots(1, len(heads), figsize=(9, 3.6), sharey=True, squeeze=False)
    for axis, each in zip(axes[0], heads, strict=True):
        for batch in sorted({r["batch"] for r in shown}):
            line = [r for r in shown if (r["heads"], r["batch"]) == (each, batch)]
            line = [r for r in line if "dense_over_nsa" in r]
            line.sort(key=lambda r: r["seq_len"])
            axis.plot(
                [r["seq_len"] for r in line],
                [r["dense_over_nsa"] for r in line],
                marker="o",
                label=f"batch {batch}",
            )
        axis.axhline(1.0, color="grey", linewidth=0.8)
        axis.set(xscale="log", yscale="log", xlabel="tokens stored", title=f"{each} heads")
        axis.legend()
    axes[0][0].set_ylabel("dense ÷ NSA, one step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="+", default=["64/4", "32/8"], help="Hq/Hkv")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--seq-len", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--most-bytes", type=float, default=1e12, help="of keys and values")
    parser.add_argument("--skip", nargs="+", default=[], help="implementations to leave out")
    parser.add_argument(
        "--kinds", nargs="*", choices=PRODUCTS, default=PRODUCTS, help="of φ, beside the mean"
    )
    parser.add_argument(
        "--short", action="store_true", help="steps and SDPA alone: what dense ÷ NSA is made of"
    )
    parser.add_argument("--shard", default="0/1", help="I/N: shapes I, I + N, I + 2 N, ...")
    parser.add_argument("--quick", action="store_true", help="measure nothing properly")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    parser.add_argument("--plot", type=Path, help="PNG file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64
    clock = Clock(1, 1) if arguments.quick else Clock()
    every_shape = itertools.product(arguments.seq_len, arguments.heads, arguments.batch)
    shapes = [Shape.of(batch, heads, length) for length, heads, batch in every_shape]
    first, every = (int(x) for x in arguments.shard.split("/"))
    rows: list[dict[str, Any]] = []
    for shape in shapes[first::every]:
        if shape.stored > arguments.most_bytes:
            continue
        for row in rows_of(shape, clock, arguments):
            rows.append(row)
            told = row.get("median_us", row.get("error"))
            print(*(row[x] for x in ("heads", "batch", "seq_len", "implementation", "mode")), told)
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(with_ratios(rows), indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
