"""A call of `generate` and the clock inside it; what a token is made of."""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from nsa_flex.bench.cases.pairs import FULL, TINY, forget, make_pair

# Compilation, the warm-up and the recording of a CUDA graph, launch plans; whole periods of φ.
WARM_UP = 16
SHOWN = 25  # lines of a profile


@dataclass(frozen=True)
class GenerateCase:
    """A call of `generate`.

    Args:
        cache: "static" or "dynamic".
        batch, prompt: B, and tokens of each prompt.
        steps: tokens that are timed.

    >>> GenerateCase.parse("static:8x32768", 64)
    GenerateCase(cache='static', batch=8, prompt=32768, steps=64)
    """

    cache: str
    batch: int
    prompt: int
    steps: int

    @classmethod
    def parse(cls, text: str, steps: int) -> GenerateCase:
        """Of CACHE:BATCHxTOKENS.

        Raises:
            ValueError: it is written otherwise.
        """
        cache, _, shape = text.partition(":")
        batch, _, prompt = shape.partition("x")
        if cache not in ("static", "dynamic") or not (batch.isdigit() and prompt.isdigit()):
            raise ValueError(f"case {text!r}: expected CACHE:BATCHxTOKENS, static or dynamic")
        return cls(cache, int(batch), int(prompt), steps)

    @property
    def num_new(self) -> int:
        """Tokens to generate: the prompt's, those that warm up, those that are timed."""
        return 1 + WARM_UP + self.steps

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`."""
        return {
            "max_new_tokens": self.num_new,
            "min_new_tokens": self.num_new,
            "do_sample": False,
            "cache_implementation": "static" if self.cache == "static" else None,
        }

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        return {
            "target": "generate",
            "cache": self.cache,
            "batch": self.batch,
            "seq_len": self.prompt,
            "new_tokens": self.num_new,
        }


def prompts_of(case: GenerateCase, vocab_size: int, device: torch.device) -> Tensor:
    """Random tokens (B, S), the same for both models."""
    generator = torch.Generator().manual_seed(case.prompt)
    ids = torch.randint(vocab_size, (case.batch, case.prompt), generator=generator)
    return ids.to(device)


def reserve(device: torch.device, batch: int, vocab_size: int, num_tokens: int) -> None:
    """Has torch keep memory for the logits of so many tokens, lest a timed step ask for it."""
    logits = [torch.empty(batch, vocab_size, device=device) for _ in range(num_tokens)]
    logits.clear()


class TokenClock(transformers.LogitsProcessor):
    """Stamps the start, then each call: the logits of one more token are there.

    On CUDA a stamp is an event in the stream. So a step takes what the device takes, or what the
    host needs to queue it where that is more; nothing waits for a stamp.

    Args:
        device: of the model.
        at: by number of the token (1 is the prompt's), what to call before its stamp.

    Attributes:
        logits: of each token, float32 (B, V): what `generate` made, not copies.
    """

    def __init__(
        self, device: torch.device, at: dict[int, Callable[[], object]] | None = None
    ) -> None:
        self.device, self.at = device, at or {}
        self.stamps: list[Any] = []
        self.logits: list[Tensor] = []
        self._stamp()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """`scores` as they are."""
        self.logits.append(scores)
        action = self.at.get(len(self.stamps))
        if action is not None:
            action()
        self._stamp()
        return scores

    def _stamp(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.stamps.append(event)
        else:
            self.stamps.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Of each token, the prompt's first. Waits for the device."""
        pairs = zip(self.stamps, self.stamps[1:], strict=False)
        if self.device.type != "cuda":
            return [1e3 * (after - before) for before, after in pairs]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(after) for before, after in pairs]

    def round(self, num_steps: int) -> Round:
        """The prefill, the step behind it, and the last `num_steps` tokens. Waits for the device.

        Raises:
            RuntimeError: generation ended before there were so many after the warm-up.
        """
        times = self.milliseconds()
        if len(times) < 1 + WARM_UP + num_steps:
            raise RuntimeError(
                f"{len(times)} tokens of {1 + WARM_UP + num_steps} when the time for the row ended"
            )
        return Round(times[0], times[1], times[-num_steps:])


class Round(NamedTuple):
    """Milliseconds of one call of `generate`.

    prefill_ms, first_step_ms: of the prompt's token and the next one.
    steps_ms: of the tokens that count.
    """

    prefill_ms: float
    first_step_ms: float
    steps_ms: list[float]


def columns(rounds: list[Round]) -> dict[str, Any]:
    """For a row: the median of the rounds, and quantiles over the tokens of all.

    The first step is that of the first round, which compiles.
    """
    steps = [ms for each in rounds for ms in each.steps_ms]
    means = [statistics.fmean(each.steps_ms) for each in rounds]
    low, high = (float(x) for x in np.quantile(steps, (0.2, 0.8)))
    found = {
        "median_ms": statistics.median(steps),
        "p20_ms": low,
        "p80_ms": high,
        "ms_per_token": statistics.median(means),
        "least_round_ms": min(means),
        "prefill_ms": statistics.median(each.prefill_ms for each in rounds),
        "first_step_ms": rounds[0].first_step_ms,
    }
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "round_ms": [round(value, 4) for value in means],
        "steps": len(rounds[0].steps_ms),
    }


def profile(case: GenerateCase, options: Any) -> None:
    """Print both models' tables of one case, over the tokens that a row times."""
    device = torch.device(options.device)
    pair = make_pair(TINY if options.tiny else FULL, case.prompt + case.num_new, device)
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * on_cuda]
    orders = [*["self_device_time_total"] * on_cuda, "self_cpu_time_total"]
    for who in ("nsa", "dense"):
        print(f"== {who} {case.cache} {case.batch}x{case.prompt}: {case.steps} tokens")
        model = pair.of(who)
        ids = prompts_of(case, pair.size.vocab_size, device)
        tracer = torch_profile(activities=activities)
        _run(model, ids, case, tracer.start, tracer.stop)
        for order in orders:
            print(tracer.key_averages().table(sort_by=order, row_limit=SHOWN))
        if case.cache == "dynamic":
            python = cProfile.Profile()
            _run(model, ids, case, python.enable, python.disable)
            pstats.Stats(python).sort_stats("tottime").print_stats(SHOWN)
        forget(model)


@torch.no_grad()
def _run(
    model: Any,
    ids: Tensor,
    case: GenerateCase,
    start: Callable[[], object],
    stop: Callable[[], object],
) -> None:
    """`generate` with `start` and `stop` around the tokens that count."""
    forget(model)
    clock = TokenClock(ids.device, {1 + WARM_UP: start, case.num_new: stop})
    model.generate(ids, logits_processor=[clock], **case.options())
    print(f"{statistics.fmean(clock.milliseconds()[-case.steps :]):.3f} ms a token while profiled")
