"""What is shipped: sdist, wheel, editable, uninstalled; each imported in a clean environment."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import nsa_flex

ROOT = Path(__file__).resolve().parents[1]
OLDEST_PYTHON = {"python_version": "3.10", "python_full_version": "3.10.0"}
LINKED = ("bench", "masks", "fallback_kernels")
OPTIONAL = [
    "flash_attn",
    "jaxtyping",
    "jinja2",
    "matplotlib",
    "pandas",
    "rich",
    "safetensors",
    "torchao",
]
OPTIONAL += ["transformers", "triton", "typer"]

IMPORT_ALL = """
import sys
import nsa_flex, nsa_flex.bench, nsa_flex.masks, nsa_flex.fallback_kernels
assert not {"bench", "masks", "fallback_kernels"} & set(sys.modules)
for module in (nsa_flex, nsa_flex.masks, nsa_flex.fallback_kernels):
    print(module.__file__)
"""

BLOCK_OPTIONAL = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run without the caller's PYTHONPATH; the exit status must be `code`."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def files_under(folder: str) -> list[str]:
    """Paths from the root of the checkout; neither caches nor what links lead to."""
    found = []
    for parent, folders, files in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [(Path(parent) / name).relative_to(ROOT).as_posix() for name in files]
    return found


def tree_files() -> dict[str, bytes]:
    """Path inside the wheel -> contents, for every file of the packages but measured rows."""
    paths = {name: name for name in files_under("nsa_flex")}
    paths |= {f"nsa_flex/{name}": name for folder in LINKED for name in files_under(folder)}
    paths = {k: v for k, v in paths.items() if not v.startswith("bench/results/")}
    return {inside: (ROOT / path).read_bytes() for inside, path in paths.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, links kept, so that builds leave nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("nsa_flex", *LINKED, "tests"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignore)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


@pytest.fixture(scope="module")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist, and the wheel that was made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=source)
    return out


@pytest.fixture
def clean_python(tmp_path: Path) -> Path:
    """Python of a new environment that sees our dependencies, but no installed nsa_flex.

    A folder named in a .pth file is searched, while .pth files inside it, such as the one of
    an editable installation, are not run.
    """
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", query, cwd=tmp_path).stdout.strip())
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n")
    run(python, "-c", "import nsa_flex", cwd=tmp_path, code=1)
    return python


def install(python: Path, *what: str | Path) -> None:
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    pip = (sys.executable, "-m", "pip", "--python", python, "install")
    run(*pip, *options, *what, cwd=python.parent)


def test_wheel_holds_the_tree_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    info = f"nsa_flex-{nsa_flex.__version__}.dist-info"
    shipped = {name: data for name, data in contents.items() if not name.startswith(info)}
    expected = tree_files()
    assert sorted(shipped) == sorted(expected)
    assert shipped == expected
    assert "nsa_flex/py.typed" in shipped
    assert contents[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert b"nsa-flex = nsa_flex.cli:main" in contents[f"{info}/entry_points.txt"]


def test_sdist_holds_each_module_once(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames() if "/" in name]
    inner = [name for name in names if name.startswith(tuple(f"nsa_flex/{x}/" for x in LINKED))]
    assert inner == []
    modules = [
        path.relative_to(ROOT).as_posix() for x in LINKED for path in (ROOT / x).rglob("*.py")
    ]
    assert set(modules) <= set(names)
    tests = {"tests/reference/oracle.py", "tests/conftest.py"}
    assert {"LICENSE", "constraints.txt", *tests} <= set(names)


def test_wheel_imports_in_a_clean_environment(
    built: Path, clean_python: Path, tmp_path: Path
) -> None:
    install(clean_python, next(built.glob("*.whl")))
    files = run(clean_python, "-c", IMPORT_ALL, cwd=tmp_path).stdout.split()
    assert all(clean_python.parents[1] in Path(file).parents for file in files), files
    script = clean_python.parent / "nsa-flex"
    assert run(script, "--version", cwd=tmp_path).stdout == f"nsa-flex {nsa_flex.__version__}\n"


# torch.compile traces, but leaves code generation out: that has tests of its own.
TRACED = """
import functools, torch
torch.compile = functools.partial(torch.compile, backend="eager")
"""


def test_wheel_runs_the_example_of_the_readme(
    built: Path, clean_python: Path, tmp_path: Path
) -> None:
    install(clean_python, next(built.glob("*.whl")))
    code = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    script = tmp_path / "example.py"
    script.write_text("\n".join([TRACED, *code, "print(nsa_flex.__file__)"]))
    printed = run(clean_python, script, cwd=tmp_path).stdout.splitlines()
    assert clean_python.parents[1] in Path(printed[-1]).parents
    assert printed[-2].split()[:2] == ["sliding", "dense"]  # the last line of explain


def test_editable_installation_imports(source: Path, clean_python: Path, tmp_path: Path) -> None:
    install(clean_python, "--editable", source)
    files = run(clean_python, "-c", IMPORT_ALL, cwd=tmp_path).stdout.split()
    assert all(source.resolve() in Path(file).resolve().parents for file in files), files


def test_uninstalled_checkout_imports(source: Path, clean_python: Path) -> None:
    files = run(clean_python, "-c", IMPORT_ALL, cwd=source).stdout.split()
    assert all(source.resolve() in Path(file).resolve().parents for file in files), files


def test_import_works_without_optional_packages(tmp_path: Path) -> None:
    run(sys.executable, "-c", BLOCK_OPTIONAL + IMPORT_ALL, cwd=tmp_path)


def test_import_loads_no_heavy_optional_package(tmp_path: Path) -> None:
    code = "import sys, torch; before = set(sys.modules); import nsa_flex\n"
    code += f"print(*sorted(set({OPTIONAL}) & (set(sys.modules) - before)))"
    assert run(sys.executable, "-c", code, cwd=tmp_path).stdout.split() == []


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_command_line_names_the_missing_extra(missing: str, tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.modules[{missing!r}] = None
        from nsa_flex.cli import main
        main()
    """
    done = run(sys.executable, "-c", textwrap.dedent(code), cwd=tmp_path, code=2)
    assert done.stderr == (
        f"nsa-flex: the command line needs {missing}, which is not installed; "
        "install it with: pip install 'nsa-flex[cli]'\n"
    )


def test_pre_commit_pins_equal_the_constraints() -> None:
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    pins = re.findall(r'"([\w.-]+==[\w.]+)"', (ROOT / ".pre-commit-config.yaml").read_text())
    assert {pin.split("==")[0] for pin in pins} == {"ruff"}
    assert set(pins) <= set(constraints)


def test_every_required_package_is_pinned(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"nsa_flex-{nsa_flex.__version__}.dist-info/METADATA").decode()
    required = {name.lower() for name in re.findall(r"^Requires-Dist: ([\w.-]+)", text, re.M)}
    pinned = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    assert required - pinned == set()


def test_a_pin_that_the_oldest_python_cannot_have_is_not_for_it() -> None:
    """Of packages that are installed here; `make compat` installs them all on the oldest."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and line[0] != "#"]
    pinned = {
        pin.name: pin for pin in pins if not pin.marker or pin.marker.evaluate(OLDEST_PYTHON)
    }
    assert len(pinned) > 80
    for name, pin in pinned.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            if pin.specifier.contains(metadata.version(name)):
                needed = metadata.metadata(name).get("Requires-Python", "")
                assert SpecifierSet(needed).contains("3.10.0"), f"{pin} needs Python {needed}"
