"""`nsa-flex bench`: measures NSA's parts, its core and whole models against dense attention."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nsa_flex.bench.cases.case import DTYPES, Case
from nsa_flex.bench.cases.registry import PRESETS, AnyCase, preset
from nsa_flex.bench.measure import machine
from nsa_flex.bench.measure.runner import Options, run
from nsa_flex.bench.report.rows import Notebook, Row, read_rows
from nsa_flex.cli.options import SEEDS, check_device, dtype_name, fail, heads_of, pair_of
from nsa_flex.cli.outputs import check_folder, print_json, show_table

if TYPE_CHECKING:
    import pandas as pd


def bench(
    preset_name: Annotated[
        str | None,
        typer.Option(
            "--preset", help=f"{', '.join(PRESETS)}. Default: quick on CUDA, smoke on a CPU."
        ),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Keep cases whose name holds this text; repeatable.")
    ] = None,
    heads: Annotated[
        list[str] | None, typer.Option(help="Hq/Hkv instead of the preset's; repeatable.")
    ] = None,
    seq_len: Annotated[
        list[int] | None, typer.Option(min=1, help="S instead of the preset's; repeatable.")
    ] = None,
    head_dim: Annotated[
        list[str] | None, typer.Option(help="D or D/Dv instead of the preset's; repeatable.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="B instead of the preset's.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"Instead of the preset's: {', '.join(DTYPES)}.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; auto: CUDA if any.")] = "auto",
    milliseconds: Annotated[
        float, typer.Option(min=1, help="About how long each measurement repeats.")
    ] = 300.0,
    compiler: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "",
    seed: Annotated[int, typer.Option(help="Of the inputs.", **SEEDS)] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of rows; default nsa_flex_bench/PRESET.json. Cases that it has "
            "from this device, versions and sources, with this compiler and seed, are not "
            "measured again."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what --out holds.")] = False,
    run_them: Annotated[
        bool, typer.Option("--run/--no-run", help="--no-run: show the rows that --out holds.")
    ] = True,
    list_them: Annotated[bool, typer.Option("--list", help="Name the cases and stop.")] = False,
    compare_with: Annotated[
        Path | None, typer.Option("--compare", help="Rows to compare with; exit 1 if slower.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the rows to this PNG.")] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown tables.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Rows and verdicts on stdout, progress on stderr.")
    ] = False,
) -> None:
    """Measure NSA against dense attention: parts, core, training steps, compilation.

    Every result is checked against a float64 reference before it is timed. Rows are written as
    they are measured; an interrupted run goes on where it stopped. Presets:

    {presets}

    Exits with 1 if a result was wrong, a case crashed, or --compare found something slower; with
    2 on wrong usage.

    Example: `nsa-flex bench --preset headline`

    Example: `nsa-flex bench --preset quick --heads 12/2 --head-dim 64 --seq-len 4096 --json`

    Example: `nsa-flex bench --preset headline --compare old.json --plot headline.png`

    Example: `nsa-flex bench --no-run --out rows.json --markdown`
    """
    where = check_device(device, "benchmarks run")
    name = preset_name or ("quick" if where.type == "cuda" else "smoke")
    shapes = shapes_of(heads, seq_len, head_dim, batch, dtype)
    if not (run_them or list_them) and shapes != [{}]:
        raise typer.BadParameter("shows all rows of --out; --only chooses", param_hint="--no-run")
    cases = _cases(name, shapes, only or []) if run_them or list_them else []
    if list_them:
        keys = [case.key for case in cases]
        if as_json:
            print_json(keys)
        else:
            typer.echo("\n".join(keys))
        return
    if run_them:
        _check_runnable(name, where, cases)
    path = out or Path("nsa_flex_bench") / f"{name}.json"
    _check_files(path, compare_with, plot, run_them)
    earlier = read_rows(compare_with) if compare_with else []
    console = Console(stderr=as_json or as_markdown, highlight=False)
    if run_them:
        compiler = compiler or ("inductor" if where.type == "cuda" else "aot_eager")
        options = Options(where, milliseconds, compiler, seed)
        shared = {**machine.describe(where), "compiler": compiler, "seed": seed}
        rows = _run(cases, Notebook(path, shared, fresh=fresh), options, console)
    else:
        rows = _chosen(read_rows(path), only or [])
    verdicts = _compare(earlier, rows) if compare_with else None
    if plot is not None:
        from nsa_flex.bench.report.plots import draw

        plot.parent.mkdir(parents=True, exist_ok=True)
        draw(rows, plot)
    _show(rows, verdicts, as_json=as_json, as_markdown=as_markdown)
    slower = verdicts is not None and verdicts.verdict.isin(["slower", "broken"]).any()
    raise typer.Exit(1 if slower or any(row["status"] == "failed" for row in rows) else 0)


# The registry describes its presets once, for readers and for --help alike.
_DESCRIBED = "\n    ".join(
    f"* `{name}`: {(function.__doc__ or '').splitlines()[0]}" for name, function in PRESETS.items()
)
assert bench.__doc__ is not None
bench.__doc__ = bench.__doc__.replace("{presets}", _DESCRIBED)


def _cases(name: str, shapes: list[dict[str, Any]], only: list[str]) -> list[AnyCase]:
    if name not in PRESETS:
        raise typer.BadParameter(
            f"{name!r} is none of {', '.join(PRESETS)}", param_hint="--preset"
        )
    cases = preset(name)
    if shapes != [{}] and not any(isinstance(case, Case) for case in cases):
        raise typer.BadParameter(
            f"cases of {name} have no shapes to choose", param_hint="--preset"
        )
    if shapes != [{}]:
        cases = [
            dataclasses.replace(case, **shape)
            for shape in shapes
            for case in cases
            if isinstance(case, Case)
        ]
    cases = [case for case in dict.fromkeys(cases) if _wanted(case.key, only)]
    if not cases:
        raise typer.BadParameter(f"no case of {name} holds {only}", param_hint="--only")
    return cases


def _check_runnable(name: str, device: torch.device, cases: list[AnyCase]) -> None:
    if device.type != "cuda" and name != "smoke":
        raise typer.BadParameter(
            f"{name} needs a CUDA device, got {device}; a CPU runs smoke", param_hint="--preset"
        )
    has_transformers = importlib.util.find_spec("transformers") is not None
    if any(case.target == "model" for case in cases) and not has_transformers:
        fail(
            "bench",
            "training steps need transformers; install with: pip install 'nsa-flex[cli,hf]'",
        )


def _wanted(key: str, only: list[str]) -> bool:
    return not only or any(text in key for text in only)


def _chosen(rows: list[Row], only: list[str]) -> list[Row]:
    return [row for row in rows if _wanted(row["case"], only)]


def _check_files(path: Path, old: Path | None, plot: Path | None, run_them: bool) -> None:
    """Said before the work, not after it."""
    needed = [old] if run_them else [path, old]
    for file in needed:
        if file is not None and not file.exists():
            fail("bench", f"there is no file {file}")
    if run_them:
        check_folder(path.parent, "--out")
    for file in (path, plot):
        if file is not None and file.is_dir():
            fail("bench", f"{file} is a folder")
    if plot is not None:
        check_folder(plot.parent, "--plot")
    for package in ("pandas", "matplotlib"):  # tables; --plot
        if importlib.util.find_spec(package) is None:
            fail("bench", f"it needs {package}; install with: pip install 'nsa-flex[cli,bench]'")
    try:
        for file in (path, old):
            if file is not None and file.exists():
                _check_rows(file)
    except ValueError as error:
        fail("bench", str(error))


def _check_rows(file: Path) -> None:
    """ValueError for rows of something else, which tables and comparisons cannot show."""
    for row in read_rows(file):
        if not row.keys() >= {"target", "status", "pass", "device"}:
            raise ValueError(f"{file} has rows of another benchmark: {row['case']}")


def _run(
    cases: list[AnyCase], notebook: Notebook, options: Options, console: Console
) -> list[Row]:
    kept = sum(bool(notebook.done(case.key)) for case in cases)
    if kept:
        text = f"{kept} of {len(cases)} cases are in {notebook.path}; --fresh measures them again"
        console.print(text, markup=False, soft_wrap=True)
    with progress_bar(console) as progress:
        task = progress.add_task("rates of this device", total=len(cases))
        dtype = torch.bfloat16 if options.device.type == "cuda" else torch.float32
        ceilings = machine.ceilings(options.device, dtype)
        progress.update(task, description=cases[0].key)
        upcoming = iter([*(case.key for case in cases[1:]), "done"])
        start = time.perf_counter()

        def tell(case: AnyCase, rows: list[Row]) -> None:
            log_case(progress.console, start, rows)
            for row in rows:
                if row["status"] == "failed":
                    progress.console.print(f"{row['case']}: {row['reason']}", style="red")
            progress.update(task, advance=1, description=next(upcoming))

        return run(cases, notebook, ceilings, options, tell)


def _compare(earlier: list[Row], rows: list[Row]) -> pd.DataFrame:
    from nsa_flex.bench.report.compare import compare

    try:
        return compare(earlier, rows)
    except ValueError as error:
        fail("bench", str(error), error)


def _show(
    rows: list[Row], verdicts: pd.DataFrame | None, *, as_json: bool, as_markdown: bool
) -> None:
    from nsa_flex.bench.report import table

    if as_json:
        told = [] if verdicts is None else json.loads(verdicts.to_json(orient="records"))
        print_json({"rows": rows, "verdicts": told})
        return
    tables = table.tables_of(rows)
    if verdicts is not None:
        tables["verdicts"] = _verdict_table(verdicts)
    if as_markdown:
        typer.echo("\n".join(table.markdown(each) for each in tables.values()))
        return
    for each in tables.values():
        show_table([list(each.columns), *each.to_numpy().tolist()])


def _verdict_table(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Numbers as text; what cannot be measured any more has none."""
    found = verdicts[["case", "pass"]].copy()
    for name in ("old_ms", "new_ms"):
        found[name.replace("_", " ")] = verdicts[name].map("{:.4g}".format).replace("nan", "-")
    ratios = [f"{r:.3f} (± {t:.3f})" for r, t in verdicts[["ratio", "threshold"]].to_numpy()]
    found["new ÷ old"] = [text if text[0] != "n" else "-" for text in ratios]
    found["verdict"] = verdicts.verdict
    return found


