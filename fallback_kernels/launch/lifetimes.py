"""From when to when a launch plan uses a register, and when its memory is free again."""

from __future__ import annotations

from typing import Any, NamedTuple

from nsa_flex.fallback_kernels.launch.packing import (
    CompiledLaunch,
    InterpretedLaunch,
    PackedLaunch,
)
from nsa_flex.fallback_kernels.launch.steps import (
    Allocation,
    Fork,
    Join,
    OnStream,
    Operation,
    Release,
    Step,
)


class Lifetime(NamedTuple):
    """Positions of the first and the last step that uses a register.

    Between a fork and a join nothing ends before the join: other streams may still be at work.
    """

    first: int
    last: int


def lifetimes(steps: list[Step]) -> dict[int, Lifetime]:
    """By register."""
    found: dict[int, Lifetime] = {}
    ends = _ends_of_forks(steps)
    for position, step in enumerate(steps):
        for register in registers_of(step):
            before = found.get(register)
            first = position if before is None else before.first
            last = ends[position] if before is None else max(before.last, ends[position])
            found[register] = Lifetime(first, last)
    return found


def insert_releases(steps: list[Step], kept: set[int]) -> None:
    """Inserts the release of each other register behind the last step that uses it."""
    by_position: dict[int, list[int]] = {}
    for register, lifetime in lifetimes(steps).items():
        if register not in kept:
            by_position.setdefault(lifetime.last, []).append(register)
    for position in sorted(by_position, reverse=True):
        steps.insert(position + 1, Release(tuple(sorted(by_position[position]))))


def _ends_of_forks(steps: list[Step]) -> list[int]:
    """For each step its position, or that of the join behind it where streams are forked."""
    ends, end = [0] * len(steps), None
    for position in reversed(range(len(steps))):
        if isinstance(steps[position], Join):
            end = position
        ends[position] = position if end is None else end
        if isinstance(steps[position], Fork):
            end = None
    return ends


def registers_of(step: Any) -> set[int]:
    """The registers that a step reads or fills."""
    if isinstance(step, OnStream):
        return set().union(*(registers_of(each) for each in step.steps))
    if isinstance(step, (CompiledLaunch, PackedLaunch)):
        return step.registers
    if isinstance(step, Allocation):
        return {step.register}
    if isinstance(step, Operation):
        return {r for r in step.results if r is not None} | step.operands
    return operands_of(step)


def operands_of(step: Any) -> set[int]:
    """The registers whose tensors, not only addresses, a step asks for."""
    if isinstance(step, OnStream):
        return set().union(*(operands_of(each) for each in step.steps))
    if isinstance(step, (Operation, InterpretedLaunch)):
        return set(step.operands)
    return set()
