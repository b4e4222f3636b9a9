"""Times every token of `generate` from inside it: a logits processor that stamps the stream."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

# Compilation, the warm-up and the recording of a CUDA graph, launch plans; whole periods of φ.
WARM_UP = 16


def reserve(device: torch.device, batch: int, vocab_size: int, num_tokens: int) -> None:
    """Has torch keep memory for the logits of so many tokens, lest a timed step ask for it."""
    logits = [torch.empty(batch, vocab_size, device=device) for _ in range(num_tokens)]
    logits.clear()


class TokenClock(LogitsProcessor):
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