def dims_of(head_dim: list[str]) -> list[tuple[int, int]]:
    """ "192/128" as (192, 128), "64" as (64, 64): D and Dv."""
    return [pair_of(text, "--head-dim") for text in head_dim]


def shapes_of(
    heads: list[str] | None,
    seq_len: list[int] | None,
    head_dim: list[str] | None,
    batch: int | None,
    dtype: str | None,
) -> list[dict[str, Any]]:
    """Fields of `Case` to replace, one entry a shape; one empty entry if nothing was asked."""
    dtype = None if dtype is None else dtype_name(dtype, DTYPES)
    shapes: list[dict[str, Any]] = [{}]
    if heads:
        pairs = [heads_of(text) for text in heads]
        shapes = [{**s, "query_heads": a, "kv_heads": b} for s in shapes for a, b in pairs]
    if seq_len:
        shapes = [{**s, "seq_len": length} for s in shapes for length in seq_len]
    if head_dim:
        pairs = dims_of(head_dim)
        shapes = [{**s, "head_dim": a, "value_dim": b} for s in shapes for a, b in pairs]
    others = {"batch": batch, "dtype": dtype}
    given = {name: value for name, value in others.items() if value is not None}
    return [{**shape, **given} for shape in shapes]


def progress_bar(console: Console) -> Progress:
    """Cases done, time gone, and the case at hand; with `log_case`, for terminals and logs."""
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
    )


def log_case(console: Console, start: float, rows: Sequence[Row]) -> None:
    """Where there is no terminal for a bar: a line a case, with the seconds since `start`."""
    if console.is_terminal:
        return
    times = ", ".join(
        f"{row['pass']} {row['median_ms']:.4g} ms" if row["status"] == "ok" else row["status"]
        for row in rows
    )
    seconds = time.perf_counter() - start
    console.print(f"{seconds:6.1f} s  {rows[0]['case']}: {times}", markup=False, soft_wrap=True)
