"""Trains the demo's Llama on long rows and records what one of its layers chooses.

    python -m nsa_flex.bench.tools.record_choices --kv-heads 4

writes bench/results/choices_demo_g4.npz: 16 query heads, G = 4 of them on a KV head. A row is a
whole 16k tokens of Python's standard library, so that there are 256 blocks to choose 16 from.
What is kept is the choice of two KV heads (of the one, if there is one) of a middle layer on
held-out text, as it is; the JSON beside it tells the loss and how much the choices of neighbours
overlap in every layer.
Needs a CUDA device and transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa_flex.bench.cases.patterns import neighbour_overlap, recorded_file
from nsa_flex.bench.measure import machine
from nsa_flex.cli.demo_model import GPU, Size, Trainee, build_models, train
from nsa_flex.cli.demo_text import even_windows, random_windows, read_corpus
from nsa_flex.selection import choose_blocks

KEPT_HEADS = 2


def train_model(size: Size, device: torch.device, seed: int) -> tuple[Trainee, Tensor]:
    """A patched Llama after `size.steps` steps, and held-out rows int64 (rows, S)."""
    corpus = read_corpus(seed)
    generator = torch.Generator().manual_seed(seed)
    count = size.steps * size.batch_size
    batches = random_windows(corpus.training, count, size.seq_len, generator).to(device)
    held_out = even_windows(corpus.held_out, size.held_out_rows, size.seq_len).to(device)
    patched, _ = build_models(size, seed, device)
    trainee = Trainee("NSA", patched, size)
    batches = batches.unflatten(0, (size.steps, size.batch_size))
    seconds = trainee.compile(batches[0])
    print(f"compiled in {seconds:.1f} s", file=sys.stderr)
    train([trainee], batches, held_out, lambda trainees: None)
    print(f"trained: {trainee.held_out}", file=sys.stderr)
    return trainee, held_out


def choices(model: Any, call: Callable[[], Any]) -> list[Tensor]:
    """What each layer of a patched Llama chooses while `call` runs it: int32 (B, Hkv, S, n) each.

    Computed again from the queries and keys that its NSA is called with. Let `call` keep gradients
    on though none is taken: the kernels are then those of the training.
    """
    found: list[Tensor] = []

    @torch.no_grad()
    def look(layer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        names = ("hidden_states", "query", "key", "value")
        given = {**dict(zip(names, arguments, strict=False)), **named}
        key = given["key"].to(given["value"].dtype)
        blocks = choose_blocks(
            given["query"].to(key.dtype),
            layer.compress_key(key),
            config=layer.config,
            scale=key.shape[-1] ** -0.5,
            num_blocks=layer.config.num_select_blocks(key.shape[2]),
            positions=torch.arange(key.shape[2], device=key.device)[None],
        )
        found.append(blocks)

    hooks = [
        layer.self_attn.nsa.register_forward_pre_hook(look, with_kwargs=True)
        for layer in model.model.layers
    ]
    call()
    for hook in hooks:
        hook.remove()
    return found


def main() -> None:
    """Train, record, report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="default: where the benchmark looks for it")
    parser.add_argument("--kv-heads", type=int, default=GPU.num_kv_heads)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seq-len", type=int, default=16384)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    device = torch.device("cuda")
    size = dataclasses.replace(
        GPU,
        num_kv_heads=arguments.kv_heads,
        steps=arguments.steps,
        seq_len=arguments.seq_len,
        batch_size=1,
        held_out_rows=2,
    )
    start = time.perf_counter()
    trainee, held_out = train_model(size, device, arguments.seed)
    tables = choices(trainee.model, lambda: trainee.loss(held_out[:1]))
    middle = len(tables) // 2
    kept = tables[middle][0, :KEPT_HEADS].to(torch.int16).cpu().numpy()
    out = arguments.out or recorded_file(size.num_query_heads // size.num_kv_heads)
    out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(out, blocks=kept, block_size=size.config.select_block_size)
    report = {
        "model": f"Llama, {trainee.model.num_parameters():,} parameters, {size.num_layers} layers",
        "heads": f"{size.num_query_heads}/{size.num_kv_heads}",
        "head_dim": size.head_dim,
        "steps": size.steps,
        "tokens_per_step": size.seq_len,
        "held_out_loss": {str(step): loss for step, loss in trainee.held_out.items()},
        "layer": middle,
        "overlap_by_layer": [round(neighbour_overlap(table), 4) for table in tables],
        "overlap_kept": round(neighbour_overlap(tables[middle][:, :KEPT_HEADS]), 4),
        "seconds": round(time.perf_counter() - start, 1),
        **machine.describe(device),
    }
    out.with_suffix(".json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
