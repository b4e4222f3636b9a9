"""What tells the files of a run from others: their names, sizes, times and contents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict


class FileMark(TypedDict):
    """name: absolute path. size: in bytes. time: of the last change, in ns. hash: SHA-256."""

    name: str
    size: int
    time: int
    hash: str


def marks(paths: Iterable[Path]) -> list[FileMark]:
    """One for each file, which is read from end to end."""
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_mark, paths))


def same_places(before: Sequence[str], now: Sequence[str]) -> dict[str, str]:
    """Names before to those now, of the files that are there still.

    Where no name is the same, the files may have moved together: they are compared by their paths
    below the folder that holds them all.
    """
    here = dict(zip(now, now, strict=True))
    if before and now and not here.keys() & set(before):
        here = dict(zip(_below(now), now, strict=True))
        return {
            old: here[name]
            for name, old in zip(_below(before), before, strict=True)
            if name in here
        }
    return {name: name for name in before if name in here}


def is_same(mark: FileMark, path: Path) -> bool:
    """Whether the file at `path` has the content of `mark`; read only if its time is another."""
    try:
        found = path.stat()
    except OSError:
        return False
    if found.st_size != mark["size"]:
        return False
    return found.st_mtime_ns == mark["time"] or _hash(path) == mark["hash"]


def _mark(path: Path) -> FileMark:
    found = path.stat()
    return {
        "name": str(path.absolute()),
        "size": found.st_size,
        "time": found.st_mtime_ns,
        "hash": _hash(path),
    }


def _hash(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def _below(names: Sequence[str]) -> list[str]:
    root = os.path.commonpath([str(Path(name).parent) for name in names])
    return [os.path.relpath(name, root) for name in names]
