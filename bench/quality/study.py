"""All runs of the page of what NSA learns, side by side on the GPUs, a few minutes at a time.

    python -m nsa_flex.bench.quality.study --corpus corpus --seconds 540

starts what is not finished below --work, in order, and stops in time; the same command goes on.
Rows stand in --out, a file a part, and tables are printed. --list says what is left, and runs
nothing. All of it takes some hours of an H200.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality import conversion, one_run, recall
from nsa_flex.bench.quality.conversion_report import conversion as conversion_table
from nsa_flex.bench.quality.recall_report import recall as recall_table
from nsa_flex.bench.quality.report import quality as text_table
from nsa_flex.bench.quality.run import Piece, in_order
from nsa_flex.bench.quality.side_by_side import SECONDS, Job, Limits, run_jobs, start_in
from nsa_flex.bench.report.cells import markdown
from nsa_flex.bench.report.rows import Row, earlier_rows, merged, read_rows, write_rows

LENGTHS = {"4k": 4096, "16k": 16384, "64k": 65536}
SEEDS = (0, 1, 2)
BY_BRANCH = ("dense", "mean", "window", "window-compressed", "window-selected")
OTHERS = (
    *("weighted", "linear", "dense-nsa", "window-nsa", "small-blocks", "blocks-8", "blocks-32"),
    *("select-32", "select-128", "sliding-256", "sliding-1024"),
)
PIECES = ("continued", "one-dense", "no-align", "one-dense-align", "one-dense-aligned")


@dataclass(frozen=True)
class Run:
    """A job of the study, and what it leaves.

    Args:
        part: of the study.
        rows: its file of rows.
        piece: what it belongs to, where rows of text must be cut before.
    """

    part: str
    job: Job
    rows: Path
    piece: Piece | None = None


def study(corpus: Path, work: Path) -> list[Run]:
    """Every run, in the order in which they start.

    Args:
        work: folder of the study.
    """
    runs = [*_text(corpus, work, "16k", in_order((*BY_BRANCH, "mlp"), SEEDS))]
    runs += _recall(work, "scratch", in_order(("dense", "small-blocks", "mean"), SEEDS))
    runs += _conversion(corpus, work)
    runs += _text(corpus, work, "64k", in_order(BY_BRANCH, SEEDS), steps=256)
    runs += _text(corpus, work, "4k", in_order(("dense", "mean", "window"), SEEDS))
    runs += _recall(work, "aggregation", in_order(("dense", "small-blocks", "mean"), SEEDS))
    converted = "dense", "dense-nsa", "small-blocks", "mean"
    runs += _recall(work, "conversion", in_order(converted, SEEDS))
    runs += _recall(work, "aggregation", in_order(("dense-nsa", "blocks-32"), [0]))
    runs += _text(corpus, work, "16k", in_order(OTHERS, [0]))
    runs += _text(corpus, work, "16k", in_order(("dense", "mean", "mlp", "window"), [0]), "125m")
    return runs


Runs = Iterable[tuple[str, int]]  # variants and seeds


def _text(
    corpus: Path, work: Path, length: str, runs: Runs, size: str = "30m", steps: int = 1600
) -> Iterable[Run]:
    part = f"text-{length}" if size == "30m" else f"text-{length}-{size}"
    tokens = LENGTHS[length]
    batch = max(1, 32768 // tokens)
    settings = f"data.seq_len={tokens}", f"training.batch_size={batch}", f"training.steps={steps}"
    piece = Piece(corpus, work / part, work / f"{part}.json", tuple(runs), size, settings)
    for run in piece.runs:
        yield Run(part, piece.job(run), piece.folder(run) / one_run.ROW, piece)


def _recall(work: Path, recipe: str, runs: Runs) -> Iterable[Run]:
    for variant, seed in runs:
        folder = work / "recall" / f"{recipe}-{variant}-{seed}"
        command = ["-m", "nsa_flex.bench.quality.recall", variant, f"--recipe={recipe}"]
        command += [f"--seed={seed}", f"--out={folder}", f"--seconds={SECONDS}"]
        after: tuple[str, ...] = ()
        if recipe == "conversion":  # of what learnt the tasks with dense attention
            learnt = folder.with_name(f"scratch-dense-{seed}")
            command.append(f"--checkpoint={learnt / recall.MODEL}")
            after = (learnt.name,)
        yield Run("recall", Job(folder.name, tuple(command), after), folder / recall.ROW)


def _conversion(corpus: Path, work: Path) -> Iterable[Run]:
    for seed in SEEDS:
        folder = work / "conversion" / f"conversion-{seed}"
        rows = folder / "rows.json"
        command = ["-m", "nsa_flex.bench.quality.conversion", f"--corpus={corpus}"]
        command += [f"--work={folder}", f"--out={rows}", f"--seed={seed}"]
        command += [f"--seconds={SECONDS}", "--pieces", *PIECES]
        yield Run("conversion", Job(folder.name, tuple(command)), rows)


def rows_of(run: Run) -> list[Row]:
    """What it has written so far: one row, or a list of them."""
    if not run.rows.exists():
        return []
    found = json.loads(run.rows.read_text())
    return found if isinstance(found, list) else [found]


def is_finished(run: Run) -> bool:
    """Whether nothing is left of it."""
    rows = rows_of(run)
    finished = {row.get("piece") for row in rows if row["status"] == "ok"}
    if run.part == "conversion":
        return {conversion.DENSE, *PIECES} <= finished
    return bool(finished)


def collect(runs: Iterable[Run], out: Path) -> None:
    """Rows of all runs in one file a part, beside those that are there."""
    parts: dict[str, list[Row]] = {}
    for run in runs:
        parts.setdefault(run.part, []).extend(rows_of(run))
    for part, rows in parts.items():
        path = out / f"{part}.json"
        if rows:
            write_rows(path, merged(earlier_rows(path), rows))


def table(part: str, rows: list[Row]) -> pd.DataFrame:
    """Of a part's rows."""
    tables: dict[str, Callable[[list[Row]], pd.DataFrame]] = {
        "recall": recall_table,
        "conversion": conversion_table,
    }
    return tables.get(part, text_table)([row for row in rows if row["status"] != "running"])


