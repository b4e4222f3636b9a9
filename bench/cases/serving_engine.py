"""Runs requests through transformers' continuous batching, and tells when each was done."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import parse

NEEDED = "5.23"
PAGE_SIZE = 256
Prompt = list[int]


class Done(NamedTuple):
    """A request that the engine finished, `seconds` after all were handed over."""

    tokens: list[int]
    seconds: float


class TimeOver(RuntimeError):
    """Requests were left when the time for them ended."""


def check_version() -> None:
    """That transformers has the engine that this benchmark is of.

    Raises:
        RuntimeError: it is older.
    """
    if parse(transformers.__version__) < parse(NEEDED):
        raise RuntimeError(
            f"transformers {transformers.__version__}: the continuous batching that is timed here "
            f"is that of {NEEDED}; upgrade transformers"
        )


def random_prompts(
    count: int, shortest: int, longest: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Prompts of random tokens, their lengths log-uniform from `shortest` to `longest`."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(count, generator=generator).tolist()
    ratio = math.log(longest / shortest)
    lengths = [round(shortest * math.exp(ratio * each)) for each in uniform]
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def blocks_for(lengths: list[int]) -> int:
    """Blocks of the engine that hold so many tokens at once, and half as many to spare.

    While less than a fifth of its blocks is free, the engine begins no other request.
    """
    return 3 * sum(-(-length // PAGE_SIZE) + 1 for length in lengths) // 2 + 2


@contextmanager
def engine(
    model: Any,
    lengths: list[int],
    num_new: int,
    batch_tokens: int,
    *,
    requests: int,
    shares_prefixes: bool = True,
) -> Iterator[Any]:
    """A running manager of `model`, greedy, with room for requests of `lengths` tokens in all.

    CUDA graphs are captured before it is given. What is left undone at the end is dropped.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig
    from transformers.generation.continuous_batching.utils import WorkloadHints
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    batching = ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=blocks_for(lengths),
        max_batch_tokens=batch_tokens,
        allow_block_sharing=shares_prefixes,
        # Kernels from the hub would be fetched.
        auto_switch_to_flash=is_flash_attn_2_available() or is_flash_attn_3_available(),
    )
    manager = model.init_continuous_batching(
        GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1),
        batching,
        WorkloadHints(max(lengths) - num_new, num_new, requests),
    )
    with torch.no_grad():
        manager.warmup()
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(hard_stop=True, timeout=60)
        manager.destroy()


def serve(
    manager: Any, prompts: list[Prompt], num_new: int, max_seconds: float = math.inf
) -> list[Done]:
    """All requests at once; what became of each, in order.

    Raises:
        TimeOver: `max_seconds` were over.
        RuntimeError: one failed, or the engine stopped.
    """
    start = time.perf_counter()
    names = manager.add_requests(prompts, max_new_tokens=num_new)
    found: dict[str, Done] = {}
    while len(found) < len(names):
        result = manager.get_result(timeout=0.5)
        seconds = time.perf_counter() - start
        if result is not None and result.error is not None:
            raise RuntimeError(f"a request failed: {result.error}")
        if result is not None and result.is_finished():
            found[result.request_id] = Done(result.generated_tokens, seconds)
        done = f"{len(found)} of {len(names)} requests in {seconds:.0f} s"
        if len(found) < len(names) and seconds > max_seconds:
            raise TimeOver(f"time was over: {done}")
        if not (manager.is_running() or result):
            raise RuntimeError(f"the engine stopped: {done}")
    return [found[name] for name in names]
