"""Append-only files of rows: written whole and flushed, read back with the types of the schema."""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_flex.training.errors import blamed_on
from nsa_flex.training.telemetry.schemas import Artefact, columns, file_name, schema


class RowFile:
    """One artefact of a run. Rows are appended, each with a single write; none is ever changed.

    A process that is killed can tear its last row. Opening the file cuts off such a tail. A file
    of an earlier version, which had fewer columns, gets them, with empty cells.

    Args:
        folder: of the run; it exists.
        artefact: which one.

    Raises:
        ValueError: the file there has other columns; it is left as it is.
    """

    def __init__(self, folder: Path, artefact: Artefact) -> None:
        self.artefact: Artefact = artefact
        self.path = folder / file_name(artefact)
        self.columns = columns(artefact)
        self._is_json = self.path.suffix == ".jsonl"
        _cut_torn_tail(self.path)
        if not self._is_json:
            self._complete_columns(folder)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if os.fstat(self._file).st_size == 0 and not self._is_json:
            self._write(_csv_line(self.columns))

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows that have exactly the schema's columns.

        Raises:
            OSError: they could not be written, for instance to a full disk.
        """
        if rows:
            self._write("".join(self._line(row) for row in rows))

    def close(self) -> None:
        """Flush to the disk and close."""
        os.fsync(self._file)
        os.close(self._file)

    def _complete_columns(self, folder: Path) -> None:
        if _header(self.path, self.artefact) in ([], self.columns):
            return
        rows = ([row[name] for name in self.columns] for row in read_rows(folder, self.artefact))
        aside = self.path.with_name(f".{self.path.name}")
        with aside.open("w") as file:
            file.writelines(map(_csv_line, [self.columns, *rows]))
            file.flush()
            os.fsync(file.fileno())  # the rows that it replaces are on the disk
        aside.replace(self.path)

    def _line(self, row: dict[str, Any]) -> str:
        if row.keys() != set(self.columns):
            raise ValueError(f"row of {self.path.name} has {list(row)}, not {self.columns}")
        if self._is_json:
            return json.dumps({name: row[name] for name in self.columns}) + "\n"
        return _csv_line([row[name] for name in self.columns])

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(self._file, data) :]


def read_rows(folder: str | os.PathLike[str], artefact: Artefact) -> list[dict[str, Any]]:
    """All whole rows of an artefact, with numbers as such; [] if there is no file.

    Empty cells are None, and so are columns that the version which wrote the file did not have.

    Raises:
        ValueError: the file has other columns, or is damaged.
    """
    path = Path(folder) / file_name(artefact)
    if not path.exists():
        return []
    if path.suffix == ".csv":
        _header(path, artefact)
    with blamed_on(str(path)):
        text = path.read_text()
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        if path.suffix == ".jsonl":
            return [_object(line) for line in lines]
        return list(_typed(lines, schema(artefact)["properties"]))


def _object(line: str) -> dict[str, Any]:
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError(f"a line is {line.strip()[:40]}; expected an object")
    return found


def last_of_each_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Training rows without those that a later session wrote again, in order of steps.

    A run that was killed goes on from its last checkpoint: the steps after it were rehearsals.
    """
    kept: list[dict[str, Any]] = []
    for row in rows:
        while kept and kept[-1]["session"] < row["session"] and kept[-1]["step"] >= row["step"]:
            kept.pop()
        kept.append(row)
    return kept


def _header(path: Path, artefact: Artefact) -> list[str]:
    """Columns of a CSV; [] if it is not there, or empty."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        found = next(csv.reader(file), [])
    properties = schema(artefact)["properties"]
    unknown = [name for name in found if name not in properties]
    needed = [name for name, about in properties.items() if not _may_be_null(about)]
    missing = [name for name in needed if name not in found]
    if found and (unknown or missing):
        differing = ", ".join([*(f"no {name}" for name in missing), *unknown])
        raise ValueError(
            f"{path} has other columns than that file of a run ({differing}): read it with the "
            "version of nsa_flex that wrote it, and choose another out"
        )
    return found


def _typed(lines: list[str], properties: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in csv.DictReader(lines):
        yield {name: _value(row.get(name, ""), about) for name, about in properties.items()}


def _may_be_null(about: dict[str, Any]) -> bool:
    return "null" in about.get("type", "string")


def _value(text: str, about: dict[str, Any]) -> Any:
    kinds = about.get("type", "string")
    if text == "" and _may_be_null(about):
        return None
    if "integer" in kinds:
        return int(text)
    return float(text) if "number" in kinds else text


def _csv_line(cells: list[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cut_torn_tail(path: Path) -> None:
    if not path.exists():
        return
    whole = path.read_bytes().rfind(b"\n") + 1
    if whole < path.stat().st_size:
        os.truncate(path, whole)


class Heartbeat:
    """Appends what the host knows to heartbeat.jsonl; it never waits for the device.

    Args:
        file: heartbeat.jsonl.
        session: number of the run's start.
        seconds: between lines.
        mesh, sent_bytes: as of `Telemetry`.
    """

    def __init__(
        self,
        file: RowFile,
        session: int,
        seconds: float,
        mesh: dict[str, int] | None = None,
        sent_bytes: int | None = None,
    ) -> None:
        self.file, self.session, self.seconds = file, session, seconds
        self.mesh, self.sent_bytes = mesh, sent_bytes
        self.phase, self.step = "starting", 0
        self.loss: float | None = None
        self.tokens_per_second: float | None = None
        self.backends: dict[str, str] = {}
        self._last_step = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="nsa_flex heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first line and start the thread."""
        self.write()
        self._thread.start()

    def stepped(self, step: int) -> None:
        """A step ended: cheap, called every step."""
        self.phase, self.step, self._last_step = "training", step, time.monotonic()

    def stop(self, phase: str) -> None:
        """End the thread and write the last line."""
        self._stop.set()
        self._thread.join()
        self.phase = phase
        self.write()

    def write(self) -> None:
        """Write one line now."""
        cuda = torch.cuda.is_initialized()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        line: dict[str, Any] = {
            "time": time.time(),
            "session": self.session,
            "phase": self.phase,
            "step": self.step,
            "step_age": time.monotonic() - self._last_step,
            "loss": self.loss,
            "tokens_per_second": self.tokens_per_second,
            "host_bytes": peak * (1 if sys.platform == "darwin" else 1024),
            "device_bytes": torch.cuda.memory_allocated() if cuda else None,
            "device_peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "backends": self.backends,
            "mesh": self.mesh,
            "sent_bytes": self.sent_bytes,
        }
        self.file.append(line)

    def _beat(self) -> None:
        while not self._stop.wait(self.seconds):
            try:
                self.write()
            except OSError:  # A full disk: whoever writes a checkpoint or a row will say so.
                continue
