"""Writes docs/design/kernels.md: every kernel, what it does, where it runs and what it wins.

Names, folders and jobs are read from the sources, times from the committed rows. What neither
knows stands in docs/design/kernels.json: which shapes a kernel takes, and which two rows compare
it with the next best. Example: python -m nsa_flex.bench.tools.kernel_table
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import nsa_flex

Facts = dict[str, Any]
SOURCES = Path(nsa_flex.__file__).parent / "fallback_kernels"

# Calls of bench/tools/matrix_calls.py in bf16 with whole documents and the paper's config.
HEADLINE = re.compile(r"core, group \d+, tokens \d+, dim (128|64, value_dim 64)(, train False)?")

SPILLS = """\
## Spills on sm_90

Bytes that ptxas stores and loads for a thread, of kernels in the headline shapes: bf16, head dims
64 and 128, whole documents. The others spill nothing there. `make matrix` fails where one rises;
`bench/results/matrix_spills.json` allows no more than this, and has all other calls.

| kernel | group, tokens, head dim | bytes |
|---|---|---|
"""

INTRODUCTION = """\
# Kernels

Every kernel of `fallback_kernels/`. `nsa_flex.explain` says which of them a call runs, under these
names. Written by `python -m nsa_flex.bench.tools.kernel_table` from the sources, the committed
rows and `docs/design/kernels.json`.

- **Takes.** fp16, bf16 and fp32 unless the column says otherwise. Triton kernels run on every CUDA
  device that Triton supports, and copy tiles by TMA from sm_90 on where strides allow. Kernels in
  Gluon run on sm_90 with Triton {versions}; the kernel named after "else" takes all other calls.
- **Interpreter.** Triton's CPU interpreter runs every Triton kernel and no kernel in Gluon. The
  tests named with each folder run there and on a GPU.
