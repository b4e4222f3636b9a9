"""The rows of a config: those to train on, those held out, and the probe."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_flex.training.arguments import rows_per_step
from nsa_flex.training.chats import for_chat
from nsa_flex.training.config import TrainConfig
from nsa_flex.training.files import find_files, named_files
from nsa_flex.training.packing import Collator, PackedRows, Row
from nsa_flex.training.record import Record, Source, marks, source_as_before
from nsa_flex.training.token_cache import TokenCache, token_cache
from nsa_flex.training.tokenization import Tokenizer, load_tokenizer, plain_ids, tokenizer_files


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    source: to train on. held_out: likewise, or the same, of which a share is held out.
    record: of the checkpoint that the run goes on from; None if it begins.
    sizes: numbers of files of each part of a mixture.
    stages: first row of each length of rows.
    cache: of tokens, if the config names one.
    """

    tokenizer: Tokenizer
    source: Source
    held_out: Source
    config: TrainConfig
    record: Record | None = None
    sizes: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    cache: TokenCache | None = None

    @property
    def splits(self) -> bool:
        """Whether held-out documents come from the files that are trained on."""
        return not self.config.data.held_out_files

    def training_rows(self, epochs: int | None = None) -> PackedRows:
        """From the first one that was not trained on; `epochs` None for no end."""
        lengths = [length for _, length in self.config.data.seq_len_warmup]
        return PackedRows(
            self.source.files,
            self.tokenizer,
            self.config.data,
            seed=self.config.seed,
            held_out=False if self.splits else None,
            epochs=epochs,
            skip=0 if self.record is None else self.record.rows,
            left_out=self.source.left_out,
            changed=self.source.changed,
            sizes=self.sizes,
            stages=list(zip(self.stages, [*lengths, self.config.data.seq_len], strict=False)),
            cache=self.cache,
        )

    def held_out_rows(self, count: int) -> list[Row]:
        """The first rows of the held-out documents that something is learned from.

        The same ones in every session; fewer of little text.

        Raises:
            ValueError: no document is held out.
        """
        held_out = True if self.splits else None
        data = self.config.data
        rows: Any = PackedRows(
            self.held_out.files,
            self.tokenizer,
            data,
            seed=0,
            held_out=held_out,
            epochs=1,
            changed=self.held_out.changed,
            sizes=self.sizes if self.splits else (),
            cache=self.cache if self.splits else None,
        )
        # Without stages none is cut.
        found = list(itertools.islice((row for row in rows if row.is_learned), count))
        if not found:
            raise ValueError(
                "data.files hold no held-out document: whole documents are held out, at random. "
                "Add documents (a file is one), raise data.held_out_share, or name "
                "data.held_out_files"
            )
        return found

    def tokens_per_byte(self, rows: list[Row]) -> float | None:
        """Of rows' text as UTF-8, ends of documents counted; None without text."""
        ids = (plain_ids(row.ids[: row.real]).tolist() for row in rows)
        texts = map(self.tokenizer.decode, ids)
        size = sum(len(text.encode()) for text in texts)
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
            parts=list(self.sizes),
            stages=list(self.stages),
        )
        return dataclasses.replace(self, record=now)


def find_texts(config: TrainConfig) -> Texts:
    """Look for the files and load the tokenizer; no text is read.

    Raises:
        ValueError: a path names no file, or there is no such tokenizer.
    """
    tokenizer = _tokenizer(config)
    left = named_files(config.data.leave_out)
    parts, held_out = _find(config)
    parts = [_but(files, left) for files in parts]
    source = Source(list(itertools.chain(*parts)))
    return Texts(
        tokenizer,
        source,
        Source(_but(held_out, left)) if held_out else source,
        config,
        sizes=tuple(map(len, parts)),
        stages=_stages(config),
    )


def texts_as_before(
    config: TrainConfig, before: Record, where: str, *, reads: bool, step: int = 0
) -> Texts:
    """As `find_texts`, of a run that goes on.

    Args:
        before: what its checkpoint says.
        step: of the checkpoint.
        where: names the checkpoint in errors.
        reads: whether contents are compared, of files that have another time.

    Raises:
        ValueError: also if the files or the tokenizer are not those of `before`.
    """
    tokenizer = _tokenizer(config)
    left = named_files(config.data.leave_out)
    parts, held_out = _find(config)
    files = list(itertools.chain(*parts))
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
    return Texts(
        tokenizer,
        source,
        other if held_out else source,
        config,
        record,
        sizes=tuple(before.parts),
        stages=_stages(config, before, step),
    )


def with_cache(texts: Texts) -> Texts:
    """With the tokens of all files that are not left out, if the config has a cache."""
    data, source = texts.config.data, texts.source
    if data.cache is None:
        return texts
    files = [path for path in source.files if path not in source.left_out]
    return dataclasses.replace(texts, cache=token_cache(files, texts.tokenizer, data))


def _tokenizer(config: TrainConfig) -> Tokenizer:
    found = load_tokenizer(config.data.tokenizer)
    return for_chat(found) if config.data.format == "chat" else found


def _stages(config: TrainConfig, before: Record | None = None, step: int = 0) -> tuple[int, ...]:
    """First row of each length. Those that a resumed run has reached stay where they were."""
    ends = [end for end, _ in config.data.seq_len_warmup]
    if not ends:
        return ()
    rows = 0 if before is None else before.rows
    found = [rows + (first - step) * rows_per_step(config) for first in (0, *ends)]
    if before is not None:
        reached = sum(first <= step for first in (0, *ends))
        found[:reached] = before.stages[:reached]
    return tuple(found)


def _find(config: TrainConfig) -> tuple[list[list[Path]], list[Path]]:
    """Files to train on, each part of a mixture by itself, and those of `held_out_files`.

    The run's own files are neither.
    """
    data, out = config.data, Path(config.out)

    def found(entries: tuple[str, ...]) -> list[Path]:
        return find_files(entries, outside=out, include=data.include, exclude=data.exclude)

    parts = [found((each,)) for each in data.files] if data.weights else [found(data.files)]
    twice = [path for path, count in Counter(itertools.chain(*parts)).items() if count > 1]
    if twice:
        raise ValueError(
            f"data.files: {twice[0]} is in two entries, and each has a weight of its own: name "
            "folders that hold no other"
        )
    return parts, found(data.held_out_files) if data.held_out_files else []


def _but(files: list[Path], left: set[str]) -> list[Path]:
    kept = [path for path in files if str(path.absolute()) not in left]
    if files and not kept:
        raise ValueError("data: leave_out leaves no file; name fewer")
    return kept
