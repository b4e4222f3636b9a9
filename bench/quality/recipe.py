"""Where the text comes from: packages of sources and prose, each wholly trained on or held out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Project:
    """A package, and how much of it is taken.

    Args:
        package: its name.
        kind: "debian" (`apt-get download`) or "wheel" (`pip download`).
        megabytes: of text at most, folders drawn at random.
        held_out: all of it is, or none.
    """

    package: str
    kind: Literal["debian", "wheel"]
    megabytes: float
    held_out: bool = False


PROJECTS = (
    Project("linux-source-6.1", "debian", 40.0),
    Project("gcc-12-source", "debian", 12.0),
    Project("golang-1.19-src", "debian", 10.0),
    Project("openjdk-17-source", "debian", 10.0),
    Project("rust-src", "debian", 8.0),
    Project("transformers", "wheel", 8.0),
    Project("sympy", "wheel", 6.0),
    Project("astropy", "wheel", 6.0),
    Project("sglang", "wheel", 6.0),
    Project("pandas", "wheel", 5.0),
    Project("scikit-learn", "wheel", 5.0),
    Project("matplotlib", "wheel", 5.0),
    Project("SQLAlchemy", "wheel", 4.0),
    Project("networkx", "wheel", 4.0),
    Project("Django", "wheel", 4.0),
    Project("ansible-core", "wheel", 4.0),
    Project("mypy", "wheel", 3.0),
    Project("nltk", "wheel", 3.0),
    Project("python3.11-doc", "debian", 3.0, held_out=True),
    Project("openvswitch-source", "debian", 3.0, held_out=True),
    Project("glibc-source", "debian", 3.0, held_out=True),
    Project("scipy", "wheel", 3.0, held_out=True),
    Project("Twisted", "wheel", 3.0, held_out=True),
    Project("Sphinx", "wheel", 2.0, held_out=True),
)


def fetch(project: Project, folder: Path) -> Path:
    """The package's file in `folder`, downloaded unless it is there."""
    found = package_file(project, folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(_command(project), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        found = package_file(project, folder)
    if found is None:
        raise FileNotFoundError(f"{project.package}: nothing in {folder} after its download")
    return found


def package_file(project: Project, folder: Path) -> Path | None:
    """The newest file of the package, by name; None if there is none."""
    suffix = ".deb" if project.kind == "debian" else ".whl"
    name = project.package if project.kind == "debian" else _wheel_name(project.package)
    found = [
        path
        for path in folder.glob(f"*{suffix}")
        if (path.name.split("_")[0] if suffix == ".deb" else path.name.split("-")[0].lower())
        == name
    ]
    return max(found, default=None)


def _wheel_name(package: str) -> str:
    return package.lower().replace("-", "_")


def _command(project: Project) -> list[str]:
    if project.kind == "debian":
        return ["apt-get", "download", project.package]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    return [*pip, "--only-binary=:all:", project.package]
