"""Whether two trees launch the same kernels with the same bits, over random calls of every route.

A refactoring records the calls on the tree before it and on the tree after it, on one GPU, and
compares: each call's CUDA kernels in order, and a hash of each output and gradient. Gradients are
hashed in deterministic mode, where nothing is added by atomics; the kernels of both modes count.

Example: python -m nsa_flex.bench.tools.same_bits record before.json --jobs 12
Example: python -m nsa_flex.bench.tools.same_bits compare before.json after.json
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import multiprocessing
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from nsa_flex import NSAConfig, nsa_attention
from nsa_flex.bench.command_line import parser_of
from nsa_flex.compression import mean_of_blocks, split_segments

_nsa_attention: Any = nsa_attention  # whose overloads take no mappings
NUM_CALLS = 300
DIMS = ((64, 64), (128, 128), (128, 128), (192, 128), (32, 48), (80, 80), (256, 256))
GROUPS = (1, 2, 3, 4, 4, 6, 7, 8, 16, 16, 24)
LENGTHS = (1, 31, 64, 200, 700, 1024, 1290, 1500, 2048, 2101, 4096, 5003, 8192, 8210, 12001)
CONFIGS = (
    NSAConfig(),
    NSAConfig(),
    NSAConfig(window_size=129),
    NSAConfig(16, 16, 16, 16, 0, 1, 128),
    NSAConfig(32, 16, 128, 8),
    NSAConfig(num_selected_blocks=32, num_local_blocks=1),
)
DTYPES = ("bfloat16", "bfloat16", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Call:
    """One call of `nsa_attention`. Lengths in tokens; documents: where each begins, or None."""

    batch: int
    num_kv_heads: int
    group: int
    num_tokens: int
    head_dim: int
    value_head_dim: int
    dtype: str
    config: int
    documents: tuple[int, ...] | None
    tells_longest: bool
    offset: int | None
    needs_grad: bool
    own_window_keys: bool
    seed: int


def random_call(seed: int) -> Call:
    """The call of a seed, the same on every machine."""
    draw = random.Random(seed)
    group = draw.choice(GROUPS)
    head_dim, value_head_dim = draw.choice(DIMS)
    dtype = draw.choice(DTYPES)
    length = draw.choice(LENGTHS)
    if dtype == "float32" or head_dim > 192:  # some branches of these form all scores
        length = min(length, 2101)
    kind = draw.choice(("row", "row", "documents", "documents", "offset"))
    config = draw.randrange(len(CONFIGS))
    documents = None
    if kind == "documents":
        size = CONFIGS[config].select_block_size
        longest = draw.choice((3 * size, 1024, 2048, 1 << 20))
        documents = _starts(draw, length, size, longest)
    return Call(
        batch=draw.choice((1, 1, 1, 2, 3)) if length < 5000 else 1,
        num_kv_heads=draw.choice((1, 2)),
        group=group,
        num_tokens=length,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
        dtype=dtype,
        config=config,
        documents=documents,
        tells_longest=draw.random() < 0.5,
        offset=draw.choice((0, 5, 777, 3000)) if kind == "offset" else None,
        needs_grad=draw.random() < 0.75,
        own_window_keys=draw.random() < 0.2,
        seed=seed,
    )


def _starts(draw: random.Random, length: int, size: int, longest: int) -> tuple[int, ...]:
    """Multiples of `size`, at most `longest` apart."""
    starts = [0]
    while starts[-1] < length:
        starts.append(starts[-1] + size * draw.randint(1, max(1, min(longest, length) // size)))
    return tuple(starts[:-1]) or (0,)


def run(call: Call) -> dict[str, Any]:
    """The kernels of a call, and a hash of each of its results, or the error that refused it."""
    inputs, options = _inputs(call)
    _attend(call, inputs, options)  # compiles, and makes the plans
    kernels, hashes = {}, []
    for deterministic in (False, True) if call.needs_grad else (False,):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            results = _attend(call, inputs, options)
            torch.cuda.synchronize()
        name = "deterministic" if deterministic else "default"
        events = sorted(profile.events(), key=lambda event: event.time_range.start)
        kernels[name] = [event.name for event in events]
        hashes = [_hash(x) for x in results]
    torch.use_deterministic_algorithms(False)
    return {"call": asdict(call), "kernels": kernels, "hashes": hashes}


def _inputs(call: Call) -> tuple[dict[str, Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(call.seed)
    dtype, config = getattr(torch, call.dtype), CONFIGS[call.config]

    def normal(heads: int, tokens: int, dim: int) -> Tensor:
        x = torch.randn(call.batch, tokens, heads, dim, generator=generator)
        return x.to("cuda", dtype).transpose(1, 2)

    num_heads, tokens = call.num_kv_heads * call.group, call.num_tokens
    num_keys = tokens if call.offset is None else tokens + call.offset
    inputs = {
        "query": normal(num_heads, tokens, call.head_dim),
        "key": normal(call.num_kv_heads, num_keys, call.head_dim),
        "value": normal(call.num_kv_heads, num_keys, call.value_head_dim),
        "gates": normal(num_heads, tokens, 3),
    }
    for name in ("key", "value"):
        blocks = mean_of_blocks(split_segments(inputs[name], config), config)
        inputs[f"compressed_{name}"] = blocks.to(dtype)
    if call.own_window_keys:
        inputs |= {f"sliding_{name}": inputs[name].clone() for name in ("key", "value")}
    options: dict[str, Any] = {"config": config}
    if call.offset is not None:
        options["query_offset"] = call.offset
    if call.documents is not None:
        edges = torch.tensor(call.documents, dtype=torch.int32)
        token = torch.arange(tokens, dtype=torch.int32)
        start = edges[torch.searchsorted(edges, token, right=True) - 1]
        options["document_start"] = start.repeat(call.batch, 1).cuda()
        if call.tells_longest:
            options["max_document_length"] = longest_document(call)
    return inputs, options


def longest_document(call: Call) -> int:
    """Tokens of the longest document of packed rows."""
    assert call.documents is not None
    ends = [*call.documents[1:], call.num_tokens]
    return max(end - start for start, end in zip(call.documents, ends, strict=True))


def _attend(call: Call, inputs: dict[str, Tensor], options: dict[str, Any]) -> list[Tensor]:
    """Output, blocks, log-sum-exps and gradients."""
    leaves = {name: x.detach().requires_grad_(call.needs_grad) for name, x in inputs.items()}
    with torch.set_grad_enabled(call.needs_grad):
        out, aux = _nsa_attention(**leaves, **options, return_aux=True)
    results = [out.detach(), aux.blocks, *aux.lse]
    if call.needs_grad:
        grad = torch.linspace(-1, 1, out.numel(), device="cuda").to(out.dtype).view_as(out)
        results += torch.autograd.grad(out, list(leaves.values()), grad)
    return results


def _hash(x: Tensor) -> str:
    plain = x.detach().cpu().clone(memory_format=torch.contiguous_format)  # strides of 1s too
    data = plain.view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()[:16]


def record(path: Path, num_calls: int, jobs: int) -> None:
    """Runs the calls in `jobs` processes of one GPU and writes what they gave."""
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        found = list(tqdm(pool.map(_run_seed, range(num_calls)), total=num_calls, unit="call"))
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    path.write_text(json.dumps({"machine": machine, "calls": found}, indent=1) + "\n")


def _run_seed(seed: int) -> dict[str, Any]:
    call = random_call(seed)
    try:
        return run(call)
    except ValueError as error:
        return {"call": asdict(call), "error": str(error)}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each call whose kernels, bits or refusal are others."""
    lines = []
    if before["machine"] != after["machine"]:
        lines.append(f"recorded on {before['machine']} and on {after['machine']}")
    for a, b in zip(before["calls"], after["calls"], strict=True):
        for what in ("call", "error", "kernels", "hashes"):
            if a.get(what) != b.get(what):
                seed = a["call"]["seed"]
                lines.append(f"call {seed}: {what}: {a.get(what)} became {b.get(what)}")
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: the same; 1: something differs."""
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--calls", type=int, default=NUM_CALLS)
    recording.add_argument("--jobs", type=int, default=8)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args(arguments)
    if options.command == "record":
        record(options.file, options.calls, options.jobs)
        return 0
    lines = differences(*(json.loads(x.read_text()) for x in (options.before, options.after)))
    print("\n".join(lines) or "the same kernels and the same bits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
