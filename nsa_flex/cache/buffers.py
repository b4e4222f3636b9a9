"""The tensors that a layer's cache keeps tokens in, and how many bytes they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa_flex.config import NSAConfig


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
        """Bytes of all three."""
        return self.raw + self.compressed + self.other

    def __add__(self, more: Memory) -> Memory:
        return Memory(
            self.raw + more.raw, self.compressed + more.compressed, self.other + more.other
        )


def num_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the elements of each tensor; None counts as none."""
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


@dataclass
class Buffers:
    """Zeros where no token is: what no query sees is multiplied by 0, and must be finite.

    key: (B, H, C, D), value: (B, H, C, Dv).
    compressed_key: (B, Hkv, N, D), compressed_value: (B, Hkv, N, Dv), N = `num_rows(C)`. Without a
        compressed branch there is one row of values, which kernels write and nobody reads, and
        without a selected one as well there are no rows.
    """

    key: Tensor
    value: Tensor
    compressed_key: Tensor
    compressed_value: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four tensors."""
        return self.key, self.value, self.compressed_key, self.compressed_value

    def grown(self, capacity: int, config: NSAConfig) -> Buffers:
        """The same tokens, with room for `capacity`."""
        larger = []
        for x, length in zip(self.tensors, _lengths(config, capacity), strict=True):
            new = x.new_zeros((*x.shape[:2], length, x.shape[3]))
            new[:, :, : x.shape[2]] = x
            larger.append(new)
        return Buffers(*larger)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Buffers:
        """All four tensors, changed by `change`."""
        return Buffers(*(change(x) for x in self.tensors))

    def selected(self, rows: Tensor) -> Buffers:
        """The given rows of the batch, in memory of their own."""
        return Buffers(*(x.index_select(0, rows) for x in self.tensors))

    def reorder(self, rows: Tensor, length: int, config: NSAConfig) -> None:
        """Row b becomes what row `rows[b]` was, in place, for the first `length` tokens."""
        for x, used in zip(self.tensors, _lengths(config, length), strict=True):
            x[:, :, :used] = x[:, :, :used].index_select(0, rows)


def allocate(
    key: Tensor, value: Tensor, capacity: int, num_sets: int, config: NSAConfig
) -> Buffers:
    """Buffers for tokens such as (B, H, T, D) keys and (B, H, T, Dv) values."""
    batch, heads = key.shape[:2]
    sizes = zip(
        (heads, heads, heads // num_sets, heads // num_sets),
        _lengths(config, capacity),
        (key.shape[3], value.shape[3]) * 2,
        strict=True,
    )
    return Buffers(*(value.new_zeros((batch, *size)) for size in sizes))


def _lengths(config: NSAConfig, num_tokens: int) -> tuple[int, int, int, int]:
    """Of each tensor, for so many tokens."""
    rows = num_rows(config, num_tokens) if config.compresses else 0
    return num_tokens, num_tokens, rows, rows if config.has("compressed") else min(rows, 1)


def num_rows(config: NSAConfig, num_tokens: int) -> int:
    """Compressed rows to keep for so many tokens; one where there is none, which nobody sees."""
    return max(1, config.num_compressed_blocks(num_tokens))


def roomy(num_tokens: int) -> int:
    """A quarter, or 256 tokens, more: growing copies each token a constant number of times."""
    return -(-(num_tokens + max(256, num_tokens // 4)) // 64) * 64


def lasting() -> contextlib.AbstractContextManager[Any]:
    """For tensors that are changed later: one made in `inference_mode` could only be there."""
    # In this order: compiled code must not ask for the mode.
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        return torch.inference_mode(False)
    return contextlib.nullcontext()


def mark_static(tensors: list[Tensor]) -> None:
    """Let CUDA graphs write to the tensors where they are."""
    if not torch.compiler.is_compiling():
        for x in tensors:
            torch._dynamo.mark_static_address(x)
