"""The corpus of the study: long documents from packages, split by project.

    python -m nsa_flex.bench.quality.build --out corpus

downloads the packages of `PROJECTS`, each wholly trained on or held out (`--downloads` keeps
them), and writes train.jsonl.xz, held_out.jsonl.xz and corpus.json, which names every package, its
hash and what was taken of it. Another version of a package makes another corpus, and rows of two
corpora cannot be compared; where one is gone, --any-version takes what is offered of all.

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
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, NamedTuple, cast

from nsa_flex.bench.command_line import parser_of
from nsa_flex.bench.report.rows import Row, earlier_rows

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
        version: None takes what is offered.
        kind: "debian" (`apt-get download`) or "wheel" (`pip download`).
        megabytes: of text at most, folders drawn at random.
        held_out: all of it is, or none.
    """

    package: str
    version: str | None
    kind: Literal["debian", "wheel"]
    megabytes: float
    held_out: bool = False


PROJECTS: tuple[Project, ...] = (
    Project("linux-source-6.1", "6.1.176-1", "debian", 40.0),
    Project("gcc-12-source", "12.2.0-14+deb12u1", "debian", 12.0),
    Project("golang-1.19-src", "1.19.8-2", "debian", 10.0),
    Project("openjdk-17-source", "17.0.19+10-1~deb12u2", "debian", 10.0),
    Project("rust-src", "1.63.0+dfsg1-2", "debian", 8.0),
    Project("transformers", "5.24.0", "wheel", 8.0),
    Project("sympy", "1.14.0", "wheel", 6.0),
    Project("astropy", "8.0.2", "wheel", 6.0),
    Project("sglang", "0.5.23", "wheel", 6.0),
    Project("pandas", "3.1.1", "wheel", 5.0),
    Project("scikit-learn", "1.9.1", "wheel", 5.0),
    Project("matplotlib", "3.11.2", "wheel", 5.0),
    Project("SQLAlchemy", "2.1.9", "wheel", 4.0),
    Project("networkx", "3.6.1", "wheel", 4.0),
    Project("Django", "5.2.19", "wheel", 4.0),
    Project("ansible-core", "2.19.14", "wheel", 4.0),
    Project("mypy", "2.4.1", "wheel", 3.0),
    Project("nltk", "3.10.4", "wheel", 3.0),
    Project("python3.11-doc", "3.11.2-6+deb12u8", "debian", 3.0, held_out=True),
    Project("openvswitch-source", "3.1.0-2+deb12u1", "debian", 3.0, held_out=True),
    Project("glibc-source", "2.36-9+deb12u14", "debian", 3.0, held_out=True),
    Project("scipy", "1.17.1", "wheel", 3.0, held_out=True),
    Project("Twisted", "26.10.0", "wheel", 3.0, held_out=True),
    Project("Sphinx", "9.0.4", "wheel", 2.0, held_out=True),
)


def fetch(project: Project, folder: Path) -> Path:
    """The package's file in `folder`, downloaded unless it is there."""
    found = package_file(project, folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(_command(project), cwd=folder, stdout=subprocess.DEVNULL)
        if done.returncode:
            advice = ": --any-version takes what is offered" if project.version else ""
            raise FileNotFoundError(f"no {_command(project)[-1]} to download{advice}")
        found = package_file(project, folder)
    if found is None:
        raise FileNotFoundError(f"{project.package}: nothing in {folder} after its download")
    return found


def package_file(project: Project, folder: Path) -> Path | None:
    """The package's file of that version, or the newest by name; None if there is none."""
    name, between, suffix = project.package, "_", ".deb"
    if project.kind == "wheel":
        name, between, suffix = name.lower().replace("-", "_"), "-", ".whl"
    found = []
    for path in folder.glob(f"*{suffix}"):
        told, _, rest = path.name.partition(between)
        if told.lower() == name and project.version in (None, rest.split(between)[0]):
            found.append(path)
    return max(found, default=None)


def _command(project: Project) -> list[str]:
    name, version = project.package, project.version
    if project.kind == "debian":
        return ["apt-get", "download", name if version is None else f"{name}={version}"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    return [*pip, "--only-binary=:all:", name if version is None else f"{name}=={version}"]


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
    """One file of documents in a random order; how much it holds, and the hash of its text."""
    random.Random(f"{seed}/{split}").shuffle(texts)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    with lzma.open(corpus_file(out, split), "wt", encoding="ascii", preset=9) as file:
        file.writelines(lines)
    return {
        "documents": len(texts),
        "tokens": sum(map(len, texts)),
        "longest": max(map(len, texts), default=0),
        "sha256": hashlib.sha256("".join(lines).encode()).hexdigest(),
    }


def corpus_file(folder: Path, split: str) -> Path:
    """The documents of a split in a corpus."""
    return folder / f"{split}.jsonl.xz"


def digest(corpus: Path) -> str:
    """What rows call a corpus: 12 hexadecimal digits of the hashes of its text."""
    splits = json.loads((corpus / MANIFEST).read_text())["splits"]
    hashes = "".join(splits[split]["sha256"] for split in SPLITS)
    return hashlib.sha256(hashes.encode()).hexdigest()[:12]


def rows_of_corpus(out: Path, corpus: Path) -> list[Row]:
    """The rows that `out` holds, if any.

    Raises:
        ValueError: they are of another corpus.
    """
    rows = earlier_rows(out)
    if {row.get("corpus") for row in rows} - {digest(corpus)}:
        raise ValueError(f"{out} holds rows of another corpus; choose another --out")
    return rows


def sha256(path: Path) -> str:
    """Of a file's contents, in hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> None:
    """Download, write, count."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--downloads", type=Path, help="default: in --out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--any-version", action="store_true")
    given = parser.parse_args()
    downloads = given.downloads or given.out / "downloads"
    projects = PROJECTS
    if given.any_version:
        projects = tuple(replace(each, version=None) for each in PROJECTS)
    print(json.dumps(build(given.out, downloads, projects, given.seed)["splits"], indent=1))


if __name__ == "__main__":
    main()
