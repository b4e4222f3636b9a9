"""Why kernels do not take a call, for whoever explains one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Ask = TypeVar("Ask", bound=Callable[..., str | None])
_listeners: list[Callable[[str, str], None]] = []


def explained(ask: Ask) -> Ask:
    """Decorates a function that says why a kernel does not run: `listening` hears it, too."""

    @functools.wraps(ask)
    def asked(*args, **kwargs):
        reason = ask(*args, **kwargs)
        if _listeners and reason is not None:
            for note in tuple(_listeners):
                note(ask.__module__, reason)
        return reason

    return asked  # type: ignore[return-value]


@contextmanager
def listening(note: Callable[[str, str], None]) -> Iterator[None]:
    """Within, note(module, reason) is called for each reason given in this thread."""
    thread = threading.get_ident()

    def note_own(module: str, reason: str) -> None:
        if threading.get_ident() == thread:
            note(module, reason)

    _listeners.append(note_own)
    try:
        yield
    finally:
        _listeners.remove(note_own)
