"""The tests that depend on versions, with the oldest and newest of what nsa_flex stands on.

    make compat                                    # all environments, an hour or two
    make compat ARGS="--only transformers-newest"  # one of them

makes an environment at a time, runs the tests in it, and removes it. Each adds a row to
`bench/results/compat.json`, of which the table in `docs/guide/install.md` is made anew.
Exits with 1 if a test failed or an environment could not be made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import commit
from nsa_flex.bench.report.rows import Row, earlier_rows, write_rows
from nsa_flex.bench.report.table import fill
from nsa_flex.bench.tools.environments import ROOT, InstallError, find_python, fresh, layer
from nsa_flex.bench.tools.pytest_summary import summarize
from nsa_flex.installed import TESTED

LINES = 200  # of a log with failures that are shown
FOLDER = ROOT / "build" / "compat"
RESULTS = ROOT / "bench" / "results" / "compat.json"
PAGE = ROOT / "docs" / "guide" / "install.md"


def _files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


# With a Triton that the table of compiled kernels is not of, compiles those for Hopper.
COMPILED = "tests/bench/test_matrix.py"
KERNELS = (
    *_files("tests/kernels", "interpreter", "topk", "selected", "sliding", "ranges", "fused"),
    *_files("tests/kernels", "short", "decode_kernels"),
    COMPILED,
)
PATCHING = _files(
    "tests/patching", "patch", "hf_versions", "hf_cache", "generate", "batching", "save_load"
)
# Not tests/patching/test_every_family.py: what it expects is what the pinned transformers has.
ALL = (
    *PATCHING,
    *_files("tests/patching", "decode_hf", "packing", "padding_positions", "peft", "refusals"),
    *_files("tests/patching", "edited", "positions", "multimodal", "own_config", "trl"),
    *_files("tests/cache", "cache", "no_copies"),
    *_files("tests/cli", "serve_command", "train_command"),
    *_files("tests/training", "trainer_steps", "compiled_run"),
    *_files("tests", "graph_break", "module", "masks", "backends"),
    *_files("tests", "imports", "installed", "public_names"),
    "tests/audit",
)


@dataclass(frozen=True)
class Environment:
    """Versions, and the tests that they are tested with.

    Args:
        packages: requirements, the newest of each that fits; where there is no more than a name,
            the newest of all.
        python: "3.10" or "newest", for an environment of its own; None puts `packages` over the
            environment that this runs in.
        pinned: all other packages are those of constraints.txt.
    """

    packages: tuple[str, ...] = ()
    python: str | None = None
    pinned: bool = True
    tests: tuple[str, ...] = ALL

    def make(self, folder: Path) -> Path:
        """The path of its Python, once everything is installed."""
        if self.python is None:
            return layer(folder, self.packages) if self.packages else Path(sys.executable)
        return fresh(folder, self.packages, find_python(self.python), pinned=self.pinned)


OLDEST = {name: f"{name}=={oldest}.*" for name, (oldest, _) in TESTED.items()}
ENVIRONMENTS = {
    "pinned": Environment(),
    "transformers-oldest": Environment((OLDEST["transformers"],)),
    "transformers-newest": Environment(("transformers",)),
    # The interpreter of Triton 3.6 wants NumPy < 2.4.
    "triton-oldest": Environment((OLDEST["triton"], "numpy<2.4"), tests=KERNELS),
    "triton-newest": Environment(("triton",), tests=KERNELS),
    "torch-newest": Environment(("torch",), tests=(*ALL, COMPILED)),
    # torch 2.11 wants setuptools < 82, transformers 5.17 huggingface-hub < 2.
    "oldest": Environment((*OLDEST.values(), "setuptools<82", "huggingface-hub<2"), python="3.10"),
    "newest": Environment(python="newest", pinned=False),
}


def main() -> None:
    options = _options()
    console = Console(stderr=True, highlight=False)
    rows = []
    for place, name in enumerate(options.only, 1):
        console.print(f"[{place}/{len(options.only)}] {name}", markup=False)
        tests = PATCHING if options.patching else ENVIRONMENTS[name].tests
        rows.append(run(name, tests, options.jobs, console))
        console.print(f"  {_outcome(rows[-1])}", markup=False)
        if not options.patching:
            record(rows[-1])
    if options.json:
        print(json.dumps(rows, indent=2))
    sys.exit(any(row["status"] != "ok" for row in rows))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS), metavar="NAME",
        help=f"some environments: {', '.join(ENVIRONMENTS)}",
    )  # fmt: skip
    parser.add_argument(
        "--patching", action="store_true",
        help="the core of the tests of patching alone, in minutes; nothing is recorded",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    return parser.parse_args()


def run(name: str, tests: tuple[str, ...], jobs: int, console: Console) -> Row:
    """The row of one environment, which is gone afterwards; its log stays in build/compat."""
    folder = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    row = {"case": name, "date": time.strftime("%Y-%m-%d", time.gmtime()), "commit": commit()}
    started = time.monotonic()
    try:
        with console.status("installing"):
            python = ENVIRONMENTS[name].make(folder)
        row |= versions(python)
        console.print("  " + ", ".join(f"{x} {row[x]}" for x in VERSIONS), markup=False)
        return {**row, **test(python, name, tests, jobs, console)}
    except InstallError as error:
        return {**row, "status": "not installed", "reason": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        console.print(f"  {time.monotonic() - started:.0f} s", markup=False)


VERSIONS = ("python", *TESTED)
ASK = f"""
import json, platform
from importlib.metadata import version
found = {{name: version(name) for name in {tuple(TESTED)}}}
print(json.dumps({{"python": platform.python_version(), **found}}))
"""


def versions(python: Path) -> dict[str, str]:
    """The versions that an environment has."""
    return json.loads(subprocess.check_output([python, "-c", ASK], text=True))


def test(
    python: Path, name: str, tests: tuple[str, ...], jobs: int, console: Console
) -> dict[str, Any]:
    """Runs the tests and counts them."""
    junit, log = FOLDER / f"{name}.xml", FOLDER / f"{name}.log"
    junit.unlink(missing_ok=True)
    command = [
        *(python, "-m", "pytest", "-m", "not gpu", "-p", "no:cacheprovider"),
        *("-n", str(jobs), "--dist", "worksteal", f"--junitxml={junit}", *tests),
    ]
    threads = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with (
        log.open("w", buffering=1) as written,
        console.status("testing") as shown,
        subprocess.Popen(
            list(map(str, command)), cwd=ROOT, env={**os.environ, **threads}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            written.write(line)
            if done := re.search(r"\[ *(\d+%)\]$", line.rstrip()):
                shown.update(f"testing, {done[1]}")
    if process.returncode:
        console.print(*log.read_text().splitlines()[-LINES:], sep="\n", markup=False)
    if not junit.exists():
        return {"status": "failed", "reason": f"pytest ended with {process.returncode}"}
    return counts(summarize(junit), process.returncode)


def counts(summary: dict[str, Any], code: int) -> dict[str, Any]:
    """What a row holds of a summary of pytest, which exited with `code`."""
    outcomes = Counter(each["outcome"] for each in summary["not_passed"])
    failed = [
        each["test"] for each in summary["not_passed"] if each["outcome"] in ("failure", "error")
    ]
    return {
        "status": "ok" if code == 0 else "failed",
        "passed": summary["passed"],
        "skipped": outcomes["skipped"],
        "failed": len(failed),
        "failed_tests": failed,
        "seconds": round(summary["wall_seconds"]),
    }


def _outcome(row: Row) -> str:
    if "reason" in row:
        return f"{row['status']}: {row['reason']}"
    failed = "".join(f"\n  FAILED {name}" for name in row["failed_tests"])
    return f"{row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped{failed}"


def record(row: Row) -> None:
    """Puts a row in the place of the one before of its environment, and fills the page."""
    rows = {old["case"]: old for old in earlier_rows(RESULTS)}
    rows[row["case"]] = row
    write_rows(RESULTS, [rows[name] for name in ENVIRONMENTS if name in rows])
    PAGE.write_text(fill(PAGE.read_text(), ROOT))


if __name__ == "__main__":
    main()
