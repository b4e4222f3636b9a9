"""Markdown tables of rows, and pages that hold them.

A page names its rows between two comments,

    <!-- table: headline bench/results/headline_h200.json -->
    <!-- end of table -->

and `python -m nsa_flex.bench.report.table docs/benchmarks.md` writes what is between them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from nsa_flex.bench.cases.models import IMPLEMENTATIONS
from nsa_flex.bench.report.cells import (
    dims,
    gib,
    milliseconds,
    over_floor,
    part_of,
    ratio,
    seconds,
    speed,
    tokens,
)
from nsa_flex.bench.report.rows import Row, read_rows

MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end of table -->)", re.S)
RIVAL = "sdpa-cudnn"
PASSES = {"forward": "forward", "forward_backward": "forward + backward"}

Table = list[list[str]]


def markdown(table: Table) -> str:
    """First row heads the columns."""
    head, *body = table
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cores(rows: list[Row]) -> dict[tuple[str, str, int], dict[tuple[str, str], Row]]:
    """(heads, D, tokens) -> (implementation, pass) -> row of the core on random choices."""
    found: dict[tuple[str, str, int], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["target"] == "core" and row["pattern"] == "random":
            shape = found.setdefault((row["heads"], dims(row), row["seq_len"]), {})
            shape[row["implementation"], row["pass"]] = row
    return dict(sorted(found.items(), key=lambda item: _by_heads(item[0])))


def headline(rows: list[Row]) -> Table:
    """Core against cuDNN: one line a shape."""
    columns = ["heads", "D", "tokens"]
    columns += ["forward, NSA", "dense", "dense ÷ NSA", "NSA ÷ floor"]
    columns += ["forward + backward, NSA", "dense", "dense ÷ NSA", "NSA ÷ floor"]
    table = [[*columns, "peak GiB, NSA", "dense"]]
    for (heads, dim, length), found in _cores(rows).items():
        line = [heads, dim, tokens({"seq_len": length})]
        for which in ("forward", "forward_backward"):
            nsa, dense = (found.get((who, which)) for who in ("nsa", RIVAL))
            line += [milliseconds(nsa), milliseconds(dense), ratio(dense, nsa), over_floor(nsa)]
        line += [gib(found.get((who, "forward_backward"))) for who in ("nsa", RIVAL)]
        table.append(line)
    return _without(table, "D") if len({dim for _, dim, _ in _cores(rows)}) == 1 else table


def _without(table: Table, column: str) -> Table:
    place = table[0].index(column)
    return [line[:place] + line[place + 1 :] for line in table]


def sweep(rows: list[Row]) -> Table:
    """Milliseconds of every implementation of the core: one line a pass and shape."""
    who = list(dict.fromkeys(row["implementation"] for row in rows if row["target"] == "core"))
    table = [["pass", "heads", "D", "tokens", *who]]
    for which, title in PASSES.items():
        for (heads, dim, length), found in _cores(rows).items():
            cells = [_median(found.get((name, which))) for name in who]
            table.append([title, heads, dim, tokens({"seq_len": length}), *cells])
    return table


def _median(row: Row | None) -> str:
    return milliseconds(row).partition(" ")[0]


def summary(rows: list[Row]) -> Table:
    """`headline` without spreads and floors."""
    table = [["heads", "tokens"]]
    for title in PASSES.values():
        table[0] += [f"{title}, ms", "dense ÷ NSA"]
    table[0].append("peak memory, GiB")
    for (heads, _, length), found in _cores(rows).items():
        line = [heads, tokens({"seq_len": length})]
        for which in PASSES:
            nsa, dense = (found.get((who, which)) for who in ("nsa", RIVAL))
            line += [f"{_median(nsa)} / {_median(dense)}", ratio(dense, nsa)]
        peaks = (gib(found.get((who, "forward_backward"))) for who in ("nsa", RIVAL))
        table.append([*line, " / ".join(peaks)])
    return table


def repeats(rows: list[Row]) -> Table:
    """Core against cuDNN, one case in several runs: one line a shape, pass and run.

    A column `run` of the rows tells the runs apart.
    """
    table = [["pass", "heads", "tokens", "run", "matrix TFLOP/s"]]
    table[0] += ["NSA, ms", "dense", "dense ÷ NSA"]
    runs = list(dict.fromkeys(row["run"] for row in rows))
    found = {run: _cores([row for row in rows if row["run"] == run]) for run in runs}
    for which, title in PASSES.items():
        for shape in _cores(rows):
            for run in runs:
                here = found[run].get(shape, {})
                nsa, dense = (here.get((who, which)) for who in ("nsa", RIVAL))
                if nsa is None:
                    continue
                line = [title, shape[0], tokens(nsa), run, f"{nsa['matrix_tflops']:.0f}"]
                table.append([*line, milliseconds(nsa), milliseconds(dense), ratio(dense, nsa)])
    return table


def _by_heads(shape: tuple[str, str, int]) -> tuple[int, list[int], int]:
    """Most query heads a KV head first, then narrow before wide, then short before long."""
    heads, dim, length = shape
    query_heads, kv_heads = (int(number) for number in heads.split("/"))
    return -query_heads // kv_heads, [int(number) for number in dim.split("/")], length


def parts(rows: list[Row]) -> Table:
    """One line a part, implementation and shape."""
    table = [["part", "on", "heads", "D", "tokens", "choices"]]
    table[0] += ["forward, ms", "÷ floor", "backward, ms", "÷ floor", "overlap"]
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    name: tuple[str, ...]
    for row in rows:
        if row["target"] in ("model", "compile"):
            continue
        shape = (row["heads"], dims(row), tokens(row), row["pattern"])
        name = (part_of(row), row["implementation"], *shape)
        found.setdefault(name, {})[row["pass"]] = row
    for name, passes in found.items():
        line = list(name)
        for which in ("forward", "backward"):
            line += [milliseconds(passes.get(which)), over_floor(passes.get(which))]
        overlaps = [row["overlap"] for row in passes.values() if "overlap" in row]
        table.append([*line, f"{overlaps[0]:.0%}" if overlaps else "-"])
    return table


def models(rows: list[Row]) -> Table:
    """One line a model, batch and length: tokens a second of training.

    The floor is that of NSA's step, beside the captured one if there is one.
    """
    table = [["model", "parameters", "batch", "tokens"]]
    table[0] += ["NSA, tokens/s", "as a graph", "eager", "÷ floor"]
    table[0] += ["dense, tokens/s", "as a graph", "eager", "peak GiB, NSA", "dense"]
    found = {
        (row["model"], row["batch"], row["seq_len"], row["implementation"]): row
        for row in rows
        if row["target"] == "model"
    }
    for model, batch, length in dict.fromkeys(key[:3] for key in found):
        each = {name: found.get((model, batch, length, name)) for name in IMPLEMENTATIONS}
        rows_there = [row for row in each.values() if row]
        size = next((row["parameters"] for row in rows_there if "parameters" in row), None)
        counted = "-" if size is None else f"{size / 1e6:.0f} M"
        speeds = [speed(row) for row in each.values()]
        best = each["nsa-graph"] or each["nsa"]
        line = [model, counted, str(batch), str(length)]
        line += [*speeds[:3], over_floor(best), *speeds[3:]]
        table.append([*line, gib(each["nsa"]), gib(each["dense"])])
    return table


def compiling(rows: list[Row]) -> Table:
    """Seconds of the first call."""
    table = [["heads", "tokens", "what", "cold, s", "warm, s"]]
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["target"] == "compile":
            found.setdefault(row["case"], {})[row["pass"]] = row
    for case, passes in found.items():
        any_pass = next(iter(passes.values()))
        what = "forward + backward" if " train " in case else "forward"
        times = [seconds(passes.get(f"compile_{name}")) for name in ("cold", "warm")]
        table.append([any_pass["heads"], tokens(any_pass), what, *times])
    return table


def reasons(rows: list[Row]) -> Table:
    """What was not measured, and why; once for the passes of a case."""
    lines = [(row["case"], row["status"], row["reason"]) for row in rows if row["status"] != "ok"]
    return [["case", "status", "reason"], *map(list, dict.fromkeys(lines))]


TABLES: dict[str, Callable[[list[Row]], Table]] = {
    "headline": headline,
    "sweep": sweep,
    "summary": summary,
    "repeats": repeats,
    "parts": parts,
    "models": models,
    "compile": compiling,
    "reasons": reasons,
}


def tables_of(rows: list[Row]) -> dict[str, Table]:
    """Those of the tables that these rows fill."""
    rivals = {row["implementation"] for row in rows if row["target"] == "core"}
    wanted = ["headline"] if {"nsa", RIVAL} <= rivals else []
    wanted += ["sweep"] if wanted and rivals > {"nsa", RIVAL} else []
    targets = {row["target"] for row in rows}
    if targets - {"model", "compile"} and (targets != {"core"} or not wanted):
        wanted.append("parts")
    wanted += [name for name, t in (("models", "model"), ("compile", "compile")) if t in targets]
    tables = {name: TABLES[name](rows) for name in [*wanted, "reasons"]}
    return {name: table for name, table in tables.items() if len(table) > 1}


def fill(page: str, root: Path) -> str:
    """The page with every marked table as its rows make it; paths are from `root`.

    Raises:
        ValueError: a marker names no table.
    """

    def render(match: re.Match[str]) -> str:
        opening, name, path, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        return opening + markdown(TABLES[name](read_rows(root / path))) + closing

    return MARKED.sub(render, page)


def main() -> None:
    """Rewrite the pages named on the command line, from the root of the checkout."""
    for name in sys.argv[1:]:
        page = Path(name)
        page.write_text(fill(page.read_text(), Path()))


if __name__ == "__main__":
    main()
