"""Real text that every machine has: the sources of Python's own standard library, as bytes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nsa_flex.training.files import STANDARD_LIBRARY, python_sources

HELD_OUT_SHARE = 0.1
# Between files, and before the first: no source file contains it.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Text split by file: no file is in both halves.

    Args:
        training: uint8 (bytes,), the files one after another.
        held_out: uint8 (bytes,), likewise.
        training_files, held_out_files: names relative to the root.
    """

    training: Tensor
    held_out: Tensor
    training_files: tuple[str, ...]
    held_out_files: tuple[str, ...]


def read_corpus(seed: int, root: Path | None = None) -> Corpus:
    """Every source file below `root`, a tenth of them (chosen by `seed`) held out.

    Args:
        root: directory with Python sources; the running Python's standard library if None.

    Raises:
        FileNotFoundError: fewer than two files, as in a Python that ships without its sources.
    """
    root = STANDARD_LIBRARY if root is None else root
    names = sorted(path.relative_to(root) for path in python_sources(root))
    if len(names) < 2:
        raise FileNotFoundError(
            f"{root} holds {len(names)} Python sources; the demo needs the standard library's: "
            "run it with a Python that ships them"
        )
    random.Random(seed).shuffle(names)
    num_held_out = max(1, round(HELD_OUT_SHARE * len(names)))
    held_out, training = names[:num_held_out], names[num_held_out:]
    return Corpus(
        _join(root, training),
        _join(root, held_out),
        tuple(map(str, training)),
        tuple(map(str, held_out)),
    )


def _join(root: Path, names: list[Path]) -> Tensor:
    text = b"".join(SEPARATOR + (root / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def random_windows(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """int64 (count, length): that many consecutive bytes from random places.

    Raises:
        ValueError: the text is shorter than `length`.
    """
    last = _last_start(text, length)
    return _windows(text, torch.randint(last + 1, (count,), generator=generator), length)


def even_windows(text: Tensor, count: int, length: int) -> Tensor:
    """int64 (count, length): windows spread evenly from the first byte to the last; likewise."""
    last = _last_start(text, length)
    return _windows(text, torch.linspace(0, last, count, dtype=torch.float64).long(), length)


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    return text[starts[:, None] + torch.arange(length)].long()


def _last_start(text: Tensor, length: int) -> int:
    if len(text) < length:
        raise ValueError(f"seq_len={length} is longer than the text, {len(text)} bytes")
    return len(text) - length


def frequency_loss(training: Tensor, windows: Tensor) -> float:
    """Nats a byte of `windows` under the byte frequencies of `training`: knowing no context.

    Args:
        training: uint8 (bytes,).
        windows: int64 (count, length); the first byte of each is given, as it is to a model.
    """
    counts = torch.bincount(training.int(), minlength=256).double() + 1  # No byte is impossible.
    log_frequency = (counts / counts.sum()).log()
    return -log_frequency[windows[:, 1:]].mean().item()


def as_text(tokens: Tensor) -> str:
    """Bytes as text: UTF-8, with what is no text replaced."""
    return bytes(tokens.tolist()).decode(errors="replace").replace("\0", "\n")
