"""Data parallel training against one GPU: tokens a second of 8B-shaped layers, losses on text.

    torchrun --nproc-per-node 2 -m nsa_flex.bench.tools.data_parallel --out data_parallel.json

trains on one GPU alone ("one"), then on all with DDP and with FSDP2: some steps of decoder layers
as wide as Llama 3 8B's on one row of 32k tokens a rank, then 300 steps of the demo's Llama on the
demo's text, whose batches are the same in all three runs. The JSON is written after each run; a
PNG beside it draws both. Needs CUDA devices and transformers.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nsa_flex
from nsa_flex.bench.measure import machine
from nsa_flex.bench.report.data_parallel import draw
from nsa_flex.cli.demo_model import GPU, Size, build_models
from nsa_flex.cli.demo_text import random_windows, read_corpus
from nsa_flex.config import NSAConfig

KINDS = ("one", "ddp", "fsdp")
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Layers:
    """A stack of Llama layers in one dtype, and how long it is timed.

    Args:
        seq_len: tokens of the one row that each rank has.
        steps: that are timed, after `WARM_UP_STEPS`.
    """

    num_layers: int = 8
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_query_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    config: NSAConfig = field(default_factory=NSAConfig)
    seq_len: int = 32768
    steps: int = 5
    dtype: torch.dtype = torch.bfloat16
    compiler: str = "inductor"


TEXT = replace(GPU, steps=300)


def wrap(kind: str, model: Any, compiler: str) -> nn.Module:
    """Compile each decoder layer, then make it data parallel."""
    for layer in model.model.layers:
        layer.compile(backend=compiler, fullgraph=True)
    if kind == "ddp":
        ids = [model.device.index] if model.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    if kind == "fsdp":
        mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def speed(kind: str, size: Layers, device: torch.device) -> dict[str, Any]:
    """A row: median seconds of a whole step, and tokens a second on all ranks that work."""
    torch.manual_seed(0)
    model = wrap(kind, _stack(size, device), size.compiler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    ids = torch.randint(256, (1, size.seq_len), device=device)
    seconds = []
    for _ in range(WARM_UP_STEPS + size.steps):
        _synchronize(device)
        start = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    timed = sorted(seconds[WARM_UP_STEPS:])
    median = timed[len(timed) // 2]
    ranks = 1 if kind == "one" else dist.get_world_size()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {
        "kind": kind,
        "ranks": ranks,
        "seconds": median,
        "least": timed[0],
        "most": timed[-1],
        "tokens_per_second": ranks * size.seq_len / median,
        "peak_bytes": peak,
    }


def _stack(size: Layers, device: torch.device) -> Any:
    """Patched, in training mode, with an embedding of bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_query_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=size.seq_len,
        bos_token_id=None,
        eos_token_id=None,
    )
    with device:
        model = LlamaForCausalLM(config)
    return nsa_flex.patch(model.to(size.dtype).train(), size.config)


def losses(kind: str, size: Size, device: torch.device, seed: int) -> list[float]:
    """Loss of each step on the demo's text; `batch_size` rows a step, shared by all ranks."""
    generator = torch.Generator().manual_seed(seed)
    rows = random_windows(
        read_corpus(seed).training, size.steps * size.batch_size, size.seq_len, generator
    )
    model = wrap(kind, build_models(size, seed, device)[0], size.compiler)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
    )
    warm_up = max(1, size.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda x: min(1, (x + 1) / warm_up))
    found: list[Tensor] = []
    for batch in rows.split(size.batch_size):
        own = batch if kind == "one" else batch.chunk(dist.get_world_size())[dist.get_rank()]
        ids = own.to(device)
        with torch.autocast(device.type, dtype=size.dtype, enabled=size.dtype != torch.float32):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    curve = torch.stack(found)
    if kind != "one":
        dist.all_reduce(curve)
        curve /= dist.get_world_size()
    return curve.tolist()


def measure(
    layers: Layers,
    text: Size,
    device: torch.device,
    seed: int = 0,
    tell: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """All runs; the whole result on rank 0, part of it on the others.

    The two runs on one GPU are at the same time, on the first rank and on the last.

    Args:
        tell: called on rank 0 with what there is after each run.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    shared = {"layers": _plain(layers), "text": _plain(text), **machine.describe(device)}
    found: dict[str, Any] = {"speed": [], "losses": {}, **shared}
    curve: list[Any] = [None]
    if rank == 0:
        found["speed"].append(speed("one", layers, device))
        _forget(device)
    if rank == last:
        curve[0] = losses("one", text, device, seed)
        _forget(device)
    dist.broadcast_object_list(curve, last)
    found["losses"]["one"] = curve[0]
    for kind in KINDS[1:]:
        found["speed"].append(speed(kind, layers, device))
        _forget(device)
        _tell(found, tell)
    for kind in KINDS[1:]:
        found["losses"][kind] = losses(kind, text, device, seed)
        _forget(device)
        _tell(found, tell)
    return found


def _tell(found: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Rank 0 has all speeds: it compares them with one GPU's."""
    dist.barrier()
    if dist.get_rank() != 0:
        return
    first = found["speed"][0]["tokens_per_second"]
    for row in found["speed"]:
        row["efficiency"] = row["tokens_per_second"] / (first * row["ranks"])
    tell(found)


def _plain(size: Layers | Size) -> dict[str, Any]:
    return {**asdict(size), "dtype": str(size.dtype).removeprefix("torch.")}


def _forget(device: torch.device) -> None:
    gc.collect()  # DDP and its model point at one another
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data_parallel.json"))
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def write(found: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")
        print({row["kind"]: round(row["tokens_per_second"]) for row in found["speed"]}, flush=True)

    found = measure(Layers(), TEXT, device, tell=write)
    if dist.get_rank() == 0:
        draw(found, arguments.out.with_suffix(".png"))
        for row in found["speed"]:
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
        for kind, curve in found["losses"].items():
            print(f"{kind}: loss {curve[0]:.4f} -> {sum(curve[-20:]) / len(curve[-20:]):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
