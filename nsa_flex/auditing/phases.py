"""What a report is made of: findings, graphs, recompilations, phases, branches."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_flex.auditing.excerpts import place_of, shortened


@dataclass(frozen=True)
class AuditFinding:
    """One thing that does not belong in code that is to be compiled, and how to mend it.

    Args:
        kind: `graph-break`, `recompile`, `host-sync`, `data-dependent`, `device-copy`,
            `cuda-sync`, `meta-run`, `cudagraph-skip`, `cache-copy`, `lint`, `too-many-graphs` or
            `error`.
        message: what happened, with torch's own reason where it gives one.
        location: `file:line in function` of the innermost frame outside torch.
        mend: what to do about it.
        phases: in which of `inference`, `training`, `decode` and `sources` it was seen.
    """

    kind: str
    message: str
    location: str
    mend: str = ""
    phases: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """The same for the same finding after lines have moved: what baselines compare."""
        file, _, function = place_of(self.location)
        message = re.sub(r"0x[0-9a-f]+|\d+", "#", self.message)
        if self.kind == "recompile":
            message = re.sub(r" == .*", " ==", message)  # The value is another every time.
        text = "\0".join((self.kind, message, Path(file).name, function))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __str__(self) -> str:
        where = f" ({', '.join(self.phases)})" if self.phases else ""
        lines = [f"{self.kind}{where}: {self.message}", f"  at {shortened(self.location)}"]
        return "\n".join([*lines, f"  mend: {self.mend}"] if self.mend else lines)


@dataclass(frozen=True)
class Graph:
    """One compiled graph: how many operations, in which frame, and the batch that asked for it."""

    number: int
    operations: int
    frame: str
    batch: int


@dataclass(frozen=True)
class Recompile:
    """Why a batch was not served by the graphs there were.

    cause is `length` or `number` (torch met a second size, or value of a Python number, and made
    it a symbol), `size-one` (torch takes sizes 0 and 1 for constants), `same-size` (two sizes
    were equal when a graph was made) or `code`: only the last is a finding.
    """

    batch: int
    cause: str
    guard: str
    location: str
    mend: str


@dataclass(frozen=True)
class Phase:
    """One sweep over the batches: `inference`, `training` or `decode`.

    Args:
        name: which.
        batches: label of each batch, in order.
        graphs: all that were compiled.
        runs: for each batch the numbers of the graphs that ran.
        recompiles: each with the batch that caused it.
        breaks: number of places where the graph broke.
        measured: compile seconds cold and warm, step seconds, peak bytes; empty if not measured.
        kernels: what ran in one compiled call, as dicts of name, calls and microseconds.
        cudagraphs: None if not tried, else the number of skips.
    """

    name: str
    batches: tuple[str, ...]
    graphs: tuple[Graph, ...] = ()
    runs: tuple[tuple[int, ...], ...] = ()
    recompiles: tuple[Recompile, ...] = ()
    breaks: int = 0
    measured: dict[str, float] = field(default_factory=dict)
    kernels: tuple[dict[str, Any], ...] = ()
    cudagraphs: int | None = None

    @property
    def recompiles_by_code(self) -> int:
        """Number of recompilations that the code causes."""
        return sum(each.cause == "code" for each in self.recompiles)


@dataclass(frozen=True)
class BranchRun:
    """Which backend computed a branch of `nsa_attention`, why, and the kernels it launched."""

    branch: str
    backend: str
    reason: str
    kernels: tuple[str, ...] = ()
