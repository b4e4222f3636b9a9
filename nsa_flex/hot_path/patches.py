"""Attributes of torch that are other ones for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable) -> Iterator[None]:
    """Within, `owner.name` is `replacement`; afterwards what it was, inherited or its own."""
    own = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)
