"""The corpus as rows of one length: neighbouring rows come from unrelated documents.

A row is a piece of one document from its start on, so that a position in a row is the length of
the context before it. What is left of long documents, and short ones, share rows.
"""

from __future__ import annotations

import json
import lzma
import os
import random
from collections.abc import Iterator
from pathlib import Path

from nsa_flex.bench.quality.build import SPLITS, corpus_file, digest
from nsa_flex.training.tokenization import BYTES


def cut(corpus: Path, seq_len: int, out: Path, held_out_rows: int) -> dict[str, Path]:
    """Files of rows of `seq_len` tokens, the one that ends a document included, by split.

    Nothing is done where they are. The last to be written is the held-out file.

    Args:
        held_out_rows: at most, each of one document; first every document's first one.

    Raises:
        ValueError: no document is long enough for a row, or `out` holds rows of another corpus.
    """
    paths = {split: out / f"{split}-{seq_len}.jsonl" for split in SPLITS}
    out.mkdir(parents=True, exist_ok=True)
    name, source = digest(corpus), out / "corpus"
    if not source.exists() and not any(out.glob("*.jsonl")):
        draft = out / f"corpus.{os.getpid()}"
        draft.write_text(name)
        draft.replace(source)
    if not source.exists() or source.read_text() != name:
        raise ValueError(f"{out} holds rows of another corpus; choose another --work")
    if paths["held_out"].exists():
        return paths
    length = seq_len - 1
    rows = list(training_rows(texts(corpus_file(corpus, "train")), length))
    random.Random(0).shuffle(rows)
    held_out = whole_rows(texts(corpus_file(corpus, "held_out")), length)[:held_out_rows]
    for split, found in zip(SPLITS, (rows, held_out), strict=True):
        if not found:
            raise ValueError(f"{corpus}: no row of {seq_len} tokens in {split}")
        draft = paths[split].with_suffix(".new")
        with draft.open("w") as file:
            file.writelines(json.dumps({"text": row}) + "\n" for row in found)
        draft.replace(paths[split])
    return paths


def texts(path: Path) -> Iterator[str]:
    """The documents of a file."""
    with lzma.open(path, "rt", encoding="ascii") as file:
        for line in file:
            yield json.loads(line)["text"]


def training_rows(documents: Iterator[str], length: int) -> Iterator[str]:
    """All of the text but the last part of a row; documents that share one end within.

    >>> list(training_rows(iter(["abcdef", "gh"]), 4))
    ['abcd', 'ef\\x00g']
    """
    rest = ""
    for text in documents:
        whole = len(text) // length * length
        yield from _pieces(text[:whole], length)
        if text[whole:]:
            rest += text[whole:] + chr(BYTES.end)
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]


def whole_rows(documents: Iterator[str], length: int) -> list[str]:
    """Rows of one document each: the first of every document, then every second one, and so on.

    >>> whole_rows(iter(["abcdef", "ghij", "k"]), 2)
    ['ab', 'gh', 'cd', 'ij', 'ef']
    """
    found: list[tuple[int, str]] = []
    for text in documents:
        whole = len(text) // length * length
        found += enumerate(_pieces(text[:whole], length))
    return [row for _, row in sorted(found, key=lambda each: each[0])]


def _pieces(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]
