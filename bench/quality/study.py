"""The runs of the study of what NSA learns, side by side on the GPUs, a few minutes at a time.

    python -m nsa_flex.bench.quality.study --corpus corpus --seconds 540

starts what is not finished below --work, in order, and stops in time; the same command goes on.
Rows and plots stand in --out, a file a part, and tables are printed. --list says what is left, and
runs nothing. All of it takes some hours of an H200.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality import conversion, one_run, recall, recall_report, report
from nsa_flex.bench.quality.build import rows_of_corpus
from nsa_flex.bench.quality.conversion_report import conversion as conversion_table
from nsa_flex.bench.quality.recall_recipes import RECIPES
from nsa_flex.bench.quality.run import Piece, in_order, is_finished
from nsa_flex.bench.quality.side_by_side import SECONDS, Job, Limits, run_jobs, start_in
from nsa_flex.bench.report.cells import markdown
from nsa_flex.bench.report.rows import Row, earlier_rows, is_of, merged, write_rows

RECALL, CONVERSION = "recall", "conversion"  # parts; the others are of text
LENGTHS = {"4k": 4096, "16k": 16384, "64k": 65536}
SEEDS = (0, 1, 2)
BY_BRANCH = ("dense", "mean", "window", "window-compressed", "window-selected")
OTHERS = (
    *("weighted", "linear", "dense-nsa", "window-nsa", "small-blocks", "blocks-8", "blocks-32"),
    *("select-32", "select-128", "sliding-256", "sliding-1024"),
)
ONE_DENSE = ("one-dense", "one-dense-align", "one-dense-aligned", "one-dense-short")
PIECES = ("continued", "no-align", *ONE_DENSE)

Runs = Iterable[tuple[str, int]]  # variants and seeds


@dataclass(frozen=True)
class Run:
    """A job of the study, and what it leaves.

    Args:
        part: of the study.
        path: its file of rows.
        is_done: whether these rows of it say that nothing is left.
        piece: what it belongs to, where rows of text must be cut before.
    """

    part: str
    job: Job
    path: Path
    is_done: Callable[[list[Row]], bool]
    piece: Piece | None = None

    def rows(self) -> list[Row]:
        """What it has written so far: one row, or a list of them."""
        if not self.path.exists():
            return []
        found = json.loads(self.path.read_text())
        return found if isinstance(found, list) else [found]

    def is_finished(self) -> bool:
        """Whether nothing is left of it."""
        return self.is_done(self.rows())


def study(corpus: Path, work: Path, out: Path) -> list[Run]:
    """Every run, in the order in which they start.

    Args:
        work: folder of the runs.
        out: folder of rows.
    """
    text = partial(_text, corpus, work, out)
    runs = [*text("16k", in_order((*BY_BRANCH, "mlp"), SEEDS))]
    runs += _recall(work, "scratch", in_order(("dense", "small-blocks", "mean"), SEEDS))
    runs += _conversion(corpus, work)
    runs += text("64k", in_order(BY_BRANCH, SEEDS), steps=256)
    runs += text("4k", in_order(("dense", "mean", "window"), SEEDS))
    runs += _recall(work, "aggregation", in_order(("dense", "small-blocks", "mean"), SEEDS))
    converted = "small-blocks", "mean"
    runs += _recall(work, "conversion", in_order(("dense", "dense-nsa", *converted), SEEDS))
    runs += _recall(work, "one-dense", in_order(converted, SEEDS))
    runs += _recall(work, "patched", in_order(converted, SEEDS))
    runs += _recall(work, "aggregation", in_order(("dense-nsa", "blocks-32"), [0]))
    runs += text("16k", in_order(OTHERS, [0]))
    runs += text("16k", in_order(("dense", "mean", "mlp", "window"), [0]), size="125m")
    return runs


def _text(
    corpus: Path,
    work: Path,
    out: Path,
    length: str,
    runs: Runs,
    size: str = "30m",
    steps: int = 1600,
) -> Iterable[Run]:
    part = f"text-{length}" if size == "30m" else f"text-{length}-{size}"
    tokens = LENGTHS[length]
    batch = max(1, 32768 // tokens)
    settings = f"data.seq_len={tokens}", f"training.batch_size={batch}", f"training.steps={steps}"
    piece = Piece(corpus, work / part, out / f"{part}.json", tuple(runs), size, settings)
    for run in piece.runs:
        path = piece.folder(run) / one_run.ROW
        yield Run(part, piece.job(run), path, partial(is_finished, piece, run), piece)


def _recall(work: Path, recipe: str, runs: Runs) -> Iterable[Run]:
    for variant, seed in runs:
        folder = work / RECALL / f"{recipe}-{variant}-{seed}"
        command = ["-m", "nsa_flex.bench.quality.recall", variant, f"--recipe={recipe}"]
        command += [f"--seed={seed}", f"--out={folder}", f"--seconds={SECONDS}"]
        after: tuple[str, ...] = ()
        if RECIPES[recipe].of_checkpoint:  # one that has learnt the tasks with dense attention
            learnt = folder.with_name(f"scratch-dense-{seed}")
            command.append(f"--checkpoint={learnt / recall.MODEL}")
            after = (learnt.name,)
        job = Job(folder.name, tuple(command), after)
        yield Run(RECALL, job, folder / recall.ROW, partial(_done, {""}, RECIPES[recipe]))


def _conversion(corpus: Path, work: Path) -> Iterable[Run]:
    is_done = partial(_done, {conversion.DENSE, *PIECES}, conversion.Recipe())
    for seed in SEEDS:
        folder = work / CONVERSION / f"conversion-{seed}"
        path = folder / "rows.json"
        command = ["-m", "nsa_flex.bench.quality.conversion", f"--corpus={corpus}"]
        command += [f"--work={folder}", f"--out={path}", f"--seed={seed}"]
        command += [f"--seconds={SECONDS}", "--pieces", *PIECES]
        yield Run(CONVERSION, Job(folder.name, tuple(command)), path, is_done)


def _done(wanted: set[str], recipe: Any, rows: list[Row]) -> bool:
    """Whether all pieces are finished, by the recipe as it is now; recall has one, of no name."""
    finished = [row for row in rows if row["status"] == "ok" and is_of(row["recipe"], recipe)]
    return wanted <= {row.get("piece", "") for row in finished}


def collect(runs: Iterable[Run], out: Path) -> None:
    """Rows of all runs in one file a part, beside those that are there."""
    parts: dict[str, list[Row]] = {}
    for run in runs:
        parts.setdefault(run.part, []).extend(run.rows())
    for part, rows in parts.items():
        path = out / f"{part}.json"
        if rows:
            write_rows(path, merged(earlier_rows(path), rows))


def told(part: str, rows: list[Row], plot: Path) -> str:
    """The tables of a part's finished and stopped runs; draws its plot, where it has one."""
    if part == CONVERSION:
        return markdown(conversion_table(rows))
    stopped = set() if part == RECALL else {"stopped"}
    rows = [row for row in rows if row["status"] in {"ok", *stopped}]
    if not rows:
        return "nothing yet"
    if part == RECALL:
        recall_report.draw(rows, plot)
        tables = recall_report.recall(rows), recall_report.by_task(rows)
        return "\n\n".join(map(markdown, tables))
    report.draw(rows, plot)
    return markdown(report.quality(rows))


