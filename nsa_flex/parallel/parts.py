"""A rank's part of a cache, and what a branch gives over it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_flex.parallel.shards import SequenceShards

LN2 = 0.6931471805599453
UNSEEN = -1e30  # for a log-sum-exp of -inf, which minus itself would be NaN


class Part(NamedTuple):
    """The tokens of a rank: `tokens` of them from `base` on, of `total` that there may be."""

    base: int
    tokens: int
    total: int

    @classmethod
    def of(cls, shards: SequenceShards, tokens: int) -> Part:
        """Rank r has tokens r · `tokens` and the following ones."""
        return cls(shards.rank * tokens, tokens, shards.size * tokens)


class Partial(NamedTuple):
    """A branch over some keys: out (B, Hq, T, Dv), lse (B, Hq, T), -inf where it saw none."""

    out: Tensor
    lse: Tensor
