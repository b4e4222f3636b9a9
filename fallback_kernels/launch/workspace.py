"""When a launch plan's memory is in use, and one allocation for its small buffers."""

from __future__ import annotations

from typing import NamedTuple

from nsa_flex.fallback_kernels.common.tiles import round_up
from nsa_flex.fallback_kernels.launch.recorder import Recorder
from nsa_flex.fallback_kernels.launch.steps import Allocation, Fork, Join, Release, Step

ALIGNMENT = 512  # bytes, as PyTorch's allocator gives
# Larger buffers are allocated and freed one by one: a workspace lives as long as the call.
MAX_BYTES = 4 << 20


class Lifetime(NamedTuple):
    """Positions of the first and the last step that uses a register.

    Between a fork and a join nothing ends before the join: other streams may still be at work.
    """

    first: int
    last: int


def lifetimes(steps: list[Step]) -> dict[int, Lifetime]:
    """By register."""
    lifetime: dict[int, Lifetime] = {}
    ends = _ends_of_forks(steps)
    for position, step in enumerate(steps):
        for register in step.registers:
            before = lifetime.get(register)
            first = position if before is None else before.first
            last = ends[position] if before is None else max(before.last, ends[position])
            lifetime[register] = Lifetime(first, last)
    return lifetime


def insert_releases(steps: list[Step], kept: set[int]) -> None:
    """Frees each register but the `kept` ones behind the last step that uses it."""
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


class Workspace(NamedTuple):
    """size: in bytes. offsets: in bytes, by register."""

    size: int
    offsets: dict[int, int]

    @classmethod
    def of(cls, recorder: Recorder, kept: set[int]) -> Workspace:
        """Places the small buffers that only kernels use, and removes their allocations.

        kept: registers that are no such buffers: arguments and results.
        """
        steps = recorder.steps
        seen = set().union(*(step.operands for step in steps), kept)
        empty = {x.register for x in steps if isinstance(x, Allocation) and not x.zeros}
        small = {
            register
            for register in empty - seen
            if recorder.owners[register].storage_bytes <= MAX_BYTES
        }
        steps[:] = [x for x in steps if not (isinstance(x, Allocation) and x.register in small)]
        lived = {r: lifetime for r, lifetime in lifetimes(steps).items() if r in small}
        sizes = {r: recorder.owners[r].storage_bytes for r in lived}
        return _packed(lived, sizes)


def _packed(lived: dict[int, Lifetime], sizes: dict[int, int]) -> Workspace:
    """First fit: a buffer lies at the lowest offset that is free for all its life."""
    placed: list[tuple[int, int, Lifetime]] = []  # offset, end, lifetime
    offsets, size = {}, 0
    for register in sorted(lived, key=lambda r: (-sizes[r], r)):
        life, needed = lived[register], round_up(sizes[register], ALIGNMENT)
        offset = 0
        for other, end, its in sorted(placed):
            apart = its.last < life.first or life.last < its.first
            if not apart and other < offset + needed and offset < end:
                offset = end
        placed.append((offset, offset + needed, life))
        offsets[register] = offset
        size = max(size, offset + needed)
    return Workspace(size, offsets)
