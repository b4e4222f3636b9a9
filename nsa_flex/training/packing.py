"""Documents as tokens, in rows of one length: a stream whose order follows from the seed alone."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nsa_flex.training.config import DataSection
from nsa_flex.training.errors import TrainingError
from nsa_flex.training.files import Document, documents
from nsa_flex.training.token_cache import TokenCache
from nsa_flex.training.tokenization import Tokenizer, plain_ids

IGNORED = -100  # label of a token that nothing is learned from


class Row(NamedTuple):
    """ids: int64 (S,), ~id of a token that nothing is learned from.

    starts: int64 (documents,), where one begins; the first is 0.
    real: how many of the S are no padding.
    """

    ids: np.ndarray
    starts: np.ndarray
    real: int

    @property
    def is_learned(self) -> bool:
        """Whether some token is learned from: the first of a document has none before it."""
        learned = self.ids[: self.real] >= 0
        learned[self.starts[self.starts < self.real]] = False
        return bool(learned.any())


@dataclass
class Counts:
    """What was read of one entry of `data.files`."""

    documents: int = 0
    tokens: int = 0
    longest: int = 0

    def add(self, tokens: int) -> None:
        """A document of so many tokens."""
        self.documents += 1
        self.tokens += tokens
        self.longest = max(self.longest, tokens)


class PackedRows(IterableDataset):
    """Rows of `seq_len` tokens, packed one after another, epoch after epoch, without an end.

    A document that does not fit goes on in the next row, there as a document of its own. The same
    files, seed and settings give the same rows, so that a resumed run skips to where it was.

    Args:
        files: in sorted order.
        held_out: None takes all documents; True the held-out share of them, False the others.
            Which ones follows from the names of their files and their numbers there.
        epochs: None for no end.
        skip: rows that are not given: those trained on.
        left_out: file to the number of rows, skipped ones included, after which nothing more is
            read of it. The rows up to there are as if it were not left out.
        changed: files left out that are not what they were.
        sizes: numbers of files of each of the parts that `data.weights` mixes; () of one part.
        stages: (first row, length) of rows that are cut into ones of `length`, which come as a
            list.
        cache: of tokens.
    """

    def __init__(
        self,
        files: list[Path],
        tokenizer: Tokenizer,
        data: DataSection,
        *,
        seed: int,
        held_out: bool | None,
        epochs: int | None = None,
        skip: int = 0,
        left_out: Mapping[Path, int] | None = None,
        changed: Collection[Path] = (),
        sizes: Sequence[int] = (),
        stages: Sequence[tuple[int, int]] = (),
        cache: TokenCache | None = None,
    ) -> None:
        self.sizes, self.stages, self.cache = sizes or [len(files)], stages, cache
        self.counts: list[Counts] = []
        self.skipped: dict[Path, str] = {}
        self.files, self.tokenizer, self.data = files, tokenizer, data
        self.seed, self.held_out, self.epochs = seed, held_out, epochs
        self.skip, self.left_out, self.changed = skip, left_out or {}, changed
        self._packed = 0  # rows of the last iterator so far

    def __iter__(self) -> Iterator[Any]:
        """A `Row`, or a list of them where rows are cut."""
        return itertools.islice(self._rows(), self.skip, None)

    def _rows(self) -> Iterator[Row | list[Row]]:
        self._packed = 0
        packed = self._pack()
        while True:
            self._length = self._length_now()
            group = list(itertools.islice(packed, self.data.seq_len // self._length))
            if not group:
                return
            self._packed += 1
            yield group if self._length < self.data.seq_len else group[0]

    def _length_now(self) -> int:
        begun = [length for first, length in self.stages if first <= self._packed]
        return begun[-1] if begun else self.data.seq_len

    def _pack(self) -> Iterator[Row]:
        """Rows of `_length`, as it is when they begin."""
        ids: list[np.ndarray] = []
        starts: list[int] = []
        filled, length = 0, self._length
        separate = self.data.documents == "separate"
        for tokens in self._documents():
            while len(tokens):
                if not filled:
                    length = self._length
                piece, tokens = tokens[: length - filled], tokens[length - filled :]
                starts.append(filled)
                ids.append(piece)
                filled += len(piece)
                if filled == length or (separate and len(starts) == self.data.documents_per_row):
                    yield self._row(ids, starts, filled, length)
                    ids, starts, filled = [], [], 0
        if filled:
            yield self._row(ids, starts, filled, length)

    def _row(self, ids: list[np.ndarray], starts: list[int], filled: int, length: int) -> Row:
        padding = np.full(length - filled, self.tokenizer.end, np.int64)
        return Row(np.concatenate([*ids, padding]), np.array(starts), filled)

    def _documents(self) -> Iterator[np.ndarray]:
        """Tokens of the documents; the next comes from the part that lags behind its weight."""
        self.counts = [Counts() for _ in self.sizes]
        weights = self.data.weights or (1.0,)
        files = iter(self.files)
        streams = {
            i: self._part(list(itertools.islice(files, size))) for i, size in enumerate(self.sizes)
        }
        while streams:
            i = min(streams, key=lambda i: self.counts[i].tokens / weights[i])
            tokens = next(streams[i], None)
            if tokens is None:
                del streams[i]
                continue
            self.counts[i].add(len(tokens))
            yield tokens

    def _part(self, files: list[Path]) -> Iterator[np.ndarray]:
        """Documents drawn from a buffer of `shuffle` of them."""
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            draw = random.Random(f"{self.seed}/{epoch}")
            order = list(files)
            if self.data.shuffle > 1:
                draw.shuffle(order)
            buffer: list[Document | np.ndarray] = []
            for text in self._texts(order):
                buffer.append(text)
                if len(buffer) >= self.data.shuffle:
                    yield self._tokens(_pop(buffer, draw))
            while buffer:
                yield self._tokens(_pop(buffer, draw))

    def _tokens(self, text: Document | np.ndarray) -> np.ndarray:
        if isinstance(text, np.ndarray):  # from the cache
            return text.astype(np.int64)
        return self.tokenizer.encode(text)

    def _texts(self, files: list[Path]) -> Iterator[Document | np.ndarray]:
        any_text = False
        for path in files:
            for number, text in enumerate(self._documents_of(path)):
                if len(text) and self.takes(path, number):
                    any_text = True
                    yield text
        if not any_text and not self.held_out:
            raise ValueError(
                "data.files hold no document: add text, or change data.held_out_share"
            )

    def _documents_of(self, path: Path) -> Iterator[Document | np.ndarray]:
        """Those of a file that is left out end where they did when it was."""
        last = self.left_out.get(path, math.inf)
        if self._packed >= last:
            return
        if path in self.changed:
            raise TrainingError(
                f"data: {path} is left out, but rows trained on hold documents of it, and it is "
                "gone or has changed: put it back as it was, or choose another out"
            )
        found: Iterator[Any]
        if self.cache is not None and path in self.cache:
            found = self.cache.documents(path)
        else:
            chat = self.data.format == "chat"
            found = documents(path, self.data.column, chat=chat, skipped=self.skipped)
        for text in found:
            yield text
            if self._packed >= last:
                return

    def takes(self, path: Path, number: int) -> bool:
        """Whether these are rows of a file's document, by its number there."""
        if self.held_out is None:
            return True
        draw = zlib.crc32(f"{path.name}/{number}".encode()) / 2**32
        return (draw < self.data.held_out_share) == self.held_out


