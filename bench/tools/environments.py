"""Virtual environments for tests: fresh ones, and ones like this with some other packages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# As `make env` has them.
(EXTRAS,) = re.findall(r"^EXTRAS \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


class InstallError(Exception):
    """An environment could not be made: the message is what pip, or this module, says of it."""


def fresh(
    folder: Path,
    packages: Iterable[str],
    python: str,
    *,
    pinned: bool,
    extras: str = EXTRAS,
) -> Path:
    """nsa_flex with its extras in an environment of its own; the path of its Python.

    Args:
        folder: where; what is there goes.
        packages: requirements beside them, which replace the pins of the same packages.
        python: the interpreter.
        pinned: everything else in the versions of `constraints.txt`; if not, the newest.
        extras: with commas between them.

    Raises:
        InstallError: pip failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run(python, "-m", "venv", folder)
    pins = folder / "constraints.txt"
    named = {_name(package) for package in packages} if pinned else None
    pins.write_text(_pins(named))
    executable = folder / "bin" / "python"
    _pip(executable, "-c", pins, *packages, "-e", f"{ROOT}[{extras}]")
    return executable


def layer(folder: Path, packages: Iterable[str]) -> Path:
    """This environment with other versions of `packages` over it; the path of its Python.

    Seconds instead of minutes: what pip does not install anew is read from where it is.

    Raises:
        InstallError: pip failed.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    executable = folder / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs, ours = (_run(python, "-c", query).strip() for python in (executable, sys.executable))
    # addsitedir, and no bare path, for the sake of the .pth files there (editable installs).
    (Path(theirs) / "below.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    _pip(executable, "--upgrade", *packages)
    return executable


def find_python(release: str) -> str:
    """An interpreter of a release such as "3.10", on the path or under pyenv; "newest" of all.

    Raises:
        InstallError: there is none.
    """
    minors = range(30, 9, -1) if release == "newest" else [int(release.partition(".")[2])]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in minors:
        name = f"python3.{minor}"
        for python in (name, *sorted(map(str, versions.glob(f"3.{minor}.*/bin/{name}")))):
            # A shim of pyenv is on the path and fails.
            if (
                shutil.which(python)
                and not subprocess.run(
                    [python, "-c", "import venv"], capture_output=True, check=False
                ).returncode
            ):
                return python
    raise InstallError(f"there is no Python {release} on the path or under pyenv")


def _pins(named: set[str] | None) -> str:
    """constraints.txt without the pins of packages `named`; nothing if None."""
    if named is None:
        return ""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return "".join(f"{line}\n" for line in lines if _name(line) not in named)


def _name(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def _pip(python: Path, *arguments: str | Path) -> None:
    """pip of this environment installs into that of `python`."""
    options = ("--quiet", "--disable-pip-version-check", "--no-warn-script-location")
    _run(sys.executable, "-m", "pip", "--python", python, "install", *options, *arguments)


def _run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise InstallError("; ".join(said) or done.stderr.strip() or f"{command[0]} failed")
    return done.stdout
