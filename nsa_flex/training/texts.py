"""The rows of a config: those to train on, those held out, and the probe."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

from nsa_flex.training.config import TrainConfig
from nsa_flex.training.files import find_files, named_files
from nsa_flex.training.packing import (
    Collator,
    PackedRows,
    Row,
    Tokenizer,
    load_tokenizer,
    tokenizer_files,
)
from nsa_flex.training.record import Record, Source, marks, source_as_before


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    source: to train on. held_out: likewise, or the same, of which a share is held out.
    record: of the checkpoint that the run goes on from; None if it begins.
    """

    tokenizer: Tokenizer
    source: Source
    held_out: Source
    config: TrainConfig
    record: Record | None = None

    @property
    def splits(self) -> bool:
        """Whether held-out documents come from the files that are trained on."""
        return not self.config.data.held_out_files

    def training_rows(self) -> PackedRows:
        """Without an end, from the first one that was not trained on."""
        return PackedRows(
            self.source.files,
            self.tokenizer,
            self.config.data,
            seed=self.config.seed,
            held_out=False if self.splits else None,
            skip=0 if self.record is None else self.record.rows,
            left_out=self.source.left_out,
            changed=self.source.changed,
        )

    def held_out_rows(self, count: int) -> list[Row]:
        """The first rows of the held-out documents: the same in every session; fewer of little.

        Raises:
            ValueError: no document is held out.
        """
        held_out = True if self.splits else None
        data = self.config.data
        rows = PackedRows(
            self.held_out.files,
            self.tokenizer,
            data,
            seed=0,
            held_out=held_out,
            epochs=1,
            changed=self.held_out.changed,
        )
        return list(itertools.islice(rows, count))

    def tokens_per_byte(self, rows: list[Row]) -> float | None:
        """Of rows' text as UTF-8, ends of documents counted; None without text."""
        size = sum(len(self.tokenizer.decode(row.ids[: row.real].tolist()).encode()) for row in rows)
        return sum(row.real for row in rows) / size if size else None

    @property
    def collator(self) -> Collator:
        """Rows to batches; the dense twin tells documents by their positions alone."""
        return Collator(self.config.data, bounds=self.config.model.attention == "nsa")

    def with_record(self, ranks: int) -> Texts:
        """With the record of this session; of a run that begins, all files are read for it."""
        training, record = self.config.training, self.record
        if record is None:
            record = Record(
                files=marks(self.source.files),
                held_out_files=[] if self.splits else marks(self.held_out.files),
                tokenizer=marks(tokenizer_files(self.config.data.tokenizer)),
            )
        now = dataclasses.replace(
            record,
            ranks=ranks,
            batch_size=training.batch_size,
            accumulate=training.accumulate,
        )
        return dataclasses.replace(self, record=now)


def find_texts(config: TrainConfig) -> Texts:
    """Look for the files and load the tokenizer; no text is read.

    Raises:
        ValueError: a path names no file, or there is no such tokenizer.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    left = named_files(config.data.leave_out)
    files, held_out = _find(config)
    source = Source(_but(files, left))
    return Texts(tokenizer, source, Source(_but(held_out, left)) if held_out else source, config)


def texts_as_before(config: TrainConfig, before: Record, where: str, *, reads: bool) -> Texts:
    """As `find_texts`, of a run that goes on.

    Args:
        before: what its checkpoint says.
        where: names the checkpoint in errors.
        reads: whether contents are compared, of files that have another time.

    Raises:
        ValueError: also if the files or the tokenizer are not those of `before`.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    left = named_files(config.data.leave_out)
    files, held_out = _find(config)
    source, file_marks = source_as_before(
        before.files,
        files,
        f"the data are not those of {where}",
        left=left,
        since=before.left_out,
        rows=before.rows,
        reads=reads,
    )
    other, held_out_marks = source_as_before(
        before.held_out_files,
        held_out,
        f"the held-out data are not those of {where}",
        left=left,
        reads=reads,
    )
    _, tokenizer_marks = source_as_before(
        before.tokenizer,
        tokenizer_files(config.data.tokenizer),
        f"the tokenizer is not that of {where}",
        reads=reads,
    )
    record = dataclasses.replace(
        before,
        files=file_marks,
        held_out_files=held_out_marks,
        tokenizer=tokenizer_marks,
        left_out={str(path.absolute()): rows for path, rows in source.left_out.items()},
    )
    return Texts(tokenizer, source, other if held_out else source, config, record)


def _find(config: TrainConfig) -> tuple[list[Path], list[Path]]:
    """Files to train on, and those of `held_out_files`; the run's own files are neither."""
    out, held_out = Path(config.out), config.data.held_out_files
    return (
        find_files(config.data.files, outside=out),
        find_files(held_out, outside=out) if held_out else [],
    )


def _but(files: list[Path], left: set[str]) -> list[Path]:
    kept = [path for path in files if str(path.absolute()) not in left]
    if files and not kept:
        raise ValueError("data: leave_out leaves no file; name fewer")
    return kept
