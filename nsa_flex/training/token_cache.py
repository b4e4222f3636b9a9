"""Tokens on disk for runs that repeat: a folder for each set of files and tokenizer."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from nsa_flex.training.config import DataSection
from nsa_flex.training.files import documents
from nsa_flex.training.tokenization import Tokenizer, tokenizer_files

VERSION = 1  # of the format


class TokenCache:
    """Documents of files as arrays of ids, mapped from disk.

    Args:
        folder: that `token_cache` wrote.
        files: in the order in which they were written.
    """

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self.folder = folder
        about = json.loads((folder / "about.json").read_text())
        self.dtype = np.dtype(about["dtype"])
        self.skipped = {Path(name): reason for name, reason in about["skipped"].items()}
        self.numbers = {path: number for number, path in enumerate(files)}
        self.ends = np.load(folder / "ends.npy")  # of documents, in tokens
        self.firsts = np.load(folder / "firsts.npy")  # document of each file, and of the end

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """All, one after another."""
        if not len(self.ends) or not self.ends[-1]:
            return np.empty(0, self.dtype)
        return np.memmap(self.folder / "tokens.bin", self.dtype, "r")

    def __contains__(self, path: Path) -> bool:
        return path in self.numbers

    def documents(self, path: Path) -> Iterator[np.ndarray]:
        """Of one file in their order; an empty one has no token, not even the end."""
        number = self.numbers[path]
        for i in range(self.firsts[number], self.firsts[number + 1]):
            yield self.tokens[self.ends[i - 1] if i else 0 : self.ends[i]]


def token_cache(files: list[Path], tokenizer: Tokenizer, data: DataSection) -> TokenCache:
    """The cache of `files` in `data.cache`; made if it is not there, by one process at a time.

    It is another one if a file has another name, size or time, or the tokenizer's files have.

    Raises:
        TrainingError: a file cannot be read.
        OSError: the folder cannot be written.
    """
    root = Path(str(data.cache)).expanduser()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / _key(files, tokenizer, data)
    with (root / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other ranks wait for the first
        if not folder.exists():
            aside = root / f".{folder.name}"
            shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
            aside.mkdir()
            _write(aside, files, tokenizer, data)
            aside.rename(folder)
    return TokenCache(folder, files)


def _key(files: list[Path], tokenizer: Tokenizer, data: DataSection) -> str:
    marks: list[Any] = [VERSION, data.format, data.column, data.tokenizer, tokenizer.chat_template]
    for path in (*files, *tokenizer_files(data.tokenizer)):
        found = path.stat()
        marks.append((str(path.absolute()), found.st_size, found.st_mtime_ns))
    return hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]


def _write(folder: Path, files: list[Path], tokenizer: Tokenizer, data: DataSection) -> None:
    chat = data.format == "chat"
    dtype = np.min_scalar_type(-tokenizer.vocab_size if chat else tokenizer.vocab_size - 1)
    skipped: dict[Path, str] = {}
    sizes, firsts = [], [0]
    with (folder / "tokens.bin").open("wb") as file:
        for path in files:
            for text in documents(path, data.column, chat=chat, skipped=skipped):
                ids = tokenizer.encode(text) if text else np.empty(0)
                file.write(ids.astype(dtype).tobytes())
                sizes.append(len(ids))
            firsts.append(len(sizes))
    np.save(folder / "ends.npy", np.cumsum(sizes, dtype=np.int64))
    np.save(folder / "firsts.npy", np.array(firsts, np.int64))
    about = {"dtype": dtype.str, "skipped": {str(path): why for path, why in skipped.items()}}
    (folder / "about.json").write_text(json.dumps(about))
