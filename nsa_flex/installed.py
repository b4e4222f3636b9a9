"""Which optional packages there are, without importing them."""

from __future__ import annotations

import importlib.util


def installed(name: str) -> bool:
    """Whether package `name` can be found; a finder that refuses it counts as no.

    So does a folder without an `__init__`: flash-attn-4 alone brings `flash_attn/cute`, and no
    `flash_attn`.
    """
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:
        return False
    return spec is not None and spec.origin is not None


HAS_TRITON = installed("triton")
HAS_FLASH_ATTN = installed("flash_attn")
