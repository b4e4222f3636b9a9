"""What a checkpoint says of the data: files by content, and how many rows were trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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


RECORD_FILE = "run.json"


@dataclass(frozen=True)
class Record:
    """rows: trained on so far, on all ranks.

    ranks, batch_size, accumulate: whose product is the rows of a step.
    files, held_out_files: in the order in which they are read.
    tokenizer: its files.
    left_out: name of a file to the number of rows after which it was left out.
    parts: numbers of `files` of each part of a mixture.
    stages: first row of each length of `data.seq_len_warmup`, and of the rows after it.
    """

    files: list[FileMark]
    held_out_files: list[FileMark]
    tokenizer: list[FileMark]
    left_out: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    ranks: int = 1
    batch_size: int = 1
    accumulate: int = 1
    parts: list[int] = field(default_factory=list)
    stages: list[int] = field(default_factory=list)

    def write(self, checkpoint: Path) -> None:
        """Into a checkpoint, with the sizes of what else is there."""
        sizes = {
            str(path.relative_to(checkpoint)): path.stat().st_size
            for path in sorted(checkpoint.rglob("*"))
            if path.is_file()
        }
        values = {**dataclasses.asdict(self), "sizes": sizes}
        (checkpoint / RECORD_FILE).write_text(json.dumps(values, indent=1))


def read_record(checkpoint: Path) -> Record:
    """What `Record.write` wrote."""
    values = json.loads((checkpoint / RECORD_FILE).read_text())
    del values["sizes"]
    return Record(**values)


@dataclass(frozen=True)
class Source:
    """Files in the order in which they are read.

    left_out: to the number of rows after which nothing of a file comes.
    changed: those of them that are not what they were.
    """

    files: list[Path]
    left_out: Mapping[Path, int] = field(default_factory=dict)
    changed: Collection[Path] = ()


def source_as_before(
    marks: list[FileMark],
    found: list[Path],
    what: str,
    *,
    left: Collection[str] = (),
    since: Mapping[str, int] | None = None,
    rows: int = 0,
    reads: bool = True,
) -> tuple[Source, list[FileMark]]:
    """The files of a record where they are now, and their marks.

    Args:
        what: names them in errors, and the checkpoint.
        found: files that are there.
        left: absolute paths of files to leave out.
        since: of those left out before; the others are left out after `rows` rows.
        reads: whether contents are compared, where a file has another time.

    Raises:
        ValueError: a file is gone, new, or another one, and is not left out; it is named.
    """
    here = {str(path.absolute()): path for path in found}
    places = same_places([mark["name"] for mark in marks], list(here))
    files, left_out, changed, wrong = [], {}, set(), []
    now: list[FileMark] = []
    for mark in marks:
        name = mark["name"]
        place = places.get(name)
        path = Path(name) if place is None else here[place]
        files.append(path)
        same = place is not None and (not reads or is_same(mark, path))
        if name in left or place in left:
            left_out[path] = (since or {}).get(name, rows)
            if not same:
                changed.add(path)
        elif not same:
            wrong.append(f"{name} is gone" if place is None else f"{place} has changed")
        elif name in (since or {}):
            wrong.append(f"{name} was left out, which cannot be undone")
        time = path.stat().st_mtime_ns if same else mark["time"]
        now.append(FileMark(name=place or name, size=mark["size"], time=time, hash=mark["hash"]))
    wrong += [f"{name} is new" for name in here.keys() - set(places.values()) - set(left)]
    if wrong:
        raise ValueError(
            f"{what}: {_listed(sorted(wrong))}; put back what there was, leave files out "
            "(--change data.leave_out=[...]), or choose another out"
        )
    return Source(files, left_out, changed), now


def _listed(parts: list[str]) -> str:
    more = f" and {len(parts) - 5} more" if len(parts) > 5 else ""
    return ", ".join(parts[:5]) + more
