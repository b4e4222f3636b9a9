"""The tests of versions: environments, rows, and what is committed of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pandas")

from nsa_flex.bench.report.rows import read_rows
from nsa_flex.bench.report.table import TABLES, fill, markdown
from nsa_flex.bench.tools import compat, environments
from nsa_flex.bench.tools.environments import InstallError, find_python, layer
from nsa_flex.installed import TESTED

ROW = {
    **{"case": "newest", "date": "2026-01-01", "commit": "abc", "python": "3.13.0"},
    **{"torch": "2.14.1", "triton": "3.8.0", "transformers": "5.24.0", "status": "ok"},
    **{"passed": 7, "failed": 0, "skipped": 1, "failed_tests": [], "seconds": 3},
}


def wheel(folder: Path, name: str, version: str) -> Path:
    """A package without modules."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        info = f"{name}-{version}.dist-info"
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def test_a_layer_has_other_versions_and_all_the_rest(tmp_path: Path) -> None:
    before = metadata.version("iniconfig")
    python = layer(tmp_path / "layer", [str(wheel(tmp_path, "iniconfig", "99.1"))])
    code = "from importlib.metadata import version as v; print(v('iniconfig'), v('torch'))"
    found = subprocess.check_output([python, "-c", code], text=True, cwd=tmp_path).split()
    assert found == ["99.1", metadata.version("torch")]
    assert metadata.version("iniconfig") == before


def test_what_pip_says_is_the_reason(tmp_path: Path) -> None:
    missing = tmp_path / "some_kernels-1.0-py3-none-any.whl"
    with pytest.raises(InstallError, match=r"^ERROR: .*some_kernels-1\.0"):
        layer(tmp_path / "layer", [str(missing)])


def test_requirements_take_the_place_of_pins() -> None:
    lines = (environments.ROOT / "constraints.txt").read_text().splitlines()
    pins = environments._pins({"torch", "numpy"}).splitlines()
    assert sorted(set(lines) - set(pins)) == [
        line for line in sorted(lines) if line.startswith(("numpy==", "torch=="))
    ]
    assert environments._pins(None) == ""


def test_an_interpreter_is_found_by_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under pyenv too, whose shims on the path fail; and none is an error that says so."""
    release = f"3.{sys.version_info.minor}"
    shims, real = tmp_path / "shims", tmp_path / "versions" / f"{release}.4" / "bin"
    for folder, text in ((shims, "exit 127"), (real, f'exec "{sys.executable}" "$@"')):
        folder.mkdir(parents=True)
        (folder / f"python{release}").write_text(f"#!/bin/sh\n{text}\n")
        (folder / f"python{release}").chmod(0o755)
    monkeypatch.setenv("PATH", f"{shims}:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert find_python(release) == find_python("newest") == str(real / f"python{release}")
    (real / f"python{release}").unlink()
    with pytest.raises(InstallError, match=f"there is no Python {re.escape(release)} on the path"):
        find_python(release)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and rows that may be written."""
    opening = "<!-- table: tested compat.json -->\n"
    (tmp_path / "page.md").write_text(f"{opening}<!-- end of table -->\n")
    for name, path in {"FOLDER": "build", "RESULTS": "compat.json", "PAGE": "page.md"}.items():
        monkeypatch.setattr(compat, name, tmp_path / path)
    monkeypatch.setattr(compat, "fill", lambda page, _: fill(page, tmp_path))
    return tmp_path


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compat", *arguments])
    with pytest.raises(SystemExit) as ended:
        compat.main()
    return int(ended.value.code or 0)


def test_a_run_counts_its_tests(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = here / "test_some.py"
    tests.write_text(
        "import pytest\ndef test_right(): pass\ndef test_wrong(): assert 1 == 2\n"
        "def test_left_out(): pytest.skip('no GPU')\n"
    )
    known = {"pinned": compat.Environment(tests=(str(tests),))}
    monkeypatch.setattr(compat, "ENVIRONMENTS", known)
    assert called(monkeypatch, "--only", "pinned", "--jobs", "0", "--json") == 1
    said = capsys.readouterr()
    (row,) = rows = json.loads(said.out)
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 1, 1)
    assert row["failed_tests"][0].endswith("test_some::test_wrong")
    assert row["torch"] == metadata.version("torch")
    assert "1 passed, 1 failed, 1 skipped" in said.err
    assert "assert 1 == 2" in said.err
    assert read_rows(here / "compat.json") == rows
    assert "| 1 / 1 / 1 |" in (here / "page.md").read_text()


def test_what_cannot_be_installed_is_a_row_and_an_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"old": compat.Environment(python="3.1")}
    monkeypatch.setattr(compat, "ENVIRONMENTS", known)
    assert called(monkeypatch, "--only", "old") == 1
    assert "not installed: there is no Python 3.1 on the path" in capsys.readouterr().err
    (row,) = read_rows(here / "compat.json")
    assert row["status"] == "not installed"
    assert "| not installed |" in (here / "page.md").read_text()


def test_a_name_that_is_not_known_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, "--only", "anything") == 2
    assert "transformers-newest" in capsys.readouterr().err


def test_a_row_takes_the_place_of_the_one_before(here: Path) -> None:
    earlier = [{**ROW, "case": "pinned"}, {**ROW, "passed": 1}]
    for row in (*reversed(earlier), ROW):
        compat.record(row)
    assert read_rows(here / "compat.json") == [earlier[0], ROW]  # as ENVIRONMENTS has them


def test_the_table() -> None:
    failed: dict[str, Any] = {**ROW, "case": "oldest", "status": "failed", "failed": 2}
    for name in ("passed", "torch"):
        del failed[name]
    lines = markdown(TABLES["tested"]([ROW, {**failed, "commit": None}])).splitlines()
    assert lines[2:] == [
        "| `newest` | 3.13.0 | 2.14.1 | 3.8.0 | 5.24.0 | 7 / 0 / 1 | 2026-01-01 | abc |",
        "| `oldest` | 3.13.0 | - | 3.8.0 | 5.24.0 | failed | 2026-01-01 | - |",
    ]


def test_paths_of_the_tests_are_there() -> None:
    for path in (*compat.ALL, *compat.PATCHING, *compat.KERNELS):
        assert (environments.ROOT / path).exists(), path


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


@pytest.mark.parametrize("package", TESTED)
def test_what_counts_as_tested_is_what_the_committed_rows_tested(package: str) -> None:
    """Every row passed within the bounds; and all rows together reach them."""
    rows = read_rows(compat.RESULTS) if compat.RESULTS.exists() else []
    assert [row["case"] for row in rows if row["status"] != "ok"] == []
    found = {release(row[package]) for row in rows}
    oldest, newest = map(release, TESTED[package])
    assert all(oldest <= version <= newest for version in found)
    if {row["case"] for row in rows} == set(compat.ENVIRONMENTS):
        assert {oldest, newest} <= found
