"""Documents from files: text, .jsonl, .parquet and .arrow, compressed or not, one at a time."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import lzma
import sysconfig
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Any

from nsa_flex.training.errors import TrainingError

COMPRESSED = (".gz", ".xz", ".zst")
# A plain file is read in documents of at most so many bytes.
LONGEST_DOCUMENT = 1 << 26
# Of the standard library: what is generated, or somebody else's.
# What `save_to_disk` writes beside the rows.
_OF_DATASETS = ("dataset_info.json", "state.json", "dataset_dict.json")
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}


def find_files(
    entries: Iterable[str],
    *,
    outside: Path | None = None,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
) -> list[Path]:
    """All files that `entries` name (files, folders, globs, "stdlib"), sorted, each once.

    Hidden files and those in hidden folders below an entry are left out, and what lies in
    `outside`, which is written while they are read.

    Args:
        include, exclude: patterns of names or paths; no `include` takes all.

    Raises:
        ValueError: an entry names none, or there is no entry.
    """
    found: set[Path] = set()
    for entry in entries:
        files = _standard_library() if entry == "stdlib" else _files_of(entry)
        if outside is not None:
            files = _outside(outside, files)
        if include:
            files = [path for path in files if _matches(path, include)]
        files = [path for path in files if not _matches(path, exclude)]
        if not files:
            besides = "" if outside is None else f" outside of {outside}"
            raise ValueError(
                f"data: {entry} names no file{besides}; check the path or the pattern"
            )
        found.update(files)
    if not found:
        raise ValueError("data: files is empty; name files, folders or patterns")
    return sorted(found)


def named_files(entries: Iterable[str]) -> set[str]:
    """Absolute paths of what `entries` name; of one that names nothing, itself."""
    return {
        str(path.absolute())
        for entry in entries
        for path in (_files_of(entry) or [Path(entry).expanduser()])
    }


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path.name, each) or fnmatch(str(path), each) for each in patterns)


Conversation = list[dict[str, Any]]
Document = str | bytes | Conversation


def documents(
    path: Path,
    column: str = "text",
    *,
    chat: bool = False,
    skipped: dict[Path, str] | None = None,
) -> Iterator[Document]:
    """The documents of one file in their order; plain text as bytes.

    Args:
        column: of files with rows.
        chat: rows hold conversations instead of strings.
        skipped: gets the file and why, if it is neither rows nor UTF-8.

    Raises:
        TrainingError: the file cannot be read, decompressed or parsed; the message names it.
    """
    zstd_error = _zstd_error()  # now: a generator may be closed when nothing can be imported
    try:
        if _suffix(path) == ".parquet":
            yield from _checked(_parquet(path, column), column, chat)
            return
        if _suffix(path) == ".arrow":
            yield from _checked(_arrow(path, column), column, chat)
            return
        with _opened(path) as file:
            if _suffix(path) == ".jsonl":
                yield from _json_lines(file, column, chat)
            elif chat:
                raise ValueError("conversations are read from .jsonl, .parquet and .arrow alone")
            else:
                yield from _plain_text(file, path, {} if skipped is None else skipped)
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, zstd_error) as error:
        reason = f"no field {error}" if isinstance(error, KeyError) else error
        raise TrainingError(
            f"data: {path} cannot be read ({type(error).__name__}: {reason}); resume once it can, "
            f"or go on without it: --resume --change data.leave_out=[{path}]"
        ) from error


def _files_of(entry: str) -> list[Path]:
    path = Path(entry).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        below = (each for each in path.rglob("*") if each.is_file())
        seen = [each for each in below if not _is_hidden(each.relative_to(path))]
        datasets = {each.parent for each in seen if each.suffix == ".arrow"}
        datasets |= {each.parent for each in datasets}
        return [x for x in seen if not (x.name in _OF_DATASETS and x.parent in datasets)]
    matches = map(Path, glob.glob(str(path), recursive=True))  # noqa: PTH207 -- absolute patterns
    return [each for each in matches if each.is_file()]


def _outside(folder: Path, files: list[Path]) -> list[Path]:
    root = folder.resolve()
    real = {parent: parent.resolve() for parent in {path.parent for path in files}}
    return [path for path in files if not real[path.parent].is_relative_to(root)]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [
        each for each in root.rglob("*.py") if not _NOT_PROSE & set(each.relative_to(root).parts)
    ]


def _suffix(path: Path) -> str:
    """What the contents are, compression aside."""
    return (path.with_suffix("") if path.suffix in COMPRESSED else path).suffix


def _opened(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.suffix == ".xz":
        return lzma.open(path, "rb")
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(path))
    return path.open("rb")


def _plain_text(file: IO[bytes], path: Path, skipped: dict[Path, str]) -> Iterator[bytes]:
    """In pieces of at most LONGEST_DOCUMENT; nothing more once one is no UTF-8 text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    text = file.read(LONGEST_DOCUMENT)
    while text:
        following = file.read(LONGEST_DOCUMENT)
        try:
            decoder.decode(text, final=not following)
        except UnicodeDecodeError:
            skipped[path] = "binary" if b"\0" in text else "no UTF-8"
            return
        if b"\0" in text:
            skipped[path] = "binary"
            return
        yield text
        text = following


def _json_lines(file: IO[bytes], column: str, chat: bool) -> Iterator[Any]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _value(json.loads(line)[column], column, chat)
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error


def _parquet(path: Path, column: str) -> Iterator[Any]:
    parquet = _needed("pyarrow.parquet", "pyarrow")
    with parquet.ParquetFile(path) as file:
        if column not in file.schema_arrow.names:
            raise KeyError(column)
        for rows in file.iter_batches(columns=[column], batch_size=256):
            yield from rows.column(0).to_pylist()


def _arrow(path: Path, column: str) -> Iterator[Any]:
    rows = _needed("datasets", "datasets").Dataset.from_file(str(path))  # mapped, not read
    if column not in rows.column_names:
        raise KeyError(column)
    for batch in rows.select_columns(column).iter(batch_size=256):
        yield from batch[column]


def _checked(values: Iterator[Any], column: str, chat: bool) -> Iterator[Any]:
    return (_value(each, column, chat) for each in values)


def _value(value: Any, column: str, chat: bool) -> Any:
    if not isinstance(value, list if chat else str):
        expected = "a list of messages" if chat else "a string"
        raise ValueError(f"field {column} holds {type(value).__name__}, not {expected}")
    return value


class _ZstdFile(io.RawIOBase):
    """Decompressed bytes of all frames of a file; unlike zstandard's own, a torn one raises."""

    def __init__(self, path: Path) -> None:
        self._make = _needed("zstandard", "zstandard").ZstdDecompressor().decompressobj
        self._file = path.open("rb")
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """As of io.RawIOBase."""
        return True

    def close(self) -> None:
        """As of io.RawIOBase."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """As of io.RawIOBase."""
        while not self._ready:
            data = self._file.read(1 << 16)
            if not data:
                if self._frame is not None:
                    raise EOFError("the compressed file ends within a frame")
                return 0
            self._frame = self._frame or self._make()
            self._ready = memoryview(self._frame.decompress(data))
            if self._frame.eof:  # what follows is another frame
                self._file.seek(-len(self._frame.unused_data), io.SEEK_CUR)
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count


def _zstd_error() -> type[BaseException]:
    """What zstandard raises, or something that nothing raises where it is missing."""
    try:
        import zstandard
    except ModuleNotFoundError:
        return EOFError
    return zstandard.ZstdError


def _needed(module: str, package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"such files need {package}, which is not installed; install it with: "
            "pip install 'nsa-flex[train]'",
            name=package,
        ) from error
