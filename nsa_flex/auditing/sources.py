"""Where code stands: what a callable wraps, lines around a location, comments that allow."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import torch

from nsa_flex.hot_path import ForwardBackward

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


def unwrapped(value: Any, owner: type | None = None) -> tuple[Any, type | None]:
    """Through compiled wrappers, partials, decorators and bound methods; the class of the last."""
    while True:
        if isinstance(value, ForwardBackward):
            value = value.fn
        elif isinstance(value, functools.partial):
            value = value.func
        elif isinstance(value, types.MethodType):
            value, owner = value.__func__, type(value.__self__)
        elif not isinstance(value, torch.nn.Module) and hasattr(value, "__wrapped__"):
            value = value.__wrapped__
        elif hasattr(value, "_orig_mod"):
            value = value._orig_mod
        else:
            return value, owner


def definition_of(fn: Any) -> str:
    """`file:line in function` of a function, or of a module's `forward`; else its name.

    >>> definition_of(torch.nn.Linear(2, 2)).rpartition(" in ")[2]
    'forward'
    >>> definition_of(torch.sin)
    'sin'
    """
    value, _ = unwrapped(fn)
    if isinstance(value, torch.nn.Module):
        value, _ = unwrapped(type(value).forward)
    elif not isinstance(value, types.FunctionType):
        value, _ = unwrapped(inspect.getattr_static(type(value), "__call__", value))
    code = getattr(value, "__code__", None)
    if code is None:
        return getattr(fn, "__name__", type(fn).__name__)
    return f"{code.co_filename}:{code.co_firstlineno} in {code.co_name}"


@functools.lru_cache(maxsize=256)
def syntax_tree(file: str) -> ast.Module | None:
    """The parsed file; None where it cannot be read."""
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None
