"""One allocation for the small buffers of a launch plan that only kernels see."""

from __future__ import annotations

from typing import NamedTuple

from nsa_flex.fallback_kernels.common.tiles import round_up
from nsa_flex.fallback_kernels.launch.lifetimes import Lifetime, lifetimes, operands_of
from nsa_flex.fallback_kernels.launch.recorder import Recorder
from nsa_flex.fallback_kernels.launch.steps import Allocation

ALIGNMENT = 512  # bytes, as PyTorch's allocator gives
# Larger buffers are allocated and freed one by one: a workspace lives as long as the call.
MAX_BYTES = 4 << 20


class Workspace(NamedTuple):
    """size: in bytes. offsets: in bytes, by register."""

    size: int
    offsets: dict[int, int]

    @classmethod
    def of(cls, recorder: Recorder, kept: set[int]) -> Workspace:
        """Takes the allocations of such buffers, but for `kept` ones, out of the steps."""
        steps = recorder.steps
        seen = set().union(*(operands_of(step) for step in steps), kept)
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
