"""Markdown tables of rows, and pages that hold them.

A page names its rows between two comments,

    <!-- table: headline bench/results/headline_h200.json -->
    <!-- end of table -->

and `python -m nsa_flex.bench.report.table docs/guide/bench.md` writes what is between them:
nothing where there are no such rows yet.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from nsa_flex.bench.cases.layers import IMPLEMENTATIONS as LAYERS
from nsa_flex.bench.cases.models import IMPLEMENTATIONS, WHOLE
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.quality.conversion_report import choices, conversion
from nsa_flex.bench.quality.recall_report import by_task, recall
from nsa_flex.bench.quality.report import quality
from nsa_flex.bench.report.cells import (
    EMPTY,
    frame,
    gib,
    markdown,
    medians,
    milliseconds,
    number,
    part_names,
    speeds,
    tokens,
    waits,
)
from nsa_flex.bench.report.generation import generating, prefixes, quantizing, serving
from nsa_flex.bench.report.rows import Row, read_rows

MARKED = re.compile(r"(<!-- table: (\S+) (\S+) -->\n)(.*?)(<!-- end of table -->)", re.S)
RIVAL = "sdpa-cudnn"
NO_PARTS = {"layer", "model", "compile"}
PASSES = {"forward": "forward", "forward_backward": "forward + backward"}
SHAPE = ["heads", "D", "seq_len"]


def cores(rows: list[Row]) -> pd.DataFrame:
    """Rows of the core on random inputs: most query heads a KV head, narrow and short first."""
    table = frame(rows)
    table = table[(table.target == "core") & (table.pattern == "random")]
    pairs = table.heads.str.split("/", expand=True).reindex(columns=[0, 1]).astype(float)
    order = {"group": -pairs[0] / pairs[1], "wide": table.head_dim, "out": table.value_dim}
    order["length"] = table.seq_len
    return table.loc[pd.DataFrame(order).sort_values(list(order), kind="stable").index]


def _of(table: pd.DataFrame, implementation: str, which: str, index: pd.Index) -> pd.DataFrame:
    """The rows of one implementation and pass, one a shape of `index`."""
    found = table[(table.implementation == implementation) & (table["pass"] == which)]
    return found.drop_duplicates(SHAPE, keep="last").set_index(SHAPE).reindex(index)


def _ratio(above: pd.DataFrame, below: pd.DataFrame, column: str = "median_ms") -> pd.Series:
    measured = (above.status == "ok") & (below.status == "ok")
    return number((above[column] / below[column]).where(measured))


def _shapes(table: pd.DataFrame) -> tuple[pd.Index, pd.DataFrame]:
    """Every shape once, and the columns that name it; D only where there are several."""
    index = pd.MultiIndex.from_frame(table[SHAPE].drop_duplicates())
    named = index.to_frame()
    named["tokens"] = named.seq_len.map(tokens)
    kept = ["heads", "D", "tokens"] if named.D.nunique() > 1 else ["heads", "tokens"]
    return index, named[kept]


def headline(rows: list[Row]) -> pd.DataFrame:
    """Core against cuDNN: what the device takes and, host included, what a caller waits for."""
    table = cores(rows)
    index, found = _shapes(table)
    nsa = dense = pd.DataFrame()
    for which, title in PASSES.items():
        nsa, dense = (_of(table, name, which, index) for name in ("nsa", RIVAL))
        found[f"{title}, NSA"] = milliseconds(nsa)
        found[f"{title}, dense"] = milliseconds(dense)
        found[f"{title}, dense ÷ NSA"] = _ratio(dense, nsa)
        found[f"{title}, NSA ÷ floor"] = number(nsa.over_floor, 1)
        found[f"{title}, a caller waits, NSA / dense"] = _pair(waits(nsa), waits(dense))
    found["peak GiB, NSA / dense"] = _pair(gib(nsa), gib(dense))
    found["commit"] = nsa.commit
    return found.fillna(EMPTY)


def _pair(ours: pd.Series, theirs: pd.Series) -> pd.Series:
    return ours.fillna(EMPTY) + " / " + theirs.fillna(EMPTY)


def _add_waits(found: pd.DataFrame, nsa: pd.DataFrame, dense: pd.DataFrame) -> None:
    """What a caller waits for, where that was measured: rows from before have none."""
    if nsa.wall_ms.notna().any():
        found["a caller waits, NSA / dense"] = _pair(waits(nsa), waits(dense))


def summary(rows: list[Row]) -> pd.DataFrame:
    """`headline` without spreads and floors."""
    table = cores(rows)
    index, found = _shapes(table)
    nsa = dense = pd.DataFrame()
    for which, title in PASSES.items():
        nsa, dense = (_of(table, name, which, index) for name in ("nsa", RIVAL))
        found[f"{title}, device ms"] = _pair(medians(nsa), medians(dense))
        found["dense ÷ NSA" + " " * len(found.columns)] = _ratio(dense, nsa)
        found[f"{title}, caller ms"] = _pair(waits(nsa), waits(dense))
    found["peak GiB"] = _pair(gib(nsa), gib(dense))
    found["commit"] = nsa.commit
    return found.fillna(EMPTY).rename(columns=str.strip)


def sweep(rows: list[Row]) -> pd.DataFrame:
    """Milliseconds of every implementation of the core: one line a pass and shape."""
    table = cores(rows)
    index, named = _shapes(table)
    named["D"] = [shape[1] for shape in index]
    found = []
    for which, title in PASSES.items():
        each = named[["heads", "D", "tokens"]].copy()
        each.insert(0, "pass", title)
        for name in dict.fromkeys(
            row["implementation"] for row in rows if row["target"] == "core"
        ):
            each[name] = medians(_of(table, name, which, index))
        _add_waits(each, _of(table, "nsa", which, index), _of(table, RIVAL, which, index))
        found.append(each)
    return pd.concat(found).fillna(EMPTY)


def packed(rows: list[Row]) -> pd.DataFrame:
    """Documents packed into one row, against the same as batch rows and dense on FA-2 varlen."""
    table = frame(rows)
    names = ["heads", "batch", "seq_len", "pass"]
    table = table[(table.target == "core") & table["pass"].isin(list(PASSES))]
    index = pd.MultiIndex.from_frame(table[names].drop_duplicates())
    each = {
        who: table[table.implementation == who].set_index(names).reindex(index)
        for who in ("nsa-packed", "nsa", "fa2-varlen")
    }
    ours, rows_of_batch, dense = each.values()
    found = pd.DataFrame({"heads": [place[0] for place in index]}, index=index)
    found["documents"] = [f"{place[1]} x {tokens(place[2])}" for place in index]
    found["pass"] = [PASSES[place[3]] for place in index]
    for title, part in zip(("packed, ms", "batch rows", "dense"), each.values(), strict=True):
        found[title] = milliseconds(part)
    found["packed ÷ batch rows"] = _ratio(ours, rows_of_batch)
    told = table[table.implementation == "nsa-packed-told"].set_index(names).reindex(index)
    if told.median_ms.notna().any():
        found["longest told"] = milliseconds(told)
        found["longest told ÷ batch rows"] = _ratio(told, rows_of_batch)
    found["dense ÷ packed"] = _ratio(dense, ours)
    found["a caller waits, packed / dense"] = _pair(waits(ours), waits(dense))
    found["commit"] = ours.commit
    return found.fillna(EMPTY)


_CHECKPOINTS = {"core": "NSA-1B", "infllm-v2": "InfLLM-V2", "minimax-m3": "MiniMax-M3"}


def checkpoints(rows: list[Row]) -> pd.DataFrame:
    """Attention of public checkpoints against cuDNN, its choice of blocks included."""
    table = frame(rows)
    names = ["target", "heads", "D", "seq_len"]
    index = pd.MultiIndex.from_frame(table[names].drop_duplicates())
    found = index.to_frame(index=False).set_axis(["attention of", "heads", "D", "tokens"], axis=1)
    found.index = index
    found["attention of"] = found["attention of"].map(_CHECKPOINTS)
    found["tokens"] = found.tokens.map(tokens)
    ours = dense = pd.DataFrame()
    for which, title in PASSES.items():
        of_pass = table[table["pass"] == which]
        ours, dense = (
            of_pass[of_pass.implementation == name].set_index(names).reindex(index)
            for name in ("nsa", RIVAL)
        )
        found[f"{title}, sparse / dense ms"] = _pair(medians(ours), medians(dense))
        found["dense ÷ sparse" + " " * len(found.columns)] = _ratio(dense, ours)
    found["peak GiB"] = _pair(gib(ours), gib(dense))
    found["commit"] = ours.commit
    return found.fillna(EMPTY).rename(columns=str.strip)


def layers(rows: list[Row]) -> pd.DataFrame:
    """A layer on packed documents against the same as batch rows, forward + backward."""
    table = frame(rows)
    names = ["heads", "batch", "seq_len"]
    table = table[(table.target == "layer") & (table["pass"] == "forward_backward")]
    index = pd.MultiIndex.from_frame(table[names].drop_duplicates())
    each = [table[table.implementation == who].set_index(names).reindex(index) for who in LAYERS]
    found = pd.DataFrame({"heads": [place[0] for place in index]}, index=index)
    found["documents"] = [f"{place[1]} x {tokens(place[2])}" for place in index]
    for title, part in zip(("batch rows, ms", "position_ids", "cu_seq_lens"), each, strict=True):
        found[title] = milliseconds(part)
        if part is not each[0]:
            found[f"{title} ÷ batch rows"] = _ratio(part, each[0])
    found["commit"] = each[0].commit
    return found.fillna(EMPTY)


def repeats(rows: list[Row]) -> pd.DataFrame:
    """Core against cuDNN, one case in several runs: one line a shape, pass and run.

    A column `run` of the rows tells the runs apart.
    """
    table = cores(rows)
    index, named = _shapes(table)
    found = []
    for place, (which, title) in enumerate(PASSES.items()):
        for turn, run in enumerate(dict.fromkeys(row["run"] for row in rows)):
            part = table[table.run == run]
            nsa, dense = (_of(part, name, which, index) for name in ("nsa", RIVAL))
            each = named[["heads", "tokens"]].copy()
            each.insert(0, "pass", title)
            each["run"], each["matrix TFLOP/s"] = run, number(nsa.matrix_tflops, 0)
            each["NSA, ms"], each["dense"] = milliseconds(nsa), milliseconds(dense)
            each["dense ÷ NSA"], each["commit"] = _ratio(dense, nsa), nsa.commit
            each["order"] = [(place, shape, turn) for shape in range(len(index))]
            found.append(each[nsa.status.notna()])
    return pd.concat(found).sort_values("order").drop(columns="order").fillna(EMPTY)


def parts(rows: list[Row]) -> pd.DataFrame:
    """One line a part, implementation and shape."""
    table = frame(rows)
    table = table[~table.target.isin(NO_PARTS)]
    table = table.assign(part=part_names(table), on=table.implementation, choices=table.pattern)
    names = ["part", "on", "heads", "D", "tokens", "choices"]
    found = table[names].drop_duplicates().set_index(names, drop=False)
    for which in ("forward", "backward"):
        each = table[table["pass"] == which].drop_duplicates(names, keep="last").set_index(names)
        each = each.reindex(found.index)
        found[f"{which}, ms"] = milliseconds(each)
        found[f"{which}, ÷ floor"] = number(each.over_floor, 1)
        if each.wall_ms.notna().any():  # rows from before it was measured have none
            found[f"{which}, a caller waits"] = waits(each)
    overlaps = table.groupby(names, sort=False).overlap.first().reindex(found.index)
    found["overlap"] = overlaps.map(lambda x: EMPTY if pd.isna(x) else f"{x:.0%}").astype(object)
    found["commit"] = table.groupby(names, sort=False).commit.first().reindex(found.index)
    return found.fillna(EMPTY)


def models(rows: list[Row]) -> pd.DataFrame:
    """One line a model, batch and length: tokens a second of training.

    The floor is that of NSA's step, beside the captured one if there is one.
    """
    table = frame(rows)
    table = table[(table.target == "model") & table.implementation.isin(IMPLEMENTATIONS)]
    found, each = _steps(table)
    sizes = table.groupby(_STEP, sort=False).parameters.first().reindex(found.index)
    parameters = number(sizes, 0, 1e6).where(sizes.isna(), number(sizes, 0, 1e6) + " M")
    found.insert(1, "parameters", parameters)
    floors = each["nsa-graph"].over_floor.fillna(each["nsa"].over_floor)
    for title, name in zip(_MODEL_TITLES, IMPLEMENTATIONS, strict=True):
        found[title] = speeds(each[name])
        if name == "nsa-eager":
            found["÷ floor"] = number(floors, 1)
    _add_waits(found, each["nsa"], each["dense"])
    found["peak GiB, NSA / dense"] = _pair(gib(each["nsa"]), gib(each["dense"]))
    found["commit"] = each["nsa"].commit.fillna(each["nsa-graph"].commit)
    return found.fillna(EMPTY)


# In the order of IMPLEMENTATIONS.
_MODEL_TITLES = (
    *("NSA, tokens/s", "NSA as a graph", "NSA eager"),
    *("dense, tokens/s", "dense as a graph", "dense eager"),
    "transformers' sdpa",
)
_STEP = ["model", "batch", "seq_len"]


def _steps(table: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """A line for each training step of `table`, and its rows by implementation, as the lines."""
    index = pd.MultiIndex.from_frame(table[_STEP].drop_duplicates())
    found = pd.DataFrame({"model": [str(place[0]) for place in index]}, index=index)
    found["batch"], found["tokens"] = ([str(place[i]) for place in index] for i in (1, 2))
    each = {
        name: table[table.implementation == name].set_index(_STEP).reindex(index)
        for name in (*IMPLEMENTATIONS, *WHOLE)
    }
    return found, each


def wholes(rows: list[Row]) -> pd.DataFrame:
    """Tokens a second of the decoder as one graph, beside its layers compiled one by one."""
    table = frame(rows)
    table = table[table.target == "model"]
    keys = table[table.implementation.isin(WHOLE)][_STEP].drop_duplicates()
    found, each = _steps(table.merge(keys, on=_STEP))
    ours, theirs = (each[name] for name in WHOLE)
    found["NSA, one graph, tokens/s"] = speeds(ours)
    found["NSA by layers"] = speeds(each["nsa"])
    found["transformers' sdpa, one graph"] = speeds(theirs)
    found["transformers' sdpa by layers"] = speeds(each["transformers-sdpa"])
    found["one graph, NSA ÷ sdpa"] = _ratio(ours, theirs, "tokens_per_s")
    found["peak GiB, NSA / sdpa"] = _pair(gib(ours), gib(theirs))
    found["commit"] = ours.commit
    return found.fillna(EMPTY)


def compiling(rows: list[Row]) -> pd.DataFrame:
    """Seconds of the first call."""
    table = frame(rows)
    table = table[table.target == "compile"]
    found = table.drop_duplicates("case").set_index("case")
    trained = found.index.str.contains(" train ")
    found = found[["heads", "tokens", "commit"]]
    found.insert(2, "what", ["forward + backward" if train else "forward" for train in trained])
    for place, name in enumerate(("cold", "warm")):
        each = table[table["pass"] == f"compile_{name}"].set_index("case").reindex(found.index)
        found.insert(3 + place, f"{name}, s", number(each.median_ms, 1, 1e3))
    return found


def reasons(rows: list[Row]) -> pd.DataFrame:
    """What was not measured, and why; once for the passes of a case."""
    table = frame(rows)
    return table[table.status != "ok"][["case", "status", "reason"]].drop_duplicates()


def tested(rows: list[Row]) -> pd.DataFrame:
    """One line an environment: versions, and how many tests passed, failed and were skipped."""
    lines = []
    for row in rows:
        numbers = [str(row.get(name, "-")) for name in ("passed", "failed", "skipped")]
        lines.append(
            {
                "environment": f"`{row['case']}`",
                **{title: row.get(title.lower(), "-") for title in _VERSIONS},
                "passed / failed / skipped": " / ".join(numbers)
                if "passed" in row
                else row["status"],
                "date": row["date"],
                "commit": row["commit"] or "-",
            }
        )
    return pd.DataFrame(lines)


def persons_path(rows: list[Row]) -> pd.DataFrame:
    """Seconds of each command of the guide, and of all."""
    lines = [{"command": f"`{row['case']}`", "seconds": f"{row['seconds']:.0f}"} for row in rows]
    total = sum(row["seconds"] for row in rows)
    return pd.DataFrame([*lines, {"command": "all", "seconds": f"{total:.0f}"}])


_VERSIONS = ("Python", "torch", "Triton", "transformers")
TABLES: dict[str, Callable[[list[Row]], pd.DataFrame]] = {
    "headline": headline,
    "sweep": sweep,
    "summary": summary,
    "packed": packed,
    "layers": layers,
    "checkpoints": checkpoints,
    "repeats": repeats,
    "parts": parts,
    "models": models,
    "wholes": wholes,
    "compile": compiling,
    "generate": generating,
    "quantized": quantizing,
    "serving": serving,
    "prefixes": prefixes,
    "tested": tested,
    "path": persons_path,
    "quality": quality,
    "recall": recall,
    "by_task": by_task,
    "conversion": conversion,
    "choices": choices,
    "reasons": reasons,
}


def tables_of(rows: list[Row]) -> dict[str, pd.DataFrame]:
    """Those of the tables that these rows fill."""
    rivals = {row["implementation"] for row in rows if row["target"] == "core"}
    wanted = ["headline"] if {"nsa", RIVAL} <= rivals else []
    wanted += ["sweep"] if wanted and rivals > {"nsa", RIVAL} else []
    targets = {row["target"] for row in rows}
    wanted += ["packed"] if "nsa-packed" in rivals else []
    if targets - NO_PARTS and (targets != {"core"} or not wanted):
        wanted.append("parts")
    named = (("layers", "layer"), ("models", "model"), ("wholes", "model"), ("compile", "compile"))
    wanted += [name for name, target in named if target in targets]
    tables = {name: TABLES[name](rows) for name in [*wanted, "reasons"]}
    return {name: table for name, table in tables.items() if len(table)}


def fill(page: str, root: Path) -> str:
    """The page with every marked table as its rows make it; paths are from `root`.

    Raises:
        ValueError: a marker names no table.
    """

    def render(match: re.Match[str]) -> str:
        opening, name, path, _, closing = match.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        rows = root / path
        return (
            opening + (markdown(TABLES[name](read_rows(rows))) if rows.exists() else "") + closing
        )

    return MARKED.sub(render, page)


def main() -> None:
    """Rewrite the pages named on the command line, from the root of the checkout."""
    parser = parser_of(__doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE", help="Markdown files")
    for page in parser.parse_args().pages:
        page.write_text(fill(page.read_text(), Path()))


if __name__ == "__main__":
    main()
