"""The runs of a study, several side by side on each GPU, in pieces of a few minutes.

    python -m nsa_flex.bench.quality.run --corpus corpus --out rows.json --variants dense mean

trains every variant with every seed (`--seeds`), all variants of a seed before the next seed. What
--out holds as finished is not run again. After `--piece-seconds` runs are stopped: they save
checkpoints below --work and their rows say how far they came; the same command goes on with them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality.build import rows_of_corpus
from nsa_flex.bench.quality.cutting import cut
from nsa_flex.bench.quality.one_run import HELD_OUT_TOKENS, ROW, settings_of
from nsa_flex.bench.quality.side_by_side import Job, Limits, run_jobs, start_in
from nsa_flex.bench.quality.variants import config_of, sizes, variants
from nsa_flex.bench.report.rows import Row, earlier_rows, merged, write_rows


@dataclass(frozen=True)
class Piece:
    """One piece of a study.

    Args:
        runs: (variant, seed), in the order in which they start.
        overrides: as of `nsa-flex train`.
        work: folder of the runs: checkpoints, logs, telemetry.
    """

    corpus: Path
    work: Path
    out: Path
    runs: tuple[tuple[str, int], ...]
    size: str = "30m"
    overrides: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)

    def folder(self, run: tuple[str, int]) -> Path:
        """Where a run is."""
        return self.work / f"{run[0]}-{run[1]}"

    def job(self, run: tuple[str, int]) -> Job:
        """The process of a run."""
        folder = self.folder(run)
        command = ["-m", "nsa_flex.bench.quality.one_run", run[0], f"--size={self.size}"]
        command += [f"--seed={run[1]}", f"--corpus={self.corpus}", f"--out={folder}"]
        command += [f"--set={each}" for each in self.overrides]
        return Job(f"{self.work.name}-{folder.name}", tuple(command))

    def cut(self) -> None:
        """Cut the corpus into rows of the length of the runs, which share them."""
        length = config_of(self.runs[0][0], self.size, self.overrides).data.seq_len
        cut(self.corpus, length, self.work / "cut", HELD_OUT_TOKENS // length)


def run_piece(
    piece: Piece,
    start: Callable[[Job, int, float], Any] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Start, watch and stop the runs; returns the rows, which are on disk at all times.

    Args:
        start: as of `run_jobs`.
    """
    begun = clock()
    rows_of_corpus(piece.out, piece.corpus)
    piece.cut()
    runs = {piece.job(run): run for run in piece.runs}
    failed = run_jobs(
        tuple(runs),
        piece.limits,
        begun,
        lambda job: is_finished(piece, runs[job], earlier_rows(piece.out)),
        lambda: collect(piece),
        start or start_in(piece.work, piece.limits),
        clock,
        sleep,
    )
    for text in failed:
        print(f"{text}: see its log in {piece.work}", file=sys.stderr)
    return collect(piece)


def collect(piece: Piece) -> list[Row]:
    """What all runs have said so far, with the rows that --out held."""
    rows = rows_of_corpus(piece.out, piece.corpus)
    found = (piece.folder(run) / ROW for run in piece.runs)
    rows = merged(rows, [json.loads(path.read_text()) for path in found if path.exists()])
    write_rows(piece.out, rows)
    return rows


_TELLING = ("variant", "seed", "size", "seq_len", "steps")


def is_finished(piece: Piece, run: tuple[str, int], rows: list[Row]) -> bool:
    """Whether a row is of the run, finished, with as many steps as now.

    Raises:
        ValueError: with other settings, which a file of rows does not tell apart.
    """
    config = config_of(run[0], piece.size, piece.overrides)
    wanted = (*run, piece.size, config.data.seq_len, config.training.steps)
    for row in rows:
        if row["status"] == "ok" and wanted == tuple(row[name] for name in _TELLING):
            if row["settings"] != settings_of(config):
                raise ValueError(
                    f"{piece.out} has {row['case']} with other settings; choose another --out"
                )
            return True
    return False


def in_order(names: Iterable[str], seeds: Iterable[int]) -> tuple[tuple[str, int], ...]:
    """All variants of the first seed, then those of the next.

    >>> in_order(["dense", "mean"], [0, 1])
    (('dense', 0), ('mean', 0), ('dense', 1), ('mean', 1))
    """
    names = list(names)
    return tuple((name, seed) for seed in seeds for name in names)


def main() -> None:
    """Run; print what was found."""
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file of rows")
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--variants", nargs="+", choices=variants(), required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--size", choices=sizes(), default="30m")
    parser.add_argument("--side-by-side", type=int, default=2, help="on each GPU")
    parser.add_argument("--piece-seconds", type=float, default=Limits.seconds)
    parser.add_argument("--closing-seconds", type=float, default=Limits.closing)
    parser.add_argument("--least-seconds", type=float, default=Limits.least)
    parser.add_argument("--set", action="append", default=[], help="as of nsa-flex train")
    given = parser.parse_args()
    limits = Limits(
        given.side_by_side,
        torch.cuda.device_count(),
        given.piece_seconds,
        given.closing_seconds,
        given.least_seconds,
    )
    runs = in_order(given.variants, given.seeds)
    piece = Piece(given.corpus, given.work, given.out, runs, given.size, tuple(given.set), limits)
    for row in run_piece(piece):
        print({name: row.get(name) for name in ("case", "status", "tokens", "seconds", "loss")})


if __name__ == "__main__":
    main()
