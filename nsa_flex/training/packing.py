"""Documents in rows of one length: a stream whose order follows from the seed alone."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nsa_flex.training.config import DataSection
from nsa_flex.training.errors import TrainingError
from nsa_flex.training.files import documents
from nsa_flex.training.tokenizers import Tokenizer

IGNORED = -100  # label of a token that nothing is learned from


class Row(NamedTuple):
    """ids: int64 (S,). starts: int64 (documents,), where one begins; the first is 0.

    real: how many of the S are no padding.
    """

    ids: np.ndarray
    starts: np.ndarray
    real: int


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
    ) -> None:
        self.files, self.tokenizer, self.data = files, tokenizer, data
        self.seed, self.held_out, self.epochs = seed, held_out, epochs
        self.skip, self.left_out, self.changed = skip, left_out or {}, changed
        self._packed = 0  # rows of the last iterator so far

    def __iter__(self) -> Iterator[Row]:
        return itertools.islice(self._rows(), self.skip, None)

    def _rows(self) -> Iterator[Row]:
        self._packed = 0
        ids: list[np.ndarray] = []
        starts: list[int] = []
        filled, length = 0, self.data.seq_len
        limit = self.data.documents_per_row if self.data.documents == "separate" else length
        for tokens in self._documents():
            while len(tokens):
                piece, tokens = tokens[: length - filled], tokens[length - filled :]
                starts.append(filled)
                ids.append(piece)
                filled += len(piece)
                if filled == length or len(starts) == limit:
                    self._packed += 1
                    yield self._row(ids, starts, filled)
                    ids, starts, filled = [], [], 0
        if filled:
            yield self._row(ids, starts, filled)

    def _row(self, ids: list[np.ndarray], starts: list[int], filled: int) -> Row:
        padding = np.full(self.data.seq_len - filled, self.tokenizer.end, np.int64)
        return Row(np.concatenate([*ids, padding]), np.array(starts), filled)

    def _documents(self) -> Iterator[np.ndarray]:
        """Tokens of the documents, drawn from a buffer of `shuffle` of them."""
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            draw = random.Random(f"{self.seed}/{epoch}")
            files = list(self.files)
            if self.data.shuffle > 1:
                draw.shuffle(files)
            buffer: list[str | bytes] = []
            for text in self._texts(files):
                buffer.append(text)
                if len(buffer) >= self.data.shuffle:
                    yield self.tokenizer.encode(_pop(buffer, draw))
            while buffer:
                yield self.tokenizer.encode(_pop(buffer, draw))

    def _texts(self, files: list[Path]) -> Iterator[str | bytes]:
        any_text = False
        for path in files:
            for number, text in enumerate(self._documents_of(path)):
                if text and self._takes(path, number):
                    any_text = True
                    yield text
        if not any_text:
            which = "held-out " if self.held_out else ""
            raise ValueError(
                f"data.files hold no {which}document: add text, or change data.held_out_share"
            )

    def _documents_of(self, path: Path) -> Iterator[str | bytes]:
        """Those of a file that is left out end where they did when it was."""
        last = self.left_out.get(path, math.inf)
        if self._packed >= last:
            return
        if path in self.changed:
            raise TrainingError(
                f"data: {path} is left out, but rows trained on hold documents of it, and it is "
                "gone or has changed: put it back as it was, or choose another out"
            )
        for text in documents(path, self.data.text_field):
            yield text
            if self._packed >= last:
                return

    def _takes(self, path: Path, number: int) -> bool:
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

    def __call__(self, rows: list[Row]) -> dict[str, Tensor]:
        """Rows (B,) -> ids and labels (B, S), or (1, B * S) of separate documents."""
        ids = torch.from_numpy(np.stack([row.ids for row in rows]))
        labels = ids.clone()
        for label, row in zip(labels, rows, strict=True):
            label[row.real :] = IGNORED
        if self.data.documents == "joined":
            return {"input_ids": ids, "labels": labels}
        return self._separate(ids.flatten(), labels.flatten(), rows)

    def _separate(self, ids: Tensor, labels: Tensor, rows: list[Row]) -> dict[str, Tensor]:
        length, total = self.data.seq_len, len(ids)
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
