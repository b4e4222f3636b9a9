"""The rows of a config: those to train on, those held out, and the probe."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from nsa_flex.training.config import TrainConfig
from nsa_flex.training.files import find_files
from nsa_flex.training.packing import Collator, PackedRows, Row
from nsa_flex.training.tokenizers import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class Texts:
    """What a run reads.

    files: to train on. held_out_files: likewise, or the same, of which a share is held out.
    """

    tokenizer: Tokenizer
    files: list[Path]
    held_out_files: list[Path]
    config: TrainConfig

    @property
    def splits(self) -> bool:
        """Whether held-out documents come from the files that are trained on."""
        return not self.config.data.held_out_files

    def training_rows(self) -> PackedRows:
        """Without an end."""
        data = self.config.data
        held_out = False if self.splits else None
        return PackedRows(
            self.files, self.tokenizer, data, seed=self.config.seed, held_out=held_out
        )

    def held_out_rows(self, count: int) -> list[Row]:
        """The first rows of the held-out documents: the same in every session; fewer of little.

        Raises:
            ValueError: no document is held out.
        """
        held_out = True if self.splits else None
        data = self.config.data
        rows = PackedRows(
            self.held_out_files, self.tokenizer, data, seed=0, held_out=held_out, epochs=1
        )
        return list(itertools.islice(rows, count))

    @property
    def collator(self) -> Collator:
        """Rows to batches; the dense twin tells documents by their positions alone."""
        return Collator(self.config.data, bounds=self.config.model.attention == "nsa")


def find_texts(config: TrainConfig) -> Texts:
    """Look for the files and load the tokenizer; no text is read.

    Raises:
        ValueError: a path names no file, or there is no such tokenizer.
    """
    files = find_files(config.data.files)
    held_out = config.data.held_out_files
    return Texts(
        load_tokenizer(config.data.tokenizer),
        files,
        find_files(held_out) if held_out else files,
        config,
    )