- **Row.** Two medians on an H200, this kernel and the next best, from the file named in
  [the last table](#rows). Where there is no row, the column says what the kernel is for.
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel as its source has it: `path` relative to fallback_kernels, `job` in a sentence."""

    name: str
    path: Path
    job: str
    gluon: bool

    @property
    def folder(self) -> str:
        """The part of the core it belongs to."""
        return self.path.parts[0]


def kernels(sources: Path = SOURCES) -> Iterator[Kernel]:
    """The kernels under `sources`: jitted functions whose name ends in `_kernel`."""
    for path in sorted(sources.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            language = _language(node)
            if language and isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
                job = " ".join(summary.split())
                yield Kernel(node.name, path.relative_to(sources), job, language == "gluon")


def _language(node: ast.stmt) -> str | None:
    """'triton' or 'gluon' if the statement is a jitted function."""
    for decorator in getattr(node, "decorator_list", []):
        name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if name in ("triton.jit", "gluon.jit"):
            return name.partition(".")[0]
    return None


def problems(found: list[Kernel], facts: Facts) -> list[str]:
    """What is missing or stale in `facts`, a sentence each."""
    names, entries = {kernel.name for kernel in found}, facts["kernels"]
    wrong = [f"{name} has no entry" for name in sorted(names - entries.keys())]
    wrong += [f"{name} is no kernel any more" for name in sorted(entries.keys() - names)]
    used = {entry["row"] for entry in entries.values() if "row" in entry}
    rows = facts["rows"]
    wrong += [f"row {row!r} is not described" for row in sorted(used - rows.keys())]
    wrong += [f"row {row!r} is not used" for row in sorted(rows.keys() - used)]
    for kernel in found:
        entry = entries.get(kernel.name, {})
        if not kernel.job:
            wrong.append(f"{kernel.name} has no docstring")
        if ("row" in entry) == ("why" in entry):
            wrong.append(f"{kernel.name} needs a row or a reason why it has none")
        if kernel.gluon and entry.get("else") not in names:
            wrong.append(f"{kernel.name} needs the kernel that takes its calls elsewhere")
    return wrong


def timing(row: Facts, results: Path) -> tuple[float, float, str]:
    """Medians of the kernel and of the next best, and the commits of their rows.

    Raises:
        ValueError: the file holds no row of that kind.
    """
    held = json.loads((results / row["file"]).read_text())
    held = held[row["list"]] if "list" in row else held
    this, next_best = (
        [each for each in held if {**row["both"], **row[side]}.items() <= _flat(each).items()]
        for side in ("this", "next")
    )
    if not this or not next_best:
        raise ValueError(f"{row['file']} has no rows {row['this']} and {row['next']}")
    commits = {str(each["commit"])[:7] for each in (*this, *next_best) if "commit" in each}
    return _value(this, row["field"]), _value(next_best, row["field"]), ", ".join(sorted(commits))


def _value(rows: list[Facts], fields: str) -> float:
    """Median over rows of the sum of the fields, which + joins."""
    return median(sum(row[field] for field in fields.split("+")) for row in rows)


def _flat(row: Facts) -> Facts:
    return {key: value for key, value in row.items() if not isinstance(value, (dict, list))}


def page(found: list[Kernel], facts: Facts, results: Path) -> str:
    """The page, in Markdown."""
    *versions, last = _gluon_versions()
    parts = [INTRODUCTION.format(versions=f"{', '.join(versions)} and {last}")]
    for folder, about in facts["folders"].items():
        members = [kernel for kernel in found if kernel.folder == folder]
        lines = [_line(kernel, facts["kernels"][kernel.name], about) for kernel in members]
        head = "| kernel | job | takes | row |\n|---|---|---|---|"
        text = f"{about['text']} Tests: `{about['test']}`."
        parts.append(f"## {folder}\n\n{text}\n\n" + "\n".join([head, *lines]) + "\n")
    head = (
        "| row | compared | this | next | ratio | file | commit |\n|---|---|---|---|---|---|---|"
    )
    lines = [_row(name, row, results) for name, row in facts["rows"].items()]
    parts.append("## Rows\n\n" + "\n".join([head, *lines]) + "\n")
    spilled = json.loads((results / "matrix_spills.json").read_text())["sm_90"]
    return "\n".join([*parts, SPILLS + "\n".join(_spills(spilled)) + "\n"])


def _spills(spilled: dict[str, dict[str, int]]) -> Iterator[str]:
    """A line for each kernel and headline call."""
    for kernel, calls in sorted(spilled.items()):
        for call, amount in sorted(calls.items()):
            if HEADLINE.fullmatch(call):
                shape = re.sub(r"core, group |tokens |dim |, value_dim \d+", "", call)
                yield f"| `{kernel}` | {shape.replace('train False', 'forward')} | {amount} |"


def _line(kernel: Kernel, entry: Facts, about: Facts) -> str:
    takes = entry.get("takes", about["takes"])
    if kernel.gluon:
        takes = f"sm_90; {takes}; else `{entry['else']}`"
    job = entry.get("job", kernel.job)
    source = f"`fallback_kernels/{kernel.path.as_posix()}`"
    shown = f"[{entry['row']}](#rows)" if "row" in entry else entry["why"]
    return f"| `{kernel.name}`, {source} | {job} | {takes} | {shown} |"


def _row(name: str, row: Facts, results: Path) -> str:
    this, next_best, commits = timing(row, results)
    cells = [name, row["text"], f"{this:.3g}", f"{next_best:.3g}", f"{next_best / this:.2f}"]
    return "| " + " | ".join([*cells, f"`{row['file']}`", commits or "-"]) + " |"


def _gluon_versions() -> list[str]:
    """The versions of Triton that `common/arch.py` names."""
    for node in ast.parse((SOURCES / "common" / "arch.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "TRITON_VERSIONS":
            assert node.value is not None
            return [version.rstrip(".") for version in ast.literal_eval(node.value)]
    raise ValueError("fallback_kernels/common/arch.py has no TRITON_VERSIONS")


def main() -> None:
    """Write the page, or with --check say whether it is up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if stale")
    options = parser.parse_args()
    target = options.root / "docs" / "design" / "kernels.md"
    facts = json.loads(target.with_suffix(".json").read_text())
    found = list(kernels())
    wrong = problems(found, facts)
    if wrong:
        raise SystemExit("\n".join(wrong))
    text = page(found, facts, options.root / "bench" / "results")
    if not options.check:
        target.write_text(text)
    elif target.read_text() != text:
        raise SystemExit(f"{target} is stale: python -m nsa_flex.bench.tools.kernel_table")


if __name__ == "__main__":
    main()
