"""Times the core on one sequence whose tokens several GPUs share, against one GPU in the same run.

Forward and backward of `context_parallel_attention`, on the first 2 and 4 ranks, say; rank 0 then
does all of it alone. Rows of JSON: milliseconds of the slowest rank (median), bytes at the peak
above inputs and incoming gradient, bytes that a rank sends by closed form, and efficiency: one
GPU's time over ranks times theirs. The first rank's output is held to that of one GPU. bfloat16,
batch 1, head dim 128, mean compression, the paper's configuration.

Published for 64/4 heads and 1M tokens on 8 H800 GPUs: 576 ms forward, 1509 ms backward.

Exit status: 0, or 1 if a result was wrong.

Example: torchrun --nproc-per-node 4 -m nsa_flex.bench.cases.context_parallel --out cp.json
Example: torchrun --nproc-per-node 2 -m nsa_flex.bench.cases.context_parallel --ranks 2 \\
    --heads 64/4 --tokens 262144 --out cp.json
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa_flex import Compression, NSAConfig, nsa_attention
from nsa_flex.bench.command_line import pair_of, row_parser
from nsa_flex.bench.measure.machine import device_name
from nsa_flex.bench.measure.timing import PeakMemory
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.parallel import SequenceShards, context_parallel_attention, sent_bytes

CONFIG = NSAConfig(compression="mean")
HEAD_DIM = 128
WARM_UP = 2  # steps: compilation, and the recording of launch plans
MAX_ERROR = 2e-2  # of bfloat16, of the norm of the output
COMPARED = 16  # one token of so many
Step = Callable[[], tuple[Tensor, float, float]]


def tensors_of(heads: str, chunks: Sequence[int], size: int, device: torch.device) -> list[Tensor]:
    """Leaves query, key, value and gates, and the output's gradient, of some chunks of a sequence.

    In memory order (B, S, H, D). A chunk of `size` tokens has the same numbers on every rank.
    """
    query_heads, kv_heads = pair_of(heads)
    sizes = [(query_heads, HEAD_DIM), *[(kv_heads, HEAD_DIM)] * 2, (query_heads, 3)]
    parts = []
    for c in chunks:
        generator = torch.Generator(device).manual_seed(c)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        parts.append(
            [
                torch.randn((1, size, *each), generator=generator, **options)
                for each in [*sizes, (query_heads, HEAD_DIM)]
            ]
        )
    *leaves, grad = (torch.cat(x, 1).transpose(1, 2) for x in zip(*parts, strict=True))
    return [*(x.requires_grad_() for x in leaves), grad]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_of(
    attend: Callable[..., Tensor], tensors: list[Tensor], wait: Callable[[], object]
) -> Step:
    """A step that returns its output, and milliseconds of its forward and of all of it."""
    *leaves, grad = tensors
    device = grad.device

    def step() -> tuple[Tensor, float, float]:
        for leaf in leaves:
            leaf.grad = None
        synchronize(device)
        wait()
        start = time.perf_counter()
        out = attend(*leaves)
        synchronize(device)
        middle = time.perf_counter()
        out.backward(grad)
        synchronize(device)
        return out.detach(), 1e3 * (middle - start), 1e3 * (time.perf_counter() - start)

    return step


def measure(step: Step, repeats: int, leaves: list[Tensor]) -> tuple[Tensor, Row]:
    """Tokens of the output, and columns of a row: medians of milliseconds, bytes at the peak."""
    for _ in range(WARM_UP):
        out = step()[0][:, :, ::COMPARED].clone()
    for leaf in leaves:
        leaf.grad = None
    peak = PeakMemory(leaves[0].device)
    with peak:
        step()
    forward, both = zip(*(step()[1:] for _ in range(repeats)), strict=True)
    found: Row = {
        "forward_ms": round(statistics.median(forward), 2),
        "forward_backward_ms": round(statistics.median(both), 2),
        "peak_bytes": peak.bytes,
    }
    return out, found


def slowest(row: Row, group: dist.ProcessGroup, device: torch.device) -> Row:
    """The greatest of each number on all ranks."""
    numbers = [0 if x is None else x for x in row.values()]
    greatest = torch.tensor(numbers, dtype=torch.float64, device=device)
    dist.all_reduce(greatest, dist.ReduceOp.MAX, group)
    names = dict(zip(row, greatest.tolist(), strict=True))
    return {name: round(value, 2) for name, value in names.items()}


def one_gpu(heads: str, tokens: int, device: torch.device, options: Any) -> tuple[Any, Row]:
    """Its output, and its row; None, and why there is none, where memory does not suffice."""
    phis = compressions(heads, device)
    try:
        tensors = tensors_of(heads, range(options.chunks), tokens // options.chunks, device)

        def attend(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
            compressed_key, compressed_value = phis[0](key), phis[1](value)
            return nsa_attention(
                query, key, value, compressed_key, compressed_value, gates, config=CONFIG
            )

        step = step_of(attend, tensors, lambda: None)
        out, row = measure(step, options.repeats, tensors[:-1])
    except torch.OutOfMemoryError as error:
        return None, {"one_gpu": f"out of memory: {str(error).split('.')[0]}"}
    return out, {f"one_gpu_{name}": value for name, value in row.items()}


def compressions(heads: str, device: torch.device) -> list[Compression]:
    kv_heads = pair_of(heads)[1]
    return [Compression(CONFIG, kv_heads, HEAD_DIM, device=device) for _ in range(2)]


def shared(
    heads: str, tokens: int, group: dist.ProcessGroup, device: torch.device, options: Any
) -> tuple[Any, Row]:
    """This rank's output, and the row of all ranks."""
    shards, phis = SequenceShards.of(group), compressions(heads, device)
    chunk = tokens // (2 * shards.size)
    # Chunks of any number of ranks are made of the same small ones.
    small = options.chunks // (2 * shards.size)
    chunks = [c * small + i for c in shards.chunks for i in range(small)]
    tensors = tensors_of(heads, chunks, chunk // small, device)

    def attend(query: Tensor, key: Tensor, value: Tensor, gates: Tensor) -> Tensor:
        return context_parallel_attention(
            *(query, key, value, gates),
            *(phis[0], phis[1]),
            mesh=shards,
            config=CONFIG,
        )

    step = step_of(attend, tensors, lambda: dist.barrier(group))
    out, row = measure(step, options.repeats, tensors[:-1])
    row = slowest(row, group, device)
    sent = sent_bytes(tokens, shards.size, pair_of(heads)[1], HEAD_DIM, config=CONFIG)
    return out, {**row, "sent_forward_bytes": sent.forward, "sent_backward_bytes": sent.backward}


def error_of(out: Tensor, whole: Tensor, ranks: int) -> float:
    """Relative distance of rank 0's output, the first and the last chunk, from one GPU's.

    Both of the tokens that are compared.
    """
    chunk = whole.shape[2] // (2 * ranks)
    want = torch.cat([whole[:, :, :chunk], whole[:, :, -chunk:]], 2)
    return float((out.float() - want.float()).norm() / want.float().norm())


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write rows on rank 0, and say whether all were right."""
    parser = row_parser(__doc__, "64/4", "32/8")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1 << 18, 1 << 19])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeats", type=int, default=3, help="measured steps of each case")
    parser.add_argument("--most-alone", type=int, default=1 << 19, help="tokens on one GPU")
    parser.add_argument("--most-a-rank", type=int, default=1 << 18, help="tokens of a shard")
    options = parser.parse_args(argv)
    options.chunks = 2 * max(options.ranks)
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device(options.device, local if options.device == "cuda" else 0)
    if options.device == "cuda":
        torch.cuda.set_device(device)
    begun = not dist.is_initialized()
    if begun:
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            device_id=device if options.device == "cuda" else None,
        )
    groups = {n: dist.new_group(range(n)) for n in options.ranks}
    about = {"device": device_name(device), "torch": torch.__version__}
    rows: list[Row] = []
    for tokens, heads in itertools.product(options.tokens, options.heads):
        outputs = {}
        found = {}
        for ranks, group in groups.items():
            if rank < ranks and tokens <= ranks * options.most_a_rank:
                outputs[ranks], found[ranks] = shared(heads, tokens, group, device, options)
            dist.barrier()
        if rank == 0:
            whole, alone = None, {"one_gpu": f"not tried beyond {options.most_alone} tokens"}
            if tokens <= options.most_alone:
                whole, alone = one_gpu(heads, tokens, device, options)
            for ranks, row in found.items():
                row = {**about, "ranks": ranks, "heads": heads, "tokens": tokens, **row, **alone}
                row["status"] = "not compared"
                if whole is not None:
                    row["error"] = round(error_of(outputs[ranks], whole, ranks), 5)
                    row["status"] = "ok" if row["error"] < MAX_ERROR else "failed"
                    for name in ("forward", "forward_backward"):
                        ideal = row[f"one_gpu_{name}_ms"] / ranks
                        row[f"{name}_efficiency"] = round(ideal / row[f"{name}_ms"], 3)
                rows.append(row)
                print(json.dumps(row), flush=True)
            write_rows(options.out, rows)
            del whole
        del outputs
        dist.barrier()
    if begun:
        dist.destroy_process_group()
    return int(any(row["status"] == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
