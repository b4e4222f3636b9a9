"""Compiles the kernels that dispatch would launch for six architectures, without a GPU.

Each must give a cubin, and ask for no more shared memory than a CTA may have there; kernels for
Hopper are on sm_90 alone, and spill no more registers there than `matrix_spills.json` allows each
of its calls. What is in the table already, by what is compiled and not by where it stands, is not
compiled again. Writes the table.

Exit status: 0 all is well, 1 a kernel does not compile, does not fit or spills more.

Example: python -m nsa_flex.bench.tools.matrix --jobs 2
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import triton
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from triton import knobs

import nsa_flex
from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.tools.matrix_bounds import tile_of, unbounded
from nsa_flex.bench.tools.matrix_calls import sweep
from nsa_flex.bench.tools.matrix_entries import DEVICES, Entry, compiled, entries

Row = dict[str, Any]
Spills = Mapping[str, Mapping[str, int]]  # bytes by kernel and call, on sm_90
TABLE = Path(nsa_flex.__file__).parent / "bench" / "results" / "matrix.json"
ABOUT = (
    "Kernels that the calls of bench/tools/matrix_calls.py launch, as dispatch chooses their "
    "tiles, and those of its sweep whose tiles these do not bound, compiled for each architecture "
    "by Triton without a GPU. shared: bytes a CTA; spills: bytes stored and loaded by ptxas; "
    "registers: of a thread. Whether they run is known of the cards in ran alone."
)
SPILLS = TABLE.with_name("matrix_spills.json")
RAN = {"90": ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]}
SAVED_EVERY = 30.0  # seconds

REGISTERS = re.compile(r"Used (\d+) registers")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


def row_of(entry: Entry) -> Row:
    """The entry compiled, and what the assembler says of it; `error` where it does not compile."""
    row: Row = {"sm": entry.sm, "kernel": entry.kernel, "call": entry.call, "key": entry.key}
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = cache  # what is taken from a cache has no log
        knobs.nvidia.dump_ptxas_log = True
        try:
            with contextlib.redirect_stdout(log):
                kernel = compiled(entry)
        except Exception as error:  # whatever the compiler raises is the finding
            return row | {"error": f"{type(error).__name__}: {error}"[:300]}
    spills = [sum(map(int, each)) for each in SPILLED.findall(log.getvalue())]
    registers = [int(each) for each in REGISTERS.findall(log.getvalue())]
    if not kernel.asm.get("cubin") or not spills:
        return row | {"error": "no cubin"}
    found = {"shared": kernel.metadata.shared, "registers": max(registers), "spills": max(spills)}
    return row | found


def problem(row: Row, allowed: Spills | None = None) -> str | None:
    """What is wrong with a compiled kernel; None if nothing is.

    allowed: spills on sm_90; with None they are not looked at.
    """
    name = f"{row['kernel']} on sm_{row['sm']} ({row['call']})"
    if "error" in row:
        return f"{name} does not compile: {row['error']}"
    limit = DEVICES[row["sm"]].shared_memory
    if row["shared"] > limit:
        return f"{name} asks for {row['shared']} bytes of shared memory; a CTA may have {limit}"
    if row["kernel"].endswith("_sm90_kernel") and row["sm"] != 90:
        return f"{name} is for Hopper, and would be launched elsewhere"
    if row["sm"] == 90 and allowed is not None:
        most = allowed.get(row["kernel"], {}).get(row["call"], 0)
        if row["spills"] > most:
            return f"{name} spills {row['spills']} bytes; {SPILLS.name} allows {most}"
    return None


def spills_of(rows: Iterable[Row]) -> dict[str, dict[str, int]]:
    """What kernels spill on sm_90: of a call that launches several of one name, the most."""
    found: dict[str, dict[str, int]] = {}
    for row in sorted(rows, key=lambda row: (row["kernel"], row["call"])):
        if row["sm"] == 90 and row.get("spills"):
            calls = found.setdefault(row["kernel"], {})
            calls[row["call"]] = max(row["spills"], calls.get(row["call"], 0))
    return found


def allowed_spills() -> Spills | None:
    """The committed list; None if it is of another Triton."""
    held: Row = json.loads(SPILLS.read_text())
    return held["sm_90"] if held["triton"] == triton.__version__ else None


def accept_spills(rows: Iterable[Row], path: Path = SPILLS) -> None:
    """Write the list anew, to be looked at and committed."""
    held = {"triton": triton.__version__, "sm_90": spills_of(rows)}
    path.write_text(json.dumps(held, indent=1) + "\n")


def table(path: Path = TABLE) -> dict[str, Row]:
    """The committed rows that compiled, by key; none without a file, or of another Triton."""
    held: Row = json.loads(path.read_text()) if path.exists() else {"triton": None}
    if held["triton"] != triton.__version__:
        return {}
    return {row["key"]: row for row in held["rows"] if "error" not in row}


def compile_all(found: Iterable[Entry], jobs: int) -> Iterator[Row]:
    """A row each, as they are done, in so many processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(row_of, entry) for entry in found]
        try:
            for done in as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def write(rows: Iterable[Row], path: Path) -> None:
    head = {"about": ABOUT, "triton": triton.__version__, "ran": RAN}
    ordered = sorted(rows, key=lambda row: (row["kernel"], row["sm"], row["call"], row["key"]))
    lines = ",\n".join(json.dumps(row) for row in ordered)
    path.write_text(f'{json.dumps(head)[:-1]}, "rows": [\n{lines}\n]}}\n')


def wanted(sm: int) -> list[Entry]:
    """What `calls` launch there, and kernels of `sweep` with the largest tiles beyond these."""
    found = entries(sm)
    swept = {tile_of(entry): entry for entry in reversed(entries(sm, sweep()))}
    return found + [swept[tile] for tile in unbounded(swept, set(map(tile_of, found)), sm)]


def main() -> None:
    """See above."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=TABLE, help="the table")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--sm", type=int, nargs="+", choices=DEVICES, help="only these")
    parser.add_argument("--accept-spills", action="store_true", help=f"write {SPILLS.name} anew")
    options = parser.parse_args()
    held, architectures = table(options.out), options.sm or DEVICES
    asked = {entry.key: entry for sm in architectures for entry in wanted(sm)}
    rows = {key: held[key] | {"call": asked[key].call} for key in asked if key in held}
    missing = [entry for key, entry in asked.items() if key not in rows]
    others = [row for row in held.values() if options.sm and row["sm"] not in options.sm]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    saved = time.monotonic()
    with Progress(*columns, TimeElapsedColumn()) as progress:
        task = progress.add_task("kernels", total=len(missing))
        for row in compile_all(missing, options.jobs):
            rows[row["key"]] = row
            progress.advance(task)
            if time.monotonic() - saved > SAVED_EVERY:
                write([*others, *rows.values()], options.out)
                saved = time.monotonic()
    write([*others, *rows.values()], options.out)
    if options.accept_spills:
        accept_spills([*others, *rows.values()])
    allowed = allowed_spills()
    wrong = [text for row in rows.values() if (text := problem(row, allowed))]
    print("\n".join(wrong) or f"{len(rows)} kernels, {len(missing)} of them compiled now")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
