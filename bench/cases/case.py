"""What a row of a benchmark is about: shape, implementation, inputs. Numbers only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from nsa_flex.config import NSAConfig

Pattern = Literal["random", "overlap", "trained"]

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class Skip(Exception):
    """A case that cannot be run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Args:
        target: what is computed, a name in `targets.TARGETS`.
        implementation: who computes it; which there are depends on the target.
        train: forward and backward; otherwise the forward under `torch.no_grad`.
        batch: B.
        query_heads, kv_heads: Hq, Hkv.
        seq_len: S, queries and keys alike.
        head_dim, value_dim: D of queries and keys, Dv of values.
        dtype: a name in `DTYPES`.
        pattern: how the choices of neighbouring queries are related, see `patterns`.
        config: NSA's sizes.

    >>> Case("core", "nsa", train=False, seq_len=4096).key
    'core/nsa forward 1x32/8 S4096 D128/128 bfloat16 random 32/16/64/16/512 mean'
    """

    target: str
    implementation: str
    train: bool
    seq_len: int
    batch: int = 1
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int = 128
    dtype: str = "bfloat16"
    pattern: Pattern = "random"
    config: NSAConfig = field(default_factory=lambda: NSAConfig(compression="mean"))

    @property
    def key(self) -> str:
        """Names the case in rows; equal cases have equal keys."""
        return (
            f"{self.target}/{self.implementation} {'train' if self.train else 'forward'} "
            f"{self.batch}x{self.heads} S{self.seq_len} D{self.head_dim}/{self.value_dim} "
            f"{self.dtype} {self.pattern} {self.blocks} {self.config.compression}"
        )

    @property
    def heads(self) -> str:
        """Hq/Hkv."""
        return f"{self.query_heads}/{self.kv_heads}"

    @property
    def blocks(self) -> str:
        """l/d/l'/n/w."""
        c = self.config
        counts = (c.compress_block_size, c.compress_stride, c.select_block_size)
        return "/".join(map(str, (*counts, c.num_selected_blocks, c.window_size)))

    @property
    def group_size(self) -> int:
        """G."""
        return self.query_heads // self.kv_heads

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the inputs."""
        return DTYPES[self.dtype]

    def fields(self) -> dict[str, Any]:
        """The columns of a row that say what was measured."""
        return {
            "case": self.key,
            "target": self.target,
            "implementation": self.implementation,
            "dtype": self.dtype,
            "batch": self.batch,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "seq_len": self.seq_len,
            "pattern": self.pattern,
            "blocks": self.blocks,
            "compression": self.config.compression,
        }
