"""What a detector found, where in the user's own source it happened, and who notes it."""

from __future__ import annotations

import contextlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

import torch

from nsa_flex.hot_path.torch_internals import is_being_compiled

FindingKind = Literal[
    "host-sync",
    "data-dependent",
    "device-copy",
    "cuda-sync",
    "meta-run",
    "graph-break",
    "recompile",
    "cache-copy",
]

_UNKNOWN = "<no user frame>"
_STDLIB = sysconfig.get_path("stdlib") + os.sep  # site-packages may lie below it
# Frames of these files are machinery, never the line a user wants to read.
_MACHINERY = (
    str(Path(torch.__file__).parent) + os.sep,
    str(Path(__file__).parent) + os.sep,
    str(Path(__file__).parents[1] / "auditing") + os.sep,
    contextlib.__file__,  # of a library in a zip file, too
    "<frozen ",
    "<eval_with_key>",
)


@dataclass(frozen=True)
class Finding:
    """One thing that does not belong in a hot path.

    Args:
        kind: which detector rule fired:
            `host-sync` Python read a tensor's value; `data-dependent` an operator whose output
            shape or branch depends on values; `device-copy` a copy between host and device;
            `cuda-sync` CUDA itself reported a synchronisation; `meta-run` the code failed
            without data; `graph-break` and `recompile` come from torch.compile;
            `cache-copy` a decode step went over a whole cache and wrote as much.
        detail: operator or construct, with torch's own reason where it gives one.
        location: `file:line in function` of the innermost frame outside torch.
    """

    kind: FindingKind
    detail: str
    location: str = _UNKNOWN

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail} at {self.location}"


@dataclass(frozen=True)
class Report:
    """Findings of one or several detectors; `graphs` is None where no graph was counted.

    >>> print(Report((Finding("host-sync", "Tensor.item()", "model.py:7 in forward"),)))
    1 finding
      host-sync: Tensor.item() at model.py:7 in forward
    """

    findings: tuple[Finding, ...] = ()
    graphs: int | None = None

    @property
    def ok(self) -> bool:
        """True when nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        noun = "finding" if len(self.findings) == 1 else "findings"
        graphs = "" if self.graphs is None else f", {self.graphs} graphs"
        head = f"{len(self.findings)} {noun}{graphs}"
        return "\n".join([head, *(f"  {finding}" for finding in self.findings)])


def unique(findings: Iterable[Finding]) -> list[Finding]:
    """The findings in order, each once: a loop over layers is one offender, not many."""
    return list(dict.fromkeys(findings))


def current_location() -> str:
    """Innermost user frame of the running thread."""
    return _innermost(_frames_above(sys._getframe(1)))


def traceback_location(trace: TracebackType | None) -> str:
    """Innermost user frame of an exception."""
    return summary_location(reversed(traceback.extract_tb(trace)))


def summary_location(innermost_first: Iterable[traceback.FrameSummary]) -> str:
    """Innermost user frame of an extracted stack."""
    return _innermost((entry.filename, entry.lineno or 0, entry.name) for entry in innermost_first)


def error_location(error: BaseException) -> str:
    """Innermost user frame of an exception, one that the compiler raised included."""
    stack = getattr(error, "real_stack", None)  # torch._dynamo's own
    if stack:
        return summary_location(reversed(stack))
    return traceback_location(error.__traceback__)


def is_machinery(filename: str) -> bool:
    """Whether the file is torch's, Python's or a detector's, whose lines no user wants to read."""
    return is_stdlib(filename) or filename.startswith(_MACHINERY)


def is_stdlib(filename: str) -> bool:
    """Whether the file is of Python's own library."""
    return filename.startswith(_STDLIB) and "-packages" not in filename[len(_STDLIB) :]


def _frames_above(frame: FrameType | None) -> Iterable[tuple[str, int, str]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


def _innermost(frames: Iterable[tuple[str, int, str]]) -> str:
    for filename, line, name in frames:
        if not is_machinery(filename):
            return f"{filename}:{line} in {name}"
    return _UNKNOWN


class Recording:
    """Findings in the order in which they were made; none while silenced."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._silenced = False

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, each place once."""
        return unique(self._found)

    def record(self, kind: FindingKind, detail: str) -> None:
        """Add a finding at the innermost user frame, unless silenced or while code is compiled."""
        if not self._silenced and not is_being_compiled():
            self._found.append(Finding(kind, detail, current_location()))

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Record nothing inside: what a recorded call does in turn is no finding of its own."""
        before, self._silenced = self._silenced, True
        try:
            yield
        finally:
            self._silenced = before