def main() -> None:
    """Run, print the tables."""
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, default=Path("runs/study/rows"), help="folder of rows")
    parser.add_argument("--parts", nargs="+", default=[], help="default: all")
    parser.add_argument("--seconds", type=float, default=Limits.seconds)
    parser.add_argument("--closing-seconds", type=float, default=Limits.closing)
    parser.add_argument(
        "--side-by-side", type=int, default=Limits.side_by_side, help="on each GPU"
    )
    parser.add_argument("--list", action="store_true", help="say what is left, and run nothing")
    given = parser.parse_args()
    runs = study(given.corpus, given.work)
    known = dict.fromkeys(run.part for run in runs)
    if unknown := [part for part in given.parts if part not in known]:
        parser.error(f"--parts {unknown[0]}: expected some of {', '.join(known)}")
    runs = [run for run in runs if run.part in (given.parts or known)]
    if given.list:
        for run in runs:
            print(f"{run.part}  {run.job.name}  {'finished' if is_finished(run) else 'to do'}")
        return
    for piece in {run.piece for run in runs if run.piece and not is_finished(run)}:
        piece.cut()
    limits = Limits(
        given.side_by_side, torch.cuda.device_count(), given.seconds, given.closing_seconds
    )
    by_job = {run.job: run for run in runs}
    failed = run_jobs(
        tuple(by_job),
        limits,
        lambda job: is_finished(by_job[job]),
        lambda: collect(runs, given.out),
        start_in(given.work / "logs", limits),
    )
    collect(runs, given.out)
    for part in dict.fromkeys(run.part for run in runs):
        path = given.out / f"{part}.json"
        if path.exists():
            print(f"{path}\n\n{markdown(table(part, read_rows(path)))}\n")
    for text in failed:
        print(f"{text}: see its log in {given.work / 'logs'}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
