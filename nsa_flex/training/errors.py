"""What stops a training run, and its cause in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class TrainingError(RuntimeError):
    """A run cannot go on: the loss is not finite, a file cannot be read, the disk is full.

    What was written before is whole; the message says how to go on.
    """


@contextlib.contextmanager
def blamed_on(what: str) -> Iterator[None]:
    """Within, what other libraries raise over a user's files and settings is a ValueError.

    Args:
        what: names the setting, and begins the message.
    """
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError, ImportError):
        raise
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"{what}: {kind}{in_one_line(error)}") from error


def in_one_line(error: BaseException) -> str:
    """The message of an error; of one from a DataLoader's worker, without the worker's trace."""
    text = str(error)
    if "Original Traceback" in text:
        text = text.rpartition(f"{type(error).__name__}: ")[2]
    return " ".join(text.split())
