"""Documents as tokens, in rows of one length: a stream whose order follows from the seed alone."""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from nsa_flex.training.config import DataSection
from nsa_flex.training.errors import TrainingError, blamed_on
from nsa_flex.training.files import documents


@dataclass(frozen=True)
class Tokenizer:
    """Ids of a document.

    Args:
        vocab_size: ids are below it.
        end: id that ends a document.
        processing_class: the tokenizer of transformers, saved with checkpoints; None for bytes.
    """

    vocab_size: int
    end: int
    processing_class: Any = None

    def encode(self, text: str | bytes) -> np.ndarray:
        """int64 (tokens,): the document, then the end token."""
        if self.processing_class is None:
            data = text.encode() if isinstance(text, str) else text
            ids = np.frombuffer(data, np.uint8)
        else:
            if isinstance(text, bytes):
                text = text.decode(errors="replace")
            ids = np.asarray(
                self.processing_class(text, add_special_tokens=False, verbose=False)["input_ids"]
            )
        return np.append(ids.astype(np.int64), self.end)

    def decode(self, ids: list[int]) -> str:
        """The text of ids, without those that end documents."""
        if self.processing_class is None:
            return bytes(each for each in ids if each != self.end).decode(errors="replace")
        return self.processing_class.decode(ids, skip_special_tokens=True)


BYTES = Tokenizer(vocab_size=256, end=0)  # text holds no zero byte

END_TEXT = "<|end_of_text|>"


def bytes_tokenizer() -> Any:
    """transformers' tokenizer with the ids of `BYTES`, for whoever reads the finished model.

    >>> tokenizer = bytes_tokenizer()
    >>> ids = tokenizer("né", add_special_tokens=False)["input_ids"]
    >>> ids, tokenizer.decode(ids), tokenizer.eos_token_id
    ([110, 195, 169], 'né', 0)
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    # The characters that stand for bytes in byte-level vocabularies since GPT-2.
    vocabulary = {chr(byte): byte for byte in plain}
    vocabulary |= {chr(256 + place): byte for place, byte in enumerate(others) if byte}
    vocabulary[END_TEXT] = BYTES.end
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    found.decoder = tokenizers.decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, eos_token=END_TEXT, clean_up_tokenization_spaces=False
    )


# A folder with a tokenizer may hold a model too.
_OTHERS = {"config.json", "generation_config.json", "trainer_state.json"}


def tokenizer_files(name: str) -> list[Path]:
    """The files that `load_tokenizer(name)` reads, and perhaps some more; none for bytes."""
    if name == "bytes":
        return []
    return sorted(
        path
        for path in Path(name).iterdir()
        if path.suffix in (".json", ".txt", ".model", ".tiktoken")
        and path.name not in _OTHERS
        and not path.name.endswith(".index.json")
        and path.is_file()
    )


def load_tokenizer(name: str) -> Tokenizer:
    """`BYTES`, or the tokenizer in directory `name`.

    Raises:
        ValueError: there is none, or it has no token that ends a text.
    """
    if name == "bytes":
        return BYTES
    if not Path(name).is_dir():
        raise ValueError(
            f"data.tokenizer is {name}; expected bytes or the directory of a tokenizer that "
            "save_pretrained wrote"
        )
    from transformers import AutoTokenizer

    with blamed_on(f"data.tokenizer: the tokenizer in {name} cannot be loaded"):
        found = AutoTokenizer.from_pretrained(name)
    if found.eos_token_id is None:
        raise ValueError(f"the tokenizer in {name} has no eos_token: set one and save it again")
    return Tokenizer(len(found), found.eos_token_id, found)


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
                if text and self.takes(path, number):
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
