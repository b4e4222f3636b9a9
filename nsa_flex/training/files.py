"""Documents from files: plain text, .jsonl and .parquet, compressed or not, one at a time."""

from __future__ import annotations

import glob
import gzip
import io
import json
import lzma
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from nsa_flex.training.errors import TrainingError

COMPRESSED = (".gz", ".xz", ".zst")
# A plain file is read in documents of at most so many bytes.
LONGEST_DOCUMENT = 1 << 26
# Of the standard library: what is generated, or somebody else's.
_NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}


def find_files(entries: Iterable[str], *, outside: Path | None = None) -> list[Path]:
    """All files that `entries` name (files, folders, globs, "stdlib"), sorted, each once.

    Hidden files and those in hidden folders below an entry are left out, and what lies in
    `outside`, which is written while they are read.

    Raises:
        ValueError: an entry names none, or there is no entry.
    """
    found: set[Path] = set()
    for entry in entries:
        files = _standard_library() if entry == "stdlib" else _files_of(entry)
        if outside is not None:
            files = _outside(outside, files)
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


def documents(path: Path, text_field: str = "text") -> Iterator[str | bytes]:
    """The documents of one file in their order; plain text as bytes.

    Raises:
        TrainingError: the file cannot be read, decompressed or parsed; the message names it.
    """
    try:
        if _suffix(path) == ".parquet":
            yield from _parquet(path, text_field)
            return
        with _opened(path) as file:
            if _suffix(path) == ".jsonl":
                yield from _json_lines(file, text_field)
            else:
                while text := file.read(LONGEST_DOCUMENT):
                    yield text
    except (OSError, EOFError, lzma.LZMAError, ValueError, KeyError, _zstd_error()) as error:
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
        return [each for each in below if not _is_hidden(each.relative_to(path))]
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


def _json_lines(file: IO[bytes], text_field: str) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _text(json.loads(line)[text_field], text_field)
        except (ValueError, TypeError) as error:
            raise ValueError(f"line {number}: {error}") from error


def _parquet(path: Path, text_field: str) -> Iterator[str]:
    parquet = _needed("pyarrow.parquet", "pyarrow")
    with parquet.ParquetFile(path) as file:
        if text_field not in file.schema_arrow.names:
            raise KeyError(text_field)
        for rows in file.iter_batches(columns=[text_field], batch_size=256):
            for value in rows.column(0).to_pylist():
                yield _text(value, text_field)


def _text(value: Any, text_field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"field {text_field} holds {type(value).__name__}, not a string")
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
