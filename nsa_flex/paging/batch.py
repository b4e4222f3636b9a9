"""What one forward pass of an engine holds: requests side by side in one row of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple

from torch import Tensor

from nsa_flex.config import NSAConfig
from nsa_flex.documents import DocumentLayout, align_packed
from nsa_flex.paging.pages import Slots

Kind = Literal["step", "chunk", "packed"]


class Length(NamedTuple):
    """Tokens of one request, as the host knows them: in its pages before this pass, and new."""

    past: int
    new: int


class Run(NamedTuple):
    """Neighbouring requests of a batch that are computed together.

    kind: "step" for requests of one new token each; "chunk" for one request that brings several
        tokens; "packed" for two or more whole prompts.
    requests: which of the batch.
    tokens: which of the row.
    layout: of a packed run, else None.
    """

    kind: Kind
    requests: slice
    tokens: slice
    layout: DocumentLayout | None = None


class PagedBatch(NamedTuple):
    """Requests in one row of T tokens, those of a request in order and adjacent.

    lengths: of each of the B requests.
    past: int (B,), tokens before the new ones, on the device.
    written: slots of the new tokens, (T,).
    table: int64 (B, P), pages of each request in order, any page behind the last; None where no
        request has tokens in pages yet.
    unused: a page that no request reads, for what is not to be kept.
    runs: the batch in pieces, each of one kind. Tokens behind the last are padding.
    is_captured: whether what runs now is replayed for other lengths than the host knows.
    """

    lengths: tuple[Length, ...]
    past: Tensor
    written: Slots
    table: Tensor | None
    unused: int
    runs: tuple[Run, ...]
    is_captured: bool = False

    @classmethod
    def of(
        cls,
        lengths: Sequence[Length],
        cu_seqlens: Tensor,
        past: Tensor,
        written: Slots,
        table: Tensor | None,
        unused: int,
        config: NSAConfig,
    ) -> PagedBatch:
        """A batch with its runs; `cu_seqlens`, int (B + 1,), are where requests begin."""
        runs = tuple(_runs(lengths, cu_seqlens, table is not None, config))
        return cls(tuple(lengths), past, written, table, unused, runs)

    @classmethod
    def of_steps(
        cls,
        lengths: Sequence[Length],
        past: Tensor,
        written: Slots,
        table: Tensor,
        unused: int,
        *,
        is_captured: bool,
    ) -> PagedBatch:
        """A batch of one token a row of the table, padding rows included."""
        rows = slice(0, table.shape[0])
        runs = (Run("step", rows, rows),)
        return cls(tuple(lengths), past, written, table, unused, runs, is_captured)

    @property
    def num_tokens(self) -> int:
        """Tokens of the runs."""
        return self.runs[-1].tokens.stop

    def may_complete_block(self, requests: slice, config: NSAConfig) -> bool:
        """Whether the one new token of any of these requests can be the last of a block."""
        count = config.num_compressed_blocks
        return config.compresses and (
            self.is_captured
            or any(count(x.past + 1) > count(x.past) for x in self.lengths[requests])
        )


def _runs(
    lengths: Sequence[Length], cu_seqlens: Tensor, has_table: bool, config: NSAConfig
) -> Iterator[Run]:
    token = 0
    for kind, members in _pieces(lengths, has_table):
        requests = slice(members[0], members[-1] + 1)
        num_tokens = sum(length.new for length in lengths[requests])
        layout = None
        if kind == "packed":
            begins = cu_seqlens[requests.start : requests.stop + 1]
            layout = align_packed(begins - begins[0], num_tokens, config)
        yield Run(kind, requests, slice(token, token + num_tokens), layout)
        token += num_tokens


def _pieces(lengths: Iterable[Length], has_table: bool) -> Iterator[tuple[Kind, list[int]]]:
    """Neighbours of one kind, by index."""

    def kind_of(item: tuple[int, Length]) -> Kind:
        length = item[1]
        if has_table and length.new == 1:
            return "step"
        return "chunk" if length.past else "packed"

    for kind, items in groupby(enumerate(lengths), kind_of):
        members = [index for index, _ in items]
        if kind == "step" or (kind == "packed" and len(members) > 1):
            yield kind, members
        else:
            yield from (("chunk", [index]) for index in members)
