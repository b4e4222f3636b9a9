"""Times of the same calls in two checkouts, in turn on one GPU: what did a change cost?

    python -m nsa_flex.bench.tools.two_trees --trees ../before . --out two_trees.json

Each round runs a group once in each checkout, in a process of its own that imports nothing but
public names of it; a round that is not timed compiles. Rows have the median of the rounds for each
tree, and the second over the first; they are written after every round. Groups:

    headline  nsa_attention against itself, 8k to 128k tokens, three head counts
    packed    65536 tokens of equal and of ragged documents
    short     rows of 512 to 2048 tokens, and 16 queries on a long past
    host      milliseconds until a call of 2048 tokens returns, from an idle device
    generate  ms per token of a patched Llama's `generate`, growing and static cache
    model     a training step of 125M parameters, layers compiled

Times are wall times of a caller over a burst of calls; bytes are at the peak of forward and
backward above inputs. Without CUDA sizes are tiny, and say nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

GROUPS = ("headline", "packed", "short", "host", "generate", "model")
BURST_MS = 25.0  # of calls between two waits
Row = dict[str, Any]


class Runner:
    """The calls of one group in the checkout that is imported; each row is printed at once.

    Args:
        compile_only: run each call once.
        milliseconds: about how long each measurement repeats.
    """

    def __init__(self, compile_only: bool, milliseconds: float) -> None:
        import torch

        self.compile_only, self.milliseconds = compile_only, milliseconds
        self.tiny = not torch.cuda.is_available()
        self.device = "cpu" if self.tiny else "cuda"
        torch.manual_seed(0)

    def run(self, group: str) -> None:
        getattr(self, group)()

    def headline(self) -> None:
        for tokens in (8192, 32768, 65536, 131072):
            for heads in ((64, 4), (32, 8), (16, 16)):
                self.core(f"{heads[0]}/{heads[1]} {tokens}", heads, tokens)

    def packed(self) -> None:
        import torch

        for heads in ((64, 4), (32, 8), (16, 16)):
            for length in (8192, 4096, 1024):
                start = torch.arange(65536) // length * length
                name = f"{heads[0]}/{heads[1]} documents of {length}"
                self.core(name, heads, 65536, start=start)
                if length == 1024:
                    self.core(f"{name}, told", heads, 65536, start=start, longest=1024)
            for count in (16, 64):
                cuts = torch.rand(count - 1, generator=torch.Generator().manual_seed(count))
                begins = torch.cat([torch.zeros(1), cuts.sort().values]) * 1024 // 1 * 64
                which = torch.searchsorted(begins, torch.arange(65536.0), right=True) - 1
                name = f"{heads[0]}/{heads[1]} {count} ragged documents"
                self.core(name, heads, 65536, start=begins.long()[which])

    def short(self) -> None:
        for heads, dim in (((12, 2), 64), ((32, 8), 128)):
            for batch, tokens in ((16, 512), (16, 1024), (16, 2048), (1, 1024), (1, 2048)):
                name = f"{heads[0]}/{heads[1]} {batch} x {tokens}"
                self.core(name, heads, tokens, batch=batch, dim=dim)
        self.core("32/8 16 queries after 32768", (32, 8), 16, past=32768)

    def core(
        self,
        name: str,
        heads: tuple[int, int],
        tokens: int,
        *,
        batch: int = 1,
        dim: int = 128,
        start: Any = None,
        longest: int | None = None,
        past: int = 0,
    ) -> None:
        """Rows of `nsa_attention` without gradients and with the backward; past: without."""
        import torch

        from nsa_flex import nsa_attention

        leaves, options = self.arguments(heads, tokens, batch, dim, past)
        if start is not None:
            kept = start[: tokens if not self.tiny else 256].to(self.device)[None]
            options |= {"document_start": kept, "max_document_length": longest}
        if past:
            options |= {"query_offset": leaves[1].shape[2] - leaves[0].shape[2]}

        def forward() -> None:
            with torch.no_grad():
                nsa_attention(*leaves, **options)

        row: Row = {"call": name, "forward_ms": self.timed(forward)}
        if not past:
            grad = torch.ones_like(leaves[0])

            def step() -> None:
                torch.autograd.grad(nsa_attention(*leaves, **options), leaves, grad)

            row["forward_backward_ms"] = self.timed(step)
            row["peak_bytes"] = self.peak(step)
        print(json.dumps(row), flush=True)

    def arguments(
        self, heads: tuple[int, int], tokens: int, batch: int, dim: int, past: int = 0
    ) -> tuple[list[Any], dict[str, Any]]:
        """Leaves of a call, in memory order (B, S, H, D), and its configuration."""
        import torch

        from nsa_flex import NSAConfig

        config = NSAConfig()
        if self.tiny:
            config = NSAConfig(8, 4, 8, 4, window_size=16)
            heads, batch, dim, tokens, past = (4, 2), 1, 16, min(tokens, 256), min(past, 64)
        keys = past + tokens
        blocks = config.num_compressed_blocks(keys)
        sizes = [(heads[0], tokens)] + [(heads[1], keys)] * 2 + [(heads[1], blocks)] * 2
        kind: Any = {
            "device": self.device,
            "dtype": torch.float32 if self.tiny else torch.bfloat16,
        }
        leaves = [torch.randn((batch, s, h, dim), **kind).transpose(1, 2) for h, s in sizes]
        leaves.append(torch.rand((batch, tokens, heads[0], 3), **kind).transpose(1, 2))
        return [x.requires_grad_() for x in leaves], {"config": config}

    def host(self) -> None:
        import torch

        from nsa_flex import nsa_attention

        def whole(*leaves: Any) -> Any:
            return nsa_attention(*leaves, **options)

        for heads in ((64, 4), (32, 8)):
            leaves, options = self.arguments(heads, 2048, 1, 128)
            grad = torch.ones_like(leaves[0])
            for kind, call in (("eager", whole), ("compiled", torch.compile(whole))):

                def step(call: Callable[..., Any] = call) -> None:
                    torch.autograd.grad(call(*leaves), leaves, grad)  # noqa: B023

                row = {"call": f"{heads[0]}/{heads[1]} 2048 {kind}"}
                print(json.dumps(row | {"host_ms": self.until_returned(step)}), flush=True)

    def generate(self) -> None:
        import torch

        model = self.llama(4096, 14336, 4, (32, 8), 128, torch.bfloat16).eval()
        ids = torch.randint(256, (1, 64 if self.tiny else 8192), device=self.device)
        count = 4 if self.tiny else 64
        for cache in ("dynamic", "static"):
            options: dict[str, Any] = {"do_sample": False, "disable_compile": self.tiny}
            if cache == "static":
                options["cache_implementation"] = cache
            # Twice as many tokens less once as many: the prefill cancels.
            seconds = []
            for tokens in (count, 2 * count):

                def run(tokens: int = tokens, options: dict[str, Any] = options) -> None:
                    model.generate(ids, min_new_tokens=tokens, max_new_tokens=tokens, **options)

                seconds.append(self.best(run))
            each = 1e3 * (seconds[1] - seconds[0]) / count
            print(json.dumps({"call": f"{cache} cache", "ms_per_token": each}), flush=True)

    def model(self) -> None:
        import torch

        model = self.llama(768, 2048, 12, (12, 2), 64, torch.float32)
        for layer in () if self.tiny else model.model.layers:
            layer.compile(dynamic=False)
        for batch, length in ((1, 64),) if self.tiny else ((16, 2048), (1, 2048)):
            ids = torch.randint(256, (batch, length), device=self.device)

            def step(ids: Any = ids) -> None:
                model.zero_grad(set_to_none=True)
                with torch.autocast(self.device, torch.bfloat16):
                    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

            row = {"call": f"125M {batch} x {length}", "step_ms": self.timed(step)}
            print(json.dumps(row | {"peak_bytes": self.peak(step)}), flush=True)

    def llama(
        self, width: int, mlp: int, layers: int, heads: tuple[int, int], dim: int, dtype: Any
    ) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        import nsa_flex

        if self.tiny:
            width, mlp, layers, heads, dim = 64, 64, 2, (4, 2), 16
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=layers,
            num_attention_heads=heads[0],
            num_key_value_heads=heads[1],
            head_dim=dim,
            max_position_embeddings=16384,
            eos_token_id=None,
        )
        with torch.device(self.device):
            model = LlamaForCausalLM(config)
        return nsa_flex.patch(model.to(dtype))

    def wait(self) -> None:
        import torch

        if not self.tiny:
            torch.cuda.synchronize()

    def seconds_of(self, call: Callable[[], object], times: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        self.wait()
        return time.perf_counter() - start

    def timed(self, call: Callable[[], object]) -> float:
        """Median over bursts of a call's wall milliseconds."""
        once = 1e3 * self.seconds_of(call, 1)
        if self.compile_only or self.tiny:
            return once
        once = 1e3 * min(self.seconds_of(call, 1) for _ in range(3))
        times = max(1, int(BURST_MS / once))
        bursts = max(3, int(self.milliseconds / (times * once)))
        return statistics.median(1e3 * self.seconds_of(call, times) / times for _ in range(bursts))

    def until_returned(self, call: Callable[[], object]) -> float:
        """Median milliseconds until a call returns, from an idle device."""
        taken = []
        for _ in range(1 if self.compile_only else 60):
            self.wait()
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
        return statistics.median(taken[len(taken) // 5 :])

    def best(self, call: Callable[[], object]) -> float:
        """Seconds of the fastest of three calls after two that warm up."""
        if self.compile_only or self.tiny:
            return self.seconds_of(call, 1)
        self.seconds_of(call, 2)
        return min(self.seconds_of(call, 1) for _ in range(3))

    def peak(self, call: Callable[[], object]) -> int | None:
        import torch

        if self.tiny:
            return None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before


def start(tree: Path, group: str, *options: str) -> subprocess.Popen[str]:
    """A process that runs one group in `tree`; rows on stdout."""
    paths = [str(tree.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), "--group", group, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
    )


def rows_of(process: subprocess.Popen[str]) -> list[Row]:
    """What it printed; RuntimeError if it failed."""
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}")
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def compare(
    trees: list[Path], group: str, rounds: int, milliseconds: float
) -> Iterator[list[Row]]:
    """After each round, the rows of a group: medians of the rounds so far, and their ratios."""
    for process in [start(tree, group, "--compile-only") for tree in trees]:
        rows_of(process)
    found: list[list[list[Row]]] = [[], []]
    for _ in range(rounds):
        for of_tree, tree in zip(found, trees, strict=True):
            of_tree.append(rows_of(start(tree, group, "--milliseconds", str(milliseconds))))
        yield summary(group, found)


def summary(group: str, found: list[list[list[Row]]]) -> list[Row]:
    """Rows of both trees by round as one row a call: [before, after] and after / before.

    >>> rounds = [[[{"call": "a", "ms": 2.0}]], [[{"call": "a", "ms": 3.0}]]]
    >>> summary("short", rounds)
    [{'group': 'short', 'call': 'a', 'ms': [2.0, 3.0], 'ms_ratio': 1.5}]
    """
    rows = []
    for number, first in enumerate(found[0][0]):
        row: Row = {"group": group, "call": first["call"]}
        for column in first:
            pair = [[each[number][column] for each in of_tree] for of_tree in found]
            if column != "call" and None not in pair[0] + pair[1]:
                before, after = (statistics.median(values) for values in pair)
                row[column] = [round(before, 4), round(after, 4)]
                row[f"{column}_ratio"] = round(after / before, 4)
        rows.append(row)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trees", nargs=2, type=Path, help="two checkouts, the older first")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--rounds", type=int, default=3, help="of both trees in turn")
    parser.add_argument("--milliseconds", type=float, default=200.0, help="of each measurement")
    parser.add_argument("--out", type=Path, help="JSON file of rows")
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        Runner(arguments.compile_only, arguments.milliseconds).run(arguments.group)
        return
    if not arguments.trees or not arguments.out:
        parser.error("--trees and --out are needed")
    import torch

    from nsa_flex.bench.measure import machine

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    about = {"device": machine.device_name(device), "torch": torch.__version__}
    done: list[Row] = []
    for group in arguments.groups:
        rows: list[Row] = []
        for rows in compare(arguments.trees, group, arguments.rounds, arguments.milliseconds):
            text = json.dumps({**about, "rows": done + rows}, indent=1)
            arguments.out.write_text(text + "\n")
        done += rows
        print(*map(json.dumps, rows), sep="\n", flush=True)


if __name__ == "__main__":
    main()
