"""The corpus of the study: long documents from packages, split by project.

    python -m nsa_flex.bench.quality.build --out corpus

downloads the packages of `PROJECTS`, each wholly trained on or held out (`--downloads` keeps
them), and writes train.jsonl.xz, held_out.jsonl.xz and corpus.json, which names every package, its
hash and what was taken of it.

A document is a folder: its text files one after another, each under its path, so that what a file
names lies in the same context. Long folders are cut into documents of 256k characters. A file
whose contents came before is left out, so that no held-out file was trained on. Characters that
are not ASCII become "?": a character is a byte is a token.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple, cast

from nsa_flex.bench.command_line import parser_of

SUFFIXES = {
    *(".c", ".cc", ".cpp", ".go", ".h", ".java", ".rs", ".S"),
    *(".md", ".py", ".pyi", ".rst", ".txt", ".texi"),
}
LONGEST_FILE = 1 << 19  # longer ones are generated, as a rule
LONGEST_DOCUMENT = 1 << 18
SHORTEST_DOCUMENT = 1 << 12
MOST_OF_A_FOLDER = 1 << 20  # a few hold most of a tree, written by programs
SPLITS = ("train", "held_out")
MANIFEST = "corpus.json"


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


class File(NamedTuple):
    """Of a package: its path there; `read` gives its contents until the next one is asked for."""

    path: PurePosixPath
    size: int
    read: Callable[[], bytes]


@dataclass
class Seen:
    """Contents of files that were taken, so that none is taken twice."""

    digests: set[bytes] = field(default_factory=set)

    def is_new(self, data: bytes) -> bool:
        """Whether it did not come before; from now on it did."""
        digest = hashlib.sha256(data).digest()
        new = digest not in self.digests
        self.digests.add(digest)
        return new


def documents(
    files: Callable[[], Iterable[File]], project: str, megabytes: float, seed: int, seen: Seen
) -> list[str]:
    """The documents of a project's folders, drawn at random until there is enough.

    Args:
        files: called twice: for the sizes, and for the contents of the folders that were drawn.
    """
    sizes: dict[PurePosixPath, int] = {}
    for file in files():
        if file.path.suffix in SUFFIXES and file.size <= LONGEST_FILE:
            sizes[file.path.parent] = sizes.get(file.path.parent, 0) + file.size
    folders = sorted(sizes)
    random.Random(f"{seed}/{project}").shuffle(folders)
    taken: dict[PurePosixPath, dict[str, bytes]] = {}
    size = 0
    for folder in folders:
        if size < 1e6 * megabytes:
            taken[folder] = {}
            size += min(sizes[folder], MOST_OF_A_FOLDER)
    for file in files():
        folder = file.path.parent
        if folder in taken and file.path.suffix in SUFFIXES and file.size <= LONGEST_FILE:
            taken[folder][file.path.name] = file.read()
    texts = (text_of(each, f"{project}/{folder}", seen) for folder, each in taken.items())
    return [piece for text in texts for piece in pieces(text[:MOST_OF_A_FOLDER], LONGEST_DOCUMENT)]


def text_of(files: dict[str, bytes], name: str, seen: Seen) -> str:
    """The text files of one folder, each after a line with its path; others are left out."""
    parts = []
    for path, data in sorted(files.items()):
        if b"\0" not in data and seen.is_new(data):
            text = data.decode(errors="replace").encode("ascii", "replace").decode()
            parts.append(f"==> {name}/{path} <==\n{text}\n")
    return "".join(parts)


def pieces(text: str, length: int) -> Iterator[str]:
    """Consecutive pieces of at most `length` characters; a short last one is dropped.

    >>> list(pieces("x" * 4096 + "y" * 4100, 4096))[1][:3]
    'yyy'
    """
    for start in range(0, len(text), length):
        piece = text[start : start + length]
        if len(piece) >= SHORTEST_DOCUMENT:
            yield piece


def files_of(package: Path, folder: Path) -> Iterator[File]:
    """The files of a wheel or a Debian package, and of the archives of sources in it.

    Args:
        folder: where a Debian package was unpacked to.
    """
    if package.suffix == ".whl":
        yield from _zipped(package)
        return
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        if path.name == "src.zip":
            yield from _zipped(path)
        elif path.suffixes[-2:-1] == [".tar"]:
            yield from _archived(path)
        else:
            name = PurePosixPath(path.relative_to(folder))
            yield File(name, path.stat().st_size, path.read_bytes)


def _zipped(path: Path) -> Iterator[File]:
    with zipfile.ZipFile(path) as archive:
        for each in archive.infolist():
            if not each.is_dir():
                yield File(
                    PurePosixPath(each.filename), each.file_size, partial(archive.read, each)
                )


def _archived(path: Path) -> Iterator[File]:
    with tarfile.open(path) as archive:
        for each in archive:
            if each.isfile():
                file = cast(IO[bytes], archive.extractfile(each))
                yield File(PurePosixPath(each.name), each.size, file.read)


def build(
    out: Path, downloads: Path, projects: tuple[Project, ...] = PROJECTS, seed: int = 0
) -> dict[str, Any]:
    """Write the corpus; returns what corpus.json says.

    Projects that are trained on come first: what they hold is not held out.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    sources = []
    seen = Seen()
    for project in sorted(projects, key=lambda project: project.held_out):
        package = fetch(project, downloads)
        with tempfile.TemporaryDirectory(dir=out) as folder:
            if package.suffix == ".deb":
                subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
            files = partial(files_of, package, Path(folder))
            found = documents(files, project.package, project.megabytes, seed, seen)
        split = SPLITS[project.held_out]
        texts[split] += found
        sources.append(
            {
                "project": project.package,
                "split": split,
                "file": package.name,
                "sha256": sha256(package),
                "documents": len(found),
                "tokens": sum(map(len, found)),
            }
        )
        print(sources[-1], flush=True)
    manifest = {"splits": {split: write(texts[split], split, out, seed) for split in SPLITS}}
    manifest["sources"] = sources  # type: ignore[assignment]
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def write(texts: list[str], split: str, out: Path, seed: int) -> dict[str, Any]:
    """One file of documents in a random order; its hash, and how much it holds."""
    path = corpus_file(out, split)
    random.Random(f"{seed}/{split}").shuffle(texts)
    with lzma.open(path, "wt", encoding="ascii", preset=9) as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    return {
        "documents": len(texts),
        "tokens": sum(map(len, texts)),
        "longest": max(map(len, texts), default=0),
        "sha256": sha256(path),
    }


def corpus_file(folder: Path, split: str) -> Path:
    """The documents of a split in a corpus."""
    return folder / f"{split}.jsonl.xz"


def sha256(path: Path) -> str:
    """Of a file's contents, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Download, write, count."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--downloads", type=Path, help="default: in --out")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    downloads = given.downloads or given.out / "downloads"
    print(json.dumps(build(given.out, downloads, seed=given.seed)["splits"], indent=1))


if __name__ == "__main__":
    main()
