"""A call of `generate` that is timed, and its prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.bench.cases.generate_clock import WARM_UP


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
