"""The hand-written kernels under NVIDIA's compute-sanitizer: memcheck and racecheck.

A process runs each small call of each family of kernels, first as it is, which compiles and says
which kernels there are, then under each tool; a row sums up a family. cuDNN's own kernels are left
out by name: racecheck reports hazards in their barriers. Torch gives every tensor memory of its
own here, so that reading past one's end is an error and not a read of the next.

Exit status: 0 nothing found, 1 something found or a run failed, 2 no CUDA or no compute-sanitizer.

Example: python -m bench.tools.sanitize --json bench/results/sanitizer_h200.json
Example: python -m bench.tools.sanitize merge decode --tools racecheck
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.measure.machine import describe
from nsa_flex.bench.report.rows import Row, write_rows
from nsa_flex.bench.tools.kernel_table import kernels
from nsa_flex.bench.tools.sanitized_calls import FAMILIES

TOOLS = ("memcheck", "racecheck")
FILTER = ("--kernel-name", "kns=_kernel", "--kernel-name-exclude", "kns=cudnn")
SUMMARIES = (
    re.compile(r"ERROR SUMMARY: (?P<errors>\d+) error"),
    re.compile(r"RACECHECK SUMMARY: .*\((?P<errors>\d+) errors?, (?P<warnings>\d+) warning"),
)
SHOWN = 5  # findings that a row tells
STATUSES = ("clean", "found", "failed")  # from good to bad


@dataclass(frozen=True)
class Result:
    """What one process came to, or all of a family.

    Args:
        status: one of `STATUSES`.
        errors, warnings: as the tool's summary counts them.
        launches: how often each of our kernels was launched.
        findings: the first lines that the tool reported, or the end of a failed run's output.
    """

    family: str
    tool: str | None
    status: str
    seconds: float
    errors: int = 0
    warnings: int = 0
    launches: dict[str, int] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def row(self) -> Row:
        """The columns of a row of results."""
        case = f"sanitizer/{self.tool} {self.family}"
        return {"case": case, **vars(self), "seconds": round(self.seconds, 1)}


def find_sanitizer() -> str | None:
    """compute-sanitizer of the PATH, of CUDA_HOME, or of the usual place."""
    homes = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    places = [str(Path(home, "bin", "compute-sanitizer")) for home in homes if home]
    return next(filter(None, map(shutil.which, ("compute-sanitizer", *places))), None)


def run(family: str, call: int, tool: str | None, sanitizer: str, timeout: float) -> Result:
    """One call of a family in a process of its own, under `tool` or, for None, as it is."""
    calls = [sys.executable, "-W", "ignore", "-m", "nsa_flex.bench.tools.sanitized_calls", family]
    calls += ["--call", str(call)]
    under = [sanitizer, "--tool", str(tool), *FILTER] if tool else []
    caching = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool else {}
    start = time.monotonic()
    try:
        done = subprocess.run(
            [*under, *calls],
            env={**os.environ, **caching},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        text, code = done.stdout, done.returncode
    except subprocess.TimeoutExpired:
        text, code = f"no end within {timeout:.0f} s", None
    return judge(family, tool, text, code, time.monotonic() - start)


def judge(family: str, tool: str | None, text: str, code: int | None, seconds: float) -> Result:
    """A result from what a process printed and how it ended.

    >>> judge("merge", "memcheck", "========= ERROR SUMMARY: 0 errors", 0, 1.0).status
    'failed'

    That process never said which kernels it launched, so it did not get to its end.
    """
    counts = {"errors": 0, "warnings": 0}
    summaries = [match for pattern in SUMMARIES if (match := pattern.search(text))]
    for match in summaries:
        counts |= {name: int(count) for name, count in match.groupdict().items()}
    launches = launches_of(text)
    whole = code == 0 and launches is not None and (tool is None or bool(summaries))
    reported = [line.removeprefix("========= ") for line in text.splitlines() if is_report(line)]
    if any(counts.values()):
        status = "found"
    else:
        status = "clean" if whole else "failed"
        reported = [] if whole else text.splitlines()[-SHOWN:]
    first = list(dict.fromkeys(reported))[:SHOWN]
    return Result(family, tool, status, seconds, **counts, launches=launches or {}, findings=first)


def is_report(line: str) -> bool:
    """Whether a line of the tool opens a finding, as `========= Invalid __global__ read` does."""
    return re.match(r"========= (?!COMPUTE|ERROR SUMMARY|RACECHECK)\S", line) is not None


def launches_of(text: str) -> dict[str, int] | None:
    """The kernels that `sanitized_calls` printed as its last word; None if it did not."""
    for line in text.splitlines():
        if line.startswith('{"family"'):
            return json.loads(line)["launches"]
    return None


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--json", type=Path, help="file to write the rows to")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a process may take")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    unknown = set(options.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    options.families = options.families or list(FAMILIES)
    return options


def results_of(options: argparse.Namespace, sanitizer: str) -> list[Result]:
    """Every call as it is, then those that worked under every tool; several at once.

    A result a family and tool. The order of processes is that of the calls.
    """
    calls = [(family, n) for family in options.families for n in range(len(FAMILIES[family]))]
    count = itertools.count(1)
    total = len(calls) * (1 + len(options.tools))

    def one(family: str, call: int, tool: str | None) -> Result:
        result = run(family, call, tool, sanitizer, options.timeout)
        what = f"{family}, call {call}, {tool or 'as it is'}: {result.status}"
        print(f"{next(count):3} of {total}  {what}, {result.seconds:.0f} s", file=sys.stderr)
        return result

    def under_all(call: tuple[str, int]) -> list[Result]:
        plain = one(*call, None)
        if plain.status != "clean":
            return [plain]
        return [one(*call, tool) for tool in options.tools]

    with ThreadPoolExecutor(options.jobs) as pool:
        return summed([result for results in pool.map(under_all, calls) for result in results])


def summed(results: Sequence[Result]) -> list[Result]:
    """One result for each family and tool, as bad as the worst of its calls."""
    groups: dict[tuple[str, str | None], list[Result]] = {}
    for result in results:
        groups.setdefault((result.family, result.tool), []).append(result)
    return [_sum(*names, group) for names, group in groups.items()]


def _sum(family: str, tool: str | None, results: Sequence[Result]) -> Result:
    launches = sum((Counter(result.launches) for result in results), Counter[str]())
    findings = [line for result in results for line in result.findings]
    return Result(
        family,
        tool,
        max((result.status for result in results), key=STATUSES.index),
        sum(result.seconds for result in results),
        sum(result.errors for result in results),
        sum(result.warnings for result in results),
        dict(sorted(launches.items())),
        list(dict.fromkeys(findings))[:SHOWN],
    )


def table(results: Sequence[Result]) -> str:
    """A line for each result, its findings below it."""
    lines = [f"{'family':10} {'tool':10} {'status':7} errors warnings kernels seconds"]
    for r in results:
        counts = f"{r.errors:6} {r.warnings:8} {len(r.launches):7} {r.seconds:7.1f}"
        lines.append(f"{r.family:10} {r.tool or 'none':10} {r.status:7} {counts}")
        lines += [f"  {line}" for line in r.findings]
    return "\n".join(lines)


def shared_columns(sanitizer: str) -> dict[str, Any]:
    """Device, versions and sources, as in other rows, and the tool's version."""
    version = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False)
    last = version.stdout.strip().rpartition("\n")[2]
    return {"sanitizer": last, **describe(torch.device("cuda"))}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes; the status is that of the process."""
    options = options_of(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None or not torch.cuda.is_available():
        missing = "CUDA device" if sanitizer else "compute-sanitizer"
        print(f"there is no {missing} here; the kernels were not checked", file=sys.stderr)
        return 2
    results = results_of(options, sanitizer)
    print(table(results))
    if options.json:
        shared = shared_columns(sanitizer)
        write_rows(options.json, [{**result.row(), **shared} for result in results])
    missed = {kernel.name for kernel in kernels()} - {
        name for result in results for name in result.launches
    }
    everything = set(options.families) == FAMILIES.keys()
    if missed and everything:
        print(f"never launched: {', '.join(sorted(missed))}")
    clean = all(result.status == "clean" for result in results)
    return 0 if clean and not (missed and everything) else 1


if __name__ == "__main__":
    sys.exit(main())
