"""How many bytes a cache takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Memory:
    """Bytes allocated by a cache.

    Args:
        raw: keys and values of tokens.
        compressed: keys and values of compressed blocks.
        other: lengths, and what layers that are not NSA's hold.
    """

    raw: int = 0
    compressed: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.raw + self.compressed + self.other

    def __add__(self, more: Memory) -> Memory:
        return Memory(
            self.raw + more.raw, self.compressed + more.compressed, self.other + more.other
        )


def num_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements of each tensor; None counts as none."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)
