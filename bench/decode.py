"""Times one decode step of one layer: NSA as a whole and by parts, against dense attention.

The step is append, compress where a block completes (as it does at the timed length), score,
choose, attend, gate; dense is one query token over all S. bfloat16, head dim 128, the paper's
configuration. A "graph" replays two dozen steps captured as one CUDA graph, over as many copies
of the inputs as keep the L2 from holding them. Rows go to a JSON file, with --plot also a picture.

Example: python -m nsa_flex.bench.decode --out decode.json --plot decode.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_flex.bench.decode_inputs import CONFIG, HEAD_DIM, Inputs, Shape, check, make_inputs
from nsa_flex.fallback_kernels import decode_launch as launch
from nsa_flex.fallback_kernels.decode import step
from nsa_flex.fallback_kernels.decode_plan import DecodePlan

Call = Callable[[], Any]
BANDWIDTH = 4.8e12  # bytes a second, an H200's data sheet
STEPS = 24  # calls of a captured graph
REPEATS = 11
LENGTHS = (512, 2048, 8192, 65536, 262144)
COMPILED = ((65536,), (1, 8, 64), (8,))  # lengths, batches, KV heads of the compiled modes
MOST_BYTES = 75e9  # of one shape's keys and values


def times(run: Call, calls: int) -> dict[str, float]:
    """Median, 20th and 80th percentile of µs a call, by CUDA events around `run`."""
    for _ in range(3):
        run()
    found = []
    for _ in range(REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        torch.cuda.synchronize()
        found.append(1e3 * start.elapsed_time(stop) / calls)
    found.sort()
    low, middle, high = (found[int(q * (REPEATS - 1))] for q in (0.2, 0.5, 0.8))
    return {"median_us": round(middle, 2), "p20_us": round(low, 2), "p80_us": round(high, 2)}


def several(calls: Sequence[Call]) -> list[Call]:
    """`calls` over and over, as many as take some milliseconds; all have run before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    calls[0]()
    stop.record()
    torch.cuda.synchronize()
    count = max(len(calls), min(STEPS, int(3 / start.elapsed_time(stop))))
    return list(itertools.islice(itertools.cycle(calls), count))


def in_a_graph(calls: Sequence[Call]) -> dict[str, float]:
    """Times of `calls`, in turn, captured."""
    order = several(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in order:
            call()
    return times(graph.replay, len(order))


def one_by_one(calls: Sequence[Call]) -> dict[str, float]:
    """Times of `calls`, in turn, launched by Python: what the host needs, if it needs longer."""
    order = several(calls)

    def run() -> None:
        for call in order:
            call()

    return times(run, len(order))


def whole(inputs: Inputs) -> Call:
    return lambda: step(*inputs.tensors(), config=CONFIG)


def advancing(inputs: Inputs) -> Call:
    """Sixteen steps, one of which completes a block, and their counting."""
    start = inputs.key.shape[2] - 16

    def run() -> None:
        inputs.lengths.fill_(start)
        for _ in range(16):
            step(*inputs.tensors(), config=CONFIG)
            inputs.lengths.add_(1)
        inputs.lengths.sub_(1)

    return run


def one_of_sixteen(found: dict[str, float]) -> dict[str, float]:
    return {name: round(time / 16, 2) for name, time in found.items()}


def parts(inputs: Inputs) -> Iterator[tuple[str, Call]]:
    """Each kernel of the step alone; selected and sliding, which share one, each by itself."""
    x = inputs
    plan = DecodePlan.of(x.query, x.key, x.value, x.compressed_key, CONFIG)
    cache = launch.Cache(x.key, x.value, x.compressed_key, x.compressed_value, x.lengths)
    new = launch.NewTokens(x.new_key, x.new_value)
    scratch = plan.scratch(x.query.device)
    out, _, lse = launch.run(plan, x.query, cache, x.gates, HEAD_DIM**-0.5, new=new)
    first = (plan, x.query, cache)
    attend = (*first, (x.key, x.value), scratch, HEAD_DIM**-0.5, new)
    yield (
        "compressed, append, compress",
        lambda: launch.launch_compressed(*first, scratch, HEAD_DIM**-0.5, new),
    )
    yield "choice", lambda: launch.launch_choice(plan, cache, scratch)
    yield "selected", lambda: launch.launch_attend(*attend, sliding_window=False)
    yield "sliding", lambda: launch.launch_attend(*attend, selected=False)
    yield "merge", lambda: launch.launch_merge(plan, cache, scratch, x.gates, out, lse)


def sdpa(inputs: Inputs, backend: SDPBackend) -> Call:
    def run() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                inputs.query, inputs.key, inputs.value, enable_gqa=True
            )

    return run


