"""Runs requests through the continuous batching of transformers, and checks their tokens."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import parse

from nsa_flex.bench.report.rows import Row

NEEDED = "5.23"
PAGE_SIZE = 256
# In standard deviations of the logits. Rounding to bfloat16 moves logits by some hundredths; a
# token that has nothing to do with the model lies as far below the best as that from the mean.
MAX_GAP = 0.25
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


@torch.no_grad()
def check_tokens(
    model: Any, prompts: list[Prompt], tokens: list[list[int]], *, exact: bool = False
) -> Row:
    """Columns of a row: how the engine's tokens compare with two other ways to them.

    With `generate`, token by token: equal in exact arithmetic, while rounding may decide between
    two of the best, after which texts differ. And with one forward pass over prompt and tokens,
    which tells for each token how far below the best it was.

    Raises:
        RuntimeError: a token was further below the best one than rounding explains; or, if
            `exact`, some are not those of `generate`.
    """
    equal, in_common, all_gaps = 0, 0, []
    for prompt, found in zip(prompts, tokens, strict=True):
        expected = _generated(model, prompt, len(found))
        equal += expected == found
        in_common += _common(expected, found)
        all_gaps += _gaps(model, prompt, found)
    worst = max(all_gaps, default=0.0)
    if not all(gap < MAX_GAP for gap in all_gaps):  # NaN is not
        raise RuntimeError(f"a token is {worst:.3f} standard deviations below the best one")
    if exact and equal < len(tokens):
        raise RuntimeError(f"{equal} of {len(tokens)} requests have the tokens of generate")
    return {
        "requests_checked": len(tokens),
        "requests_equal_to_generate": equal,
        "tokens_until_generate_differs": in_common,
        "tokens_checked": len(all_gaps),
        "tokens_best": sum(gap == 0 for gap in all_gaps),
        "worst_gap": round(worst, 4),
    }


def _generated(model: Any, prompt: Prompt, num_new: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, max_new_tokens=num_new, do_sample=False)
    return out[0, len(prompt) :].tolist()


def _common(one: list[int], other: list[int]) -> int:
    """Tokens until the first that differs."""
    for place, (a, b) in enumerate(zip(one, other, strict=True)):
        if a != b:
            return place
    return len(one)


def _gaps(model: Any, prompt: Prompt, tokens: list[int]) -> list[float]:
    """How far each token's logit was below the greatest, in standard deviations of the logits."""
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    logits = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].float()
    chosen = logits.gather(1, torch.tensor(tokens, device=model.device)[:, None])[:, 0]
    return ((logits.amax(1) - chosen) / logits.std(1)).tolist()