def _pop(buffer: list[Any], draw: random.Random) -> Any:
    """A random one, its place taken by the last."""
    if len(buffer) == 1:
        return buffer.pop()
    index = draw.randrange(len(buffer))
    buffer[index], buffer[-1] = buffer[-1], buffer[index]
    return buffer.pop()


class Collator:
    """Rows as a batch of the model's arguments; labels are the ids, shifted by the model.

    Separate documents become one row of all tokens with `cu_seq_lens_q`, filled up by empty
    documents so that every batch has the same shapes, and positions that restart.
    """

    def __init__(self, data: DataSection, *, bounds: bool = True) -> None:
        self.data, self.bounds = data, bounds

    def __call__(self, batch: Sequence[Row | list[Row]]) -> dict[str, Tensor]:
        """Rows (B,) -> ids and labels (B, S), or (1, B * S) of separate documents.

        Rows that are cut count as many.
        """
        rows = [each for row in batch for each in (row if isinstance(row, list) else [row])]
        tokens = np.stack([row.ids for row in rows])
        ids = torch.from_numpy(plain_ids(tokens))
        labels = torch.from_numpy(np.where(tokens < 0, IGNORED, tokens))
        for label, row in zip(labels, rows, strict=True):
            label[row.real :] = IGNORED
        if self.data.documents == "joined":
            return {"input_ids": ids, "labels": labels}
        return self._separate(ids.flatten(), labels.flatten(), rows)

    def _separate(self, ids: Tensor, labels: Tensor, rows: list[Row]) -> dict[str, Tensor]:
        length, total = len(rows[0].ids), len(ids)
        begins = [
            start + number * length
            for number, row in enumerate(rows)
            for start in (*row.starts, *([row.real] if row.real < length else []))
        ]
        bounds = torch.full((len(rows) * (self.data.documents_per_row + 1) + 1,), total)
        bounds[: len(begins)] = torch.tensor(begins)
        labels[bounds[: len(begins)]] = IGNORED  # predicted from another document
        lengths = bounds.diff()
        positions = torch.arange(total) - bounds[:-1].repeat_interleave(lengths, output_size=total)
        batch = {
            "input_ids": ids[None],
            "labels": labels[None],
            "position_ids": positions[None],
        }
        if self.bounds:
            batch |= {"cu_seq_lens_q": bounds.int(), "cu_seq_lens_k": bounds.int()}
        return batch
