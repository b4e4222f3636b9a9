"""Times a decode step over a cache that several GPUs share, beside 1 / P of the cache on one.

The mean of sixteen steps, one of which completes a compressed block, captured as one CUDA graph on
every rank with its collectives (NCCL); the slowest rank counts. bfloat16, head dim 128, the
paper's configuration, φ a mean. Beside it what a layer's static cache of one GPU does with 1 / P
of the tokens. Before anything is timed, steps over a small cache are held to float64, over the
edge between two ranks too.

Example: python -m nsa_flex.bench.cases.sharded_decode --ranks 2 --out sharded.json
Example: python -m nsa_flex.bench.cases.sharded_decode --device cpu --seq-len 4096 --batch 2 \\
    --out try.json
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from nsa_flex.bench.cases.decode_inputs import CONFIG, HEAD_DIM, Shape, make_inputs, step
from nsa_flex.bench.command_line import pair_of, row_parser
from nsa_flex.bench.measure.machine import commit
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.compression import Compression
from nsa_flex.decoding import Stored
from nsa_flex.parallel import ShardedCache
from nsa_flex.parallel.decoding import NUM_COLLECTIVES, sent_bytes_per_step

STEPS = CONFIG.compress_stride  # one of which completes a block
REPEATS = 20
Call = Callable[[], Any]


class Sharded:
    """A cache of `length` tokens a row but one, and what comes to it; alike on all ranks."""

    def __init__(self, shape: Shape, length: int, capacity: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        torch.manual_seed(1)
        phi = Compression(CONFIG, shape.kv_heads, HEAD_DIM, "mean", device=device)
        group: Any = dist.group.WORLD
        self.cache = ShardedCache(phi, phi, group, max_length=capacity)
        few = torch.zeros(shape.batch, shape.kv_heads, 1, HEAD_DIM, device=device).bfloat16()
        self.cache.fill(few, few)
        torch.manual_seed(2 + dist.get_rank())
        for x in self.cache.stored[:4]:
            x.normal_()
        torch.manual_seed(1)
        self.query = self.tensor(shape.query_heads)
        self.new = (self.tensor(shape.kv_heads), self.tensor(shape.kv_heads))
        self.gates = torch.rand(shape.batch, shape.query_heads, 1, 3, device=device).bfloat16()
        self.rewind(length)

    def tensor(self, heads: int) -> Tensor:
        x = torch.randn(self.shape.batch, heads, 1, HEAD_DIM, device=self.device)
        return x.bfloat16()

    def rewind(self, length: int) -> None:
        """As many tokens as that in every row."""
        self.cache.lengths.fill_(length)
        self.cache._longest = length

    def step(self) -> Tensor:
        return self.cache.step(self.query, *self.new, self.gates)

    def sixteen(self) -> None:
        """Steps, and as many tokens as before."""
        for _ in range(STEPS):
            self.step()
        self.cache.lengths.sub_(STEPS)
        self.cache._longest -= STEPS

    def check(self) -> None:
        """Of a step, against the same in float64 by PyTorch operations, from the same cache."""
        exact = copy.copy(self)
        exact.cache = copy.copy(self.cache)
        stored = self.cache.stored
        key, value, *compressed = (x.double() for x in stored[:4])
        exact.cache._stored = Stored(
            key, value, compressed[0], compressed[1], stored.lengths.clone()
        )
        exact.query, exact.gates = self.query.double(), self.gates.double()
        exact.new = (self.new[0].double(), self.new[1].double())
        want, found = exact.step(), self.step()
        error = float((found.double() - want).norm() / want.norm())
        assert error < 2**-7, f"the step is off by {error:.1e}"


def check(heads: str, device: torch.device) -> None:
    """Lengths such that steps lie before, at and behind the edge between two parts, and a full
    block is completed.
    """
    for length in (2040, 2047, 2048, 2063, 2064, 3000, 4095):
        shape = Shape.of(2, heads, 4096)
        Sharded(shape, length, 2048 * dist.get_world_size(), device).check()


def microseconds(call: Call, device: torch.device) -> float:
    """Of one step, the mean of the sixteen in `call`; the slowest rank's, the median of runs."""
    call()
    dist.barrier()
    if device.type == "cpu":
        begun = time.perf_counter()
        call()
        found = [(time.perf_counter() - begun) * 1e3]
    else:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
        marks = []
        for _ in range(REPEATS + 3):
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            graph.replay()
            pair[1].record()
            marks.append(pair)
        torch.cuda.synchronize()
        found = [begin.elapsed_time(end) for begin, end in marks[3:]]
    median = torch.tensor(statistics.median(found) * 1e3 / STEPS, device=device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return round(float(median), 2)


def alone(shape: Shape, device: torch.device) -> Call:
    """Sixteen steps over a cache of this GPU alone."""
    inputs = make_inputs(shape, device=device.type)
    steps = [inputs.earlier(STEPS - 1 - i) for i in range(STEPS)]

    def run() -> None:
        for each in steps:
            step(*each.arguments())

    return run


def rows_of(batch: int, heads: str, length: int, device: torch.device) -> list[Row]:
    """A row of the shared cache, and one of a P-th of it on one GPU."""
    ranks = dist.get_world_size()
    about: Row = {
        "what": "decode step of a shared cache",
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "dtype": "bfloat16",
        "batch": batch,
        "heads": heads,
        "head_dim": HEAD_DIM,
        "seq_len": length,
        "commit": commit(),
    }
    query_heads, kv_heads = pair_of(heads)
    sent = sent_bytes_per_step(
        ranks, query_heads, kv_heads, HEAD_DIM, config=CONFIG, batch_size=batch
    )
    shared: Row = {"ranks": ranks, "collectives": NUM_COLLECTIVES, "sent_bytes": sent}

    def together() -> Call:
        return Sharded(Shape.of(batch, heads, length), length - STEPS, length, device).sixteen

    def by_itself() -> Call:
        return alone(Shape.of(batch, heads, length // ranks), device)

    found: list[Row] = []
    of_one: Row = {"ranks": 1}
    for name, more, make in (
        ("shared", shared, together),
        ("a part on one GPU", of_one, by_itself),
    ):
        row = {**about, **more, "implementation": name}
        try:
            row["median_us"] = microseconds(make(), device)
        except torch.OutOfMemoryError as error:
            row["error"] = str(error).splitlines()[0]
        except Exception as error:
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        found.append(row)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if all("median_us" in row for row in found):
        found[0]["over_a_part"] = round(found[0]["median_us"] / found[1]["median_us"], 3)
    return found


def run(rank: int, options: Namespace, rendezvous: str) -> None:
    """One rank."""
    device = torch.device(options.device, *([rank] if options.device == "cuda" else []))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=options.ranks,
        device_id=device if device.type == "cuda" else None,
    )
    rows: list[Row] = []
    with torch.no_grad():
        for heads in options.heads:
            check(heads, device)
            for batch in options.batch:
                for row in rows_of(batch, heads, options.seq_len, device):
                    rows.append(row)
                    if rank == 0:
                        print(json.dumps(row), flush=True)
                        write_rows(options.out, rows)
    dist.destroy_process_group()


def main() -> None:
    parser = row_parser(__doc__, "32/8")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", nargs="+", type=int, default=[64, 32, 1])
    parser.add_argument("--seq-len", type=int, default=2**19)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        mp.spawn(run, (options, rendezvous), nprocs=options.ranks)


if __name__ == "__main__":
    main()
