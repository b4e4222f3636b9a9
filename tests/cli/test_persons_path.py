"""The guide's way from a folder of text to a server, each command as it stands there."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from training.tiny_run import rows_of

pytest.importorskip("pandas")

from nsa_flex.bench.report.rows import read_rows
from nsa_flex.bench.tools.environments import EXTRAS, ROOT, fresh
from nsa_flex.bench.tools.persons_path import (
    LIMIT,
    RESULTS,
    commands,
    extras,
    walk,
    write_text,
)

NAMES = ["train --data-report", "train", "report", "generate", "export", "serve"]


def test_the_guide_installs_what_its_commands_ask_for() -> None:
    """By their own errors, which name extras; the line has no others than those of `make env`."""
    installed = set(extras().split(","))
    assert [command[0] for command in commands()] == [name.split()[0] for name in NAMES]
    package = ROOT / "nsa_flex"
    sources = [package / "cli" / f"{name}.py" for name in {*NAMES[1:], "__init__"}]
    sources += [package / "auditing" / "html.py", *(package / "training").rglob("*.py")]
    asked = set()
    for source in sources:
        for found in re.findall(r"nsa-flex\[([\w,]+)\]", source.read_text()):
            asked |= set(found.split(","))
    assert asked == installed | {"report"}  # for run.report_to, which no command here has
    assert installed < set(EXTRAS.split(","))


def test_extras_are_those_of_the_package() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sorted(EXTRAS.split(",")) == sorted(known["optional-dependencies"])


def test_the_guides_rows_are_of_all_its_commands() -> None:
    rows = read_rows(RESULTS)
    assert [row["case"] for row in rows] == ["pip install", *NAMES]
    assert sum(row["seconds"] for row in rows[1:]) < LIMIT


def distributions(extras: str) -> set[str]:
    """What pip installs for the package with these extras."""
    found: set[str] = set()
    todo = [Requirement(f"nsa-flex[{extras}]")]
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        if (key := f"{name}{sorted(one.extras)}") in found:
            continue
        found |= {name, key}
        try:
            lines = requires(name) or []
        except PackageNotFoundError:  # of another platform
            continue
        for line in map(Requirement, lines):
            wanted = [{"extra": extra} for extra in one.extras or [""]]
            if line.marker is None or any(map(line.marker.evaluate, wanted)):
                todo.append(line)
    return found


def modules_beyond(extras: str) -> list[str]:
    """Names of modules that are installed here, and not where pip was given these extras."""
    there = distributions(extras)
    return [
        module
        for module, of in packages_distributions().items()
        if module.isidentifier() and not there & set(map(canonicalize_name, of))
    ]


@pytest.mark.exhaustive
@pytest.mark.timeout(2 * LIMIT)
def test_from_a_folder_of_text_to_a_server(tmp_path: Path) -> None:
    """In processes of their own, without what the guide's line does not install."""
    gone = [name for name in modules_beyond(extras()) if not name.startswith("_")]
    assert {"pytest", "tensorboard", "matplotlib"} <= set(gone)
    assert not {"torch", "yaml", "jinja2", "fastapi", "huggingface_hub"} & set(gone)
    (tmp_path / "without").mkdir()
    site = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in gone)
    (tmp_path / "without" / "sitecustomize.py").write_text(site)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'without'}:{ROOT}"}
    run(tmp_path, [sys.executable, "-W", "ignore", "-m", "nsa_flex.cli"], environment)


@pytest.mark.exhaustive
@pytest.mark.timeout(3 * LIMIT)
def test_in_a_fresh_environment(tmp_path: Path) -> None:
    """That pip makes by the guide's line; where it cannot, the test fails with what pip says."""
    python = fresh(tmp_path / "environment", (), sys.executable, pinned=True, extras=extras())
    environment = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
    run(tmp_path, [str(python.parent / "nsa-flex")], environment)


def run(folder: Path, program: list[str], environment: dict[str, str]) -> None:
    write_text(folder / "my-text")
    environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    rows = walk(program, folder, environment)
    assert [row["case"] for row in rows] == NAMES
    # Of one thread, and of no other tests beside it.
    assert sum(row["processor_seconds"] for row in rows) < LIMIT
    check(folder, [row["said"] for row in rows])


def check(folder: Path, said: list[str]) -> None:
    """What each command leaves."""
    assert "longest document" in said[0]
    made = folder / "runs" / "mine"
    losses = [row["loss"] for row in rows_of(made)["training"] if row["loss"] is not None]
    assert len(losses) == 10  # of 100 steps
    assert losses[-1] < losses[0] - 1
    assert len(rows_of(made)["samples"]) == 2
    assert (made / "report.html").stat().st_size > 10_000
    assert said[3].rstrip("\n")  # of Python's sources it may be blanks
    assert "nsa-flex train training.yaml" in (folder / "exported" / "README.md").read_text()
    assert json.loads(said[5])["usage"]["completion_tokens"] >= 1
