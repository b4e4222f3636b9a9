"""The runs of a study, several side by side on each GPU, in pieces of a few minutes.

    python -m nsa_flex.bench.quality.run --corpus corpus --out rows.json --variants dense mean

trains every variant with every seed (`--seeds`), all variants of a seed before the next seed. What
--out holds as finished is not run again. After `--piece-seconds` runs are stopped: they save
checkpoints below --work and their rows say how far they came; the same command goes on with them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality.build import rows_of_corpus
from nsa_flex.bench.quality.cutting import cut
from nsa_flex.bench.quality.one_run import HELD_OUT_TOKENS, ROW, settings_of
from nsa_flex.bench.quality.variants import config_of, sizes, variants
from nsa_flex.bench.report.rows import Row, merged, read_rows, write_rows

POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Piece:
    """One piece of a study.

    Args:
        runs: (variant, seed), in the order in which they start.
        overrides: as of `nsa-flex train`.
        work: folder of the runs: checkpoints, logs, telemetry.
        side_by_side: runs at a time, on each GPU.
        gpus: how many there are; without any, runs share the CPU.
        seconds: until the last process has ended.
        closing: of these for a stopped run: checkpoint and held-out losses.
        least: a run is started only if as many seconds are left before the closing.
    """

    corpus: Path
    work: Path
    out: Path
    runs: tuple[tuple[str, int], ...]
    size: str = "30m"
    overrides: tuple[str, ...] = ()
    side_by_side: int = 2
    gpus: int = 0
    seconds: float = 540.0
    closing: float = 45.0
    least: float = 90.0

    def folder(self, run: tuple[str, int]) -> Path:
        """Where a run is."""
        return self.work / f"{run[0]}-{run[1]}"


def start(piece: Piece, run: tuple[str, int], gpu: int) -> subprocess.Popen:
    """A run in a process of its own; its output goes to a file beside its folder.

    Args:
        gpu: its number among those that this process sees; without any it is not read.
    """
    name, seed = run
    command = [sys.executable, "-m", "nsa_flex.bench.quality.one_run", name]
    command += [f"--size={piece.size}", f"--seed={seed}", f"--corpus={piece.corpus}"]
    command += [f"--out={piece.folder(run)}", *(f"--set={each}" for each in piece.overrides)]
    with piece.folder(run).with_suffix(".log").open("a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=_environment(piece, gpu))


def _environment(piece: Piece, gpu: int) -> dict[str, str]:
    found = dict(os.environ)
    if piece.gpus > 1:
        seen = [each for each in found.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        found["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)
    return found


def run_piece(
    piece: Piece,
    start: Callable[[Piece, tuple[str, int], int], Any] = start,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Start, watch and stop the runs; returns the rows, which are on disk at all times.

    Args:
        start: makes something with the `poll`, `terminate` and `kill` of a process.
    """
    begun = clock()
    piece.work.mkdir(parents=True, exist_ok=True)
    rows_of_corpus(piece.out, piece.corpus)
    length = config_of(piece.runs[0][0], piece.size, piece.overrides).data.seq_len
    cut(piece.corpus, length, piece.work / "cut", HELD_OUT_TOKENS // length)
    waiting = [run for run in piece.runs if not _finished(piece, run)]
    running: dict[tuple[str, int], Any] = {}
    places: dict[tuple[str, int], int] = {}  # GPUs of the running ones
    gpus = max(piece.gpus, 1)
    failed: list[str] = []
    asked = False
    while waiting or running:
        left = begun + piece.seconds - clock()
        for run in [run for run, process in running.items() if process.poll() is not None]:
            code = running.pop(run).poll()
            del places[run]
            if code:
                failed.append(f"{piece.folder(run).name} ended with {code}")
        if left < piece.closing + piece.least:
            waiting.clear()
        while waiting and len(running) < piece.side_by_side * gpus:
            run = waiting.pop(0)
            places[run] = min(range(gpus), key=list(places.values()).count)
            running[run] = start(piece, run, places[run])
        if left < piece.closing and not asked:
            asked = True
            for process in running.values():
                process.terminate()
        if left < 2 * POLL_SECONDS:
            for process in running.values():
                process.kill()
        collect(piece)
        sleep(POLL_SECONDS)
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


def _finished(piece: Piece, run: tuple[str, int]) -> bool:
    """Whether --out has a finished row of it, with as many steps as now.

    Raises:
        ValueError: with other settings, which its file does not tell apart.
    """
    if not piece.out.exists():
        return False
    config = config_of(run[0], piece.size, piece.overrides)
    wanted = (*run, piece.size, config.data.seq_len, config.training.steps)
    for row in read_rows(piece.out):
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
    parser.add_argument("--piece-seconds", type=float, default=Piece.seconds)
    parser.add_argument("--closing-seconds", type=float, default=Piece.closing)
    parser.add_argument("--least-seconds", type=float, default=Piece.least)
    parser.add_argument("--set", action="append", default=[], help="as of nsa-flex train")
    given = parser.parse_args()
    piece = Piece(
        given.corpus,
        given.work,
        given.out,
        in_order(given.variants, given.seeds),
        given.size,
        tuple(given.set),
        given.side_by_side,
        torch.cuda.device_count(),
        given.piece_seconds,
        given.closing_seconds,
        given.least_seconds,
    )
    for row in run_piece(piece):
        print({name: row.get(name) for name in ("case", "status", "tokens", "seconds", "loss")})


if __name__ == "__main__":
    main()
