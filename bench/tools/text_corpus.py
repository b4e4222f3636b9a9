"""Folders of sources and prose as a corpus of long documents, compressed.

    python -m nsa_flex.bench.tools.text_corpus linux/Documentation=40 linux/kernel linux/fs=20 \
        --out corpus

writes corpus/train.jsonl.xz and corpus/held_out.jsonl.xz. A document is a folder: its text files
one after another, each under its path, so that what a file names lies in the same context. Long
folders are cut into pieces. Which folders are held out follows from their names. `=40` takes about
40 MB of a tree, folders drawn at random.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {".c", ".h", ".md", ".py", ".pyi", ".rst", ".S", ".txt"}
LONGEST_FILE = 1 << 20  # longer ones are generated, as a rule
LONGEST_DOCUMENT = 1 << 18
HELD_OUT_DOCUMENT = 1 << 15  # short, so that a few rows come from many folders
SHORTEST_DOCUMENT = 1 << 12


def folders(root: Path, megabytes: float | None, seed: int) -> Iterator[tuple[str, str]]:
    """Name and text of folders below `root`, in a random order, until there is enough."""
    found = sorted({path.parent for path in root.rglob("*") if path.suffix in SUFFIXES})
    random.Random(seed).shuffle(found)
    size = 0
    for folder in found:
        if megabytes is not None and size > 1e6 * megabytes:
            return
        name = f"{root.name}/{folder.relative_to(root)}"
        text = text_of(folder, name)
        if len(text) >= SHORTEST_DOCUMENT:
            size += len(text)
            yield name, text


def text_of(folder: Path, name: str) -> str:
    """The text files of one folder, each after a line with its path; others are left out."""
    parts = []
    for path in sorted(folder.iterdir()):
        if path.suffix not in SUFFIXES or path.is_symlink() or not path.is_file():
            continue
        data = path.read_bytes()
        if len(data) > LONGEST_FILE or b"\0" in data:
            continue
        try:
            parts.append(f"==> {name}/{path.name} <==\n{data.decode()}\n")
        except UnicodeDecodeError:
            continue
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


def is_held_out(name: str, share: float) -> bool:
    """Decided by the name alone."""
    return zlib.crc32(name.encode()) / 2**32 < share


def write(
    trees: list[tuple[Path, float | None]], out: Path, *, held_out_share: float, seed: int
) -> dict[str, int]:
    """Write both files, documents in a random order; returns how many, and their characters.

    Of a held-out folder the first piece is kept.
    """
    out.mkdir(parents=True, exist_ok=True)
    texts: dict[str, list[str]] = {"train": [], "held_out": []}
    for root, megabytes in trees:
        for name, text in folders(root, megabytes, seed):
            if is_held_out(name, held_out_share):
                texts["held_out"] += list(pieces(text, HELD_OUT_DOCUMENT))[:1]
            else:
                texts["train"] += pieces(text, LONGEST_DOCUMENT)
    for name, documents in texts.items():
        random.Random(seed).shuffle(documents)
        path = out / f"{name}.jsonl.xz"
        with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
    return {f"{name}_documents": len(documents) for name, documents in texts.items()} | {
        f"{name}_characters": sum(map(len, documents)) for name, documents in texts.items()
    }


def _tree(text: str) -> tuple[Path, float | None]:
    path, equals, megabytes = text.partition("=")
    return Path(path), float(megabytes) if equals else None


def main() -> None:
    """Read, write, count."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trees", nargs="+", type=_tree, help="folder, or folder=megabytes")
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--held-out-share", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(write(given.trees, given.out, held_out_share=given.held_out_share, seed=given.seed))


if __name__ == "__main__":
    main()
