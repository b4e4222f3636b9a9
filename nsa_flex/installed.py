"""Which optional packages there are, without importing them."""

from __future__ import annotations

import importlib.util
from importlib import metadata

from torch.torch_version import TorchVersion


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


def at_least(distribution: str, version: str) -> bool:
    """Whether `distribution` is installed in that version or a later one."""
    try:
        return TorchVersion(metadata.version(distribution)) >= version
    except metadata.PackageNotFoundError:
        return False


HAS_TRITON = installed("triton")
# Earlier ones may return log-sum-exps as (B, Hq, S), which `fa2` would read in the wrong order.
HAS_FLASH_ATTN = installed("flash_attn") and at_least("flash-attn", "2.8")
