"""Which optional packages there are, without importing them."""

from __future__ import annotations

import importlib.util


def installed(name: str) -> bool:
    """Whether top-level package `name` can be found; a finder that refuses it counts as no."""
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False


HAS_TRITON = installed("triton")
HAS_FLASH_ATTN = installed("flash_attn")
