"""A run's folder belongs to one process (of several ranks, to rank 0) while it writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = "run.lock"


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Within, no other process can hold the lock on `run`, which exists.

    The system takes the lock away from a process that ends, however it ends, and gives it to none
    of its children: there are no stale ones. The file says who holds it.

    Raises:
        ValueError: another process holds it; its number and host are named.
        OSError: the file cannot be written, or its file system knows no locks.
    """
    with (run / LOCK_FILE).open("a+") as file:
        _take(file.fileno(), run)
        os.ftruncate(file.fileno(), 0)
        os.write(file.fileno(), f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        try:
            yield
        finally:
            os.ftruncate(file.fileno(), 0)


def check_free(run: Path) -> None:
    """Raise ValueError if another process holds the lock on `run`; nothing is written."""
    if (run / LOCK_FILE).exists():
        with (run / LOCK_FILE).open("r+") as file:
            _take(file.fileno(), run)


def _take(file: int, run: Path) -> None:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of the process: forks do not inherit it
    except (BlockingIOError, PermissionError) as error:
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise ValueError(
            f"{run} is in use by {holder}: wait for it or stop it, or choose another out"
        ) from error