def main() -> None:
    """Run, print the tables."""
    begun = time.monotonic()
    parser = parser_of(__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/study"))
    parser.add_argument("--out", type=Path, help="folder of rows; default: rows below --work")
    parser.add_argument("--parts", nargs="+", default=[], help="default: all")
    parser.add_argument("--seconds", type=float, default=Limits.seconds)
    parser.add_argument("--closing-seconds", type=float, default=Limits.closing)
    parser.add_argument("--side-by-side", type=int, default=2, help="on each GPU")
    parser.add_argument("--list", action="store_true", help="say what is left; run nothing")
    given = parser.parse_args()
    out = given.out or given.work / "rows"
    runs = study(given.corpus, given.work, out)
    known = dict.fromkeys(run.part for run in runs)
    if unknown := [part for part in given.parts if part not in known]:
        parser.error(f"--parts {unknown[0]}: expected some of {', '.join(known)}")
    parts = given.parts or [*known]
    runs = [run for run in runs if run.part in parts]
    if given.list:
        for run in runs:
            print(f"{run.part}  {run.job.name}  {'finished' if run.is_finished() else 'to do'}")
        return
    for part in parts:
        if part != RECALL:
            rows_of_corpus(out / f"{part}.json", given.corpus)
    for piece in {run.piece for run in runs if run.piece and not run.is_finished()}:
        piece.cut()
    limits = Limits(
        given.side_by_side, torch.cuda.device_count(), given.seconds, given.closing_seconds
    )
    by_job = {run.job: run for run in runs}
    logs = given.work / "logs"
    failed = run_jobs(
        tuple(by_job),
        limits,
        begun,
        lambda job: by_job[job].is_finished(),
        lambda: collect(runs, out),
        start_in(logs, limits),
    )
    collect(runs, out)
    for part in parts:
        path = out / f"{part}.json"
        if rows := earlier_rows(path):
            print(f"{path}\n\n{told(part, rows, path.with_suffix('.png'))}\n")
    for text in failed:
        print(f"{text}: see its log in {logs}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
