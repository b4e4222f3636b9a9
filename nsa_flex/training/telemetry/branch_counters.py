"""Which backend ran each branch, how often, and why not the first of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from nsa_flex.dispatch import CUDA_ORDER, Choice
from nsa_flex.training.telemetry.observe import Observation

# Reasons of a choice that stands for itself: asked for, or measured to be the fastest.
_MEANT = ("asked for", "fastest here by nsa-flex tune")


def is_fallback(choice: Choice) -> bool:
    """Whether another backend runs than the table's first, and nobody asked for it."""
    return choice.backend != CUDA_ORDER[choice.branch][0] and choice.reason not in _MEANT


def counted(seen: Iterable[Observation], calls: int) -> list[dict[str, Any]]:
    """Rows of fallback_counters.csv, but for session and step.

    Args:
        seen: one entry a layer.
        calls: forward calls of the model since the rows before.
    """
    layers = Counter(choice for each in seen for choice in each.choices.values())
    return [
        {
            "branch": choice.branch,
            "backend": choice.backend,
            "first": CUDA_ORDER[choice.branch][0],
            "fallback": int(is_fallback(choice)),
            "layers": count,
            "calls": calls * count,
            "reason": choice.reason,
        }
        for choice, count in layers.items()
    ]


def check_strict(seen: Iterable[Observation]) -> None:
    """Raise ValueError if a layer would not run on the first backend of the table."""
    for each in seen:
        for choice in each.choices.values():
            if is_fallback(choice):
                raise ValueError(
                    f"strict: the {choice.branch} branch of {each.name} runs on {choice.backend}, "
                    f"expected {CUDA_ORDER[choice.branch][0]} ({choice.reason}); "
                    "change what the reason names, or pass strict=False"
                )


def backends_of(seen: Iterable[Observation]) -> dict[str, str]:
    """Branch to its backend, several joined by a slash."""
    found: dict[str, list[str]] = {}
    for each in seen:
        for branch, choice in each.choices.items():
            if choice.backend not in found.setdefault(branch, []):
                found[branch].append(choice.backend)
    return {branch: "/".join(names) for branch, names in found.items()}
