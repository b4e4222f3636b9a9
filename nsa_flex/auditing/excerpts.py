"""Lines of source around a location, and the comment that allows what is on a line."""

from __future__ import annotations

import linecache
import re
import sys
import sysconfig
from pathlib import Path

# `# audit: allow`, perhaps with a reason behind it.
ALLOW = re.compile(r"#\s*audit:\s*allow\b")

# Of this environment, and of others that it looks into (--system-site-packages, .pth files).
INSTALLED = tuple(
    {
        *(sysconfig.get_path(name) for name in ("purelib", "platlib")),
        *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
    }
)
_LOCATION = re.compile(r"(?P<file>.*):(?P<line>\d+)(?: in (?P<function>.*))?$")


def place_of(location: str) -> tuple[str, int, str]:
    """File, line (0 if there is none) and function of `file:line in function`.

    >>> place_of("model.py:7 in forward")
    ('model.py', 7, 'forward')
    """
    match = _LOCATION.match(location)
    if match is None:
        return location, 0, ""
    return match["file"], int(match["line"]), match["function"] or ""


def shortened(text: str) -> str:
    """Paths in `text` from the current folder on, or from the folder of installed packages on.

    >>> shortened(f"{Path.cwd()}/model.py:7 in forward")
    'model.py:7 in forward'
    """
    for folder in (Path.cwd(), *INSTALLED):
        text = text.replace(f"{folder}/", "")
    return text


def is_allowed(location: str) -> bool:
    """Whether the line, or the one above it, carries the comment `# audit: allow`."""
    file, line, _ = place_of(location)
    above = linecache.getline(file, line - 1).strip() if line > 1 else ""
    return bool(
        ALLOW.search(linecache.getline(file, line))
        or (above.startswith("#") and ALLOW.search(above))
    )


def excerpt(location: str, around: int = 2) -> list[tuple[int, str]]:
    """Numbered lines around a location, without their common indentation; [] if unreadable."""
    file, line, _ = place_of(location)
    numbers = range(max(1, line - around), line + around + 1) if line else ()
    lines = [(n, linecache.getline(file, n).rstrip("\n")) for n in numbers]
    lines = [(n, text) for n, text in lines if text or n == line]
    if not any(text for _, text in lines):
        return []
    indent = min(len(text) - len(text.lstrip()) for _, text in lines if text.strip())
    return [(n, text[indent:]) for n, text in lines]