def varlen(inputs: Inputs) -> Call:
    """FA-2 over packed rows, keys and values in its own (tokens, heads, D) memory."""
    from torch.nn.attention.varlen import varlen_attn

    batch, _, length, _ = inputs.key.shape
    query = inputs.query.transpose(1, 2).flatten(0, 1).contiguous()
    key, value = (x.transpose(1, 2).flatten(0, 1) for x in (inputs.key, inputs.value))
    first_query = torch.arange(batch + 1, device="cuda", dtype=torch.int32)
    first_key = first_query * length
    return lambda: varlen_attn(query, key, value, first_query, first_key, 1, length)


def flex(inputs: Inputs) -> Call:
    """FlexAttention with a BlockMask of the stored tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    length = inputs.key.shape[2]
    mask = create_block_mask(lambda b, h, q, kv: kv < length, None, None, 1, length, device="cuda")
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda: compiled(
        inputs.query, inputs.key, inputs.value, block_mask=mask, enable_gqa=True
    )


def measurements(shape: Shape) -> Iterator[tuple[str, str, Callable[[], dict[str, float]]]]:
    """Name, mode and what measures it; the sets of inputs are made once."""
    sets = [make_inputs(shape) for _ in range(shape.copies)]
    check(sets[0])
    calls = [whole(x) for x in sets]
    yield "nsa", "graph", lambda: in_a_graph(calls)
    yield "nsa", "eager", lambda: one_by_one(calls)
    if shape.seq_len >= 64:
        sixteen = [advancing(x) for x in sets]
        yield "nsa, mean of 16 steps", "graph", lambda: one_of_sixteen(in_a_graph(sixteen))
    apart = [dict(parts(x)) for x in sets]
    for name in apart[0]:
        yield name, "graph", partial(in_a_graph, [each[name] for each in apart])
    cudnn = [sdpa(x, SDPBackend.CUDNN_ATTENTION) for x in sets]
    yield "sdpa-cudnn", "graph", lambda: in_a_graph(cudnn)
    yield "sdpa-cudnn", "eager", lambda: one_by_one(cudnn)
    flash = [sdpa(x, SDPBackend.FLASH_ATTENTION) for x in sets]
    yield "sdpa-flash", "graph", lambda: in_a_graph(flash)
    if sets[0].key.nbytes < 5e9:
        yield "fa2-varlen", "graph", lambda: in_a_graph([varlen(sets[0])])
    lengths, batches, kv_heads = COMPILED
    if shape.seq_len in lengths and shape.batch in batches and shape.kv_heads in kv_heads:
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True)
        wrapped = [partial(compiled, *x.tensors(), config=CONFIG) for x in sets]
        yield "nsa", "compiled", lambda: one_by_one(wrapped)
        yield "nsa", "compiled graph", lambda: in_a_graph(wrapped)
        if shape.batch < 64:
            yield "flex", "compiled", lambda: one_by_one([flex(sets[0])])
            yield "flex", "compiled graph", lambda: in_a_graph([flex(sets[0])])


def rows_of(shape: Shape) -> Iterator[dict[str, Any]]:
    for name, mode, measure in measurements(shape):
        row: dict[str, Any] = {
            "what": "decode step",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "dtype": "bfloat16",
            "batch": shape.batch,
            "heads": f"{shape.query_heads}/{shape.kv_heads}",
            "head_dim": HEAD_DIM,
            "seq_len": shape.seq_len,
            "implementation": name,
            "mode": mode,
            "copies": shape.copies,
        }
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
        dense = row["implementation"].startswith(("sdpa", "fa2", "flex"))
        if dense and "graph" in row["mode"] and "median_us" in row:
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
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows")
    parser.add_argument("--plot", type=Path, help="PNG file")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    for length, heads, batch in itertools.product(
        arguments.seq_len, arguments.heads, arguments.batch
    ):
        query_heads, kv_heads = (int(x) for x in heads.split("/"))
        shape = Shape(batch, query_heads, kv_heads, length)
        if 2 * 2 * HEAD_DIM * batch * shape.kv_heads * length > MOST_BYTES:
            continue
        for row in rows_of(shape):
            rows.append(row)
            told = row.get("median_us", row.get("error"))
            print(f"{heads} batch {batch} {length} {row['implementation']} {row['mode']}: {told}")
        torch.cuda.empty_cache()
        arguments.out.write_text(json.dumps(with_ratios(rows), indent=1) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
