"""A corpus of the studies of quality, made of this package's own sources in a second."""

from __future__ import annotations

import zipfile
from pathlib import Path

from nsa_flex.bench.quality.build import Project, build

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "masks").glob("*.py"))
SHARED = "licence of everybody\n" * 20


def wheel(folder: Path, name: str, files: dict[str, str]) -> None:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


def write_corpus(out: Path, downloads: Path) -> Path:
    """Two projects, one of them held out; a file of both is trained on alone."""
    text = "".join(path.read_text() for path in SOURCES)
    halves = {"trained": text[: len(text) // 2], "kept_back": text[len(text) // 2 :]}
    for name, half in halves.items():
        wheel(downloads, name, {f"{name}/a.py": half + "é", f"{name}/licence.txt": SHARED})
    projects = (
        Project("kept-back", "1.0", "wheel", 1.0, held_out=True),
        Project("trained", "1.0", "wheel", 1.0),
    )
    build(out, downloads, projects)
    return out
