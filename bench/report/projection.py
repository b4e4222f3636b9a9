"""Times of a run of context parallelism that has not been, from rows of runs that have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from nsa_flex.bench.command_line import pair_of
from nsa_flex.bench.report.rows import Row
from nsa_flex.config import NSAConfig
from nsa_flex.parallel import sent_bytes

CONFIG, HEAD_DIM = NSAConfig(), 128  # of `bench.cases.context_parallel`
PHASES = ("forward", "forward_backward")


class Projection(NamedTuple):
    """Milliseconds on the slowest rank."""

    forward: float
    backward: float


def project(
    rows: Sequence[Row],
    heads: str,
    tokens: int,
    ranks: int,
    *,
    bytes_per_second: float,
    timed: int = 4,
) -> Projection:
    """Time of one sequence over more ranks than were timed, or of a longer one.

    Assumed: on the ranks that were timed it is a N + b N² of N tokens, as the two longest rows
    tell; it goes as 1 / P, since chunks are balanced; and what a rank sends beyond that share is
    added at the rate of its link, as if nothing ran meanwhile.

    Args:
        rows: of `bench.cases.context_parallel`.
        heads: query heads / KV heads, "64/4".
        tokens: N. ranks: P.
        bytes_per_second: that a GPU sends.
        timed: ranks of the rows that count.

    Raises:
        ValueError: fewer than two rows of these heads and ranks.
    """
    own = [row for row in rows if (row["heads"], row["ranks"]) == (heads, timed)]
    own = sorted(own, key=lambda row: row["tokens"])[-2:]
    if len(own) < 2:
        raise ValueError(f"{len(own)} rows of {heads} heads on {timed} ranks; expected 2 lengths")
    share = timed / ranks
    counts = zip(_sent(heads, tokens, ranks), _sent(heads, tokens, timed), strict=True)
    more = [sent - share * before for sent, before in counts]
    found = []
    for phase, sent in zip(PHASES, (more[0], sum(more)), strict=True):
        (short, first), (long, second) = ((row["tokens"], row[f"{phase}_ms"]) for row in own)
        square = (second / long - first / short) / (long - short)
        linear = first / short - square * short
        computed = share * (linear * tokens + square * tokens**2)
        found.append(computed + 1e3 * sent / bytes_per_second)
    return Projection(found[0], found[1] - found[0])


def _sent(heads: str, tokens: int, ranks: int) -> Sequence[int]:
    return sent_bytes(tokens, ranks, pair_of(heads)[1], HEAD_DIM, config=CONFIG)
