"""Thousands of compiled decode steps: memory stays, nothing is compiled again, nothing waits."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers
from torch import Tensor

from nsa_flex import NSACache
from nsa_flex.bench.cases.generate_models import FULL, TINY, forget, make_pair
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.report.rows import Notebook, Row

PROMPT = 512
WARM_UP = 20


@torch.no_grad()
def long_run(options: Any) -> None:
    """`options.steps` steps of a patched model on a static `NSACache`, as one row.

    Raises:
        RuntimeError: memory or the number of compiled graphs changed, a graph was skipped, or (on
            CUDA) the host waited for the device.
    """
    device, steps = torch.device(options.device), options.steps
    pair = make_pair(TINY if options.tiny else FULL, PROMPT + WARM_UP + steps, device)
    model = pair.nsa
    forget(model)
    counters = torch._dynamo.utils.counters
    counters.clear()
    cache = NSACache(model, max_length=PROMPT + WARM_UP + steps)
    ids = torch.randint(pair.size.vocab_size, (1, PROMPT), device=device)
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    position = torch.tensor([[PROMPT]], device=device)
    backend = "inductor" if device.type == "cuda" else "eager"
    mode = "reduce-overhead" if device.type == "cuda" else None
    compiled = torch.compile(model, fullgraph=True, backend=backend, mode=mode)

    def step(token: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        logits = compiled(token, past_key_values=cache, position_ids=position).logits
        position.add_(1)
        return logits[:, -1:].argmax(-1)

    for _ in range(WARM_UP):
        token = step(token)
    before = _state(device)
    start = time.perf_counter()
    _forbid_waiting(device, "error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for _ in range(steps):
                token = step(token)
    finally:
        _forbid_waiting(device, "default")
    after = _state(device)
    seconds = time.perf_counter() - start
    row: Row = {
        "case": f"generate/steps {pair.name} {steps}",
        **pair.fields("nsa"),
        "target": "generate-steps",
        "batch": 1,
        "seq_len": PROMPT,
        "steps": steps,
        "ms_per_token": round(1e3 * seconds / steps, 4),
        **{f"{name}_before": value for name, value in before.items()},
        **{f"{name}_after": value for name, value in after.items()},
        "status": "ok" if before == after else "failed",
        "reason": None if before == after else f"{before} became {after}",
    }
    notebook = Notebook(
        options.out, {**describe(device), "transformers": transformers.__version__}
    )
    print(notebook.add([row])[0])
    if before != after:
        raise RuntimeError(row["reason"])


def _state(device: torch.device) -> dict[str, int]:
    """Bytes that are allocated, graphs compiled so far, captures that torch gave up."""
    counters = torch._dynamo.utils.counters
    found = {
        "graphs": counters["stats"]["unique_graphs"],
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }
    if device.type == "cuda":
        torch.cuda.synchronize()
        found["allocated"] = torch.cuda.memory_allocated()
        found["reserved"] = torch.cuda.memory_reserved()
    return found


def _forbid_waiting(device: torch.device, mode: str) -> None:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode(mode)
