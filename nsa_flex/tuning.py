"""What dispatch asks of the current CUDA device: its shared memory, and what was tuned for it.

`nsa-flex tune` writes one JSON file a device into the user's cache folder. It is read once, at
the first attention on CUDA, and counts only for the versions that it was measured with;
NSA_FLEX_TUNED=0 ignores it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nsa_flex.installed import HAS_TRITON
from nsa_flex.version import __version__

# Versions that must be those of the measurement: another torch has other kernels.
VERSIONS = ("nsa_flex", "torch", "triton")

# A shape further away than this factor in G or in a head dim says nothing about another.
NEAR = 2.0
# float16 and bfloat16 take equally long: each stands in where the other was not tuned.
OTHER_DTYPE = 1.01


class Entry(NamedTuple):
    """The fastest first, for one branch and kind of shape.

    Args:
        branch: compressed, selected or sliding.
        dtype: "bfloat16" or "float16".
        train: whether a backward followed.
        group_size, head_dim, value_head_dim: G, D, Dv.
        bands: (up to how many queries, or 0 for any; backends), ascending.
    """

    branch: str
    dtype: str
    train: bool
    group_size: int
    head_dim: int
    value_head_dim: int
    bands: tuple[tuple[int, tuple[str, ...]], ...]


def cache_folder() -> Path:
    """Where this platform keeps what can be made again; NSA_FLEX_CACHE_DIR overrides it."""
    if "NSA_FLEX_CACHE_DIR" in os.environ:
        return Path(os.environ["NSA_FLEX_CACHE_DIR"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nsa_flex"


def tuned_file(device_name: str) -> Path:
    """The file of a device, by the name that its driver gives it.

    >>> tuned_file("NVIDIA H200").name
    'tuned-nvidia-h200.json'
    """
    slug = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return cache_folder() / f"tuned-{slug}.json"


def versions() -> dict[str, str | None]:
    """Those of `VERSIONS` that run now."""
    triton = metadata.version("triton") if HAS_TRITON else None
    return {"nsa_flex": __version__, "torch": torch.__version__, "triton": triton}


def parse(text: str) -> tuple[Entry, ...]:
    """Entries of a file's text; none if it was measured with other versions.

    Raises:
        ValueError: it is not such a file.
    """
    try:
        found = json.loads(text)
        if any(found[name] != version for name, version in versions().items()):
            return ()
        return tuple(_entry(each) for each in found["entries"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not a file of nsa-flex tune: {error!r}") from error


def _entry(fields: dict[str, Any]) -> Entry:
    bands = tuple((int(up_to), tuple(names)) for up_to, names in fields["bands"])
    return Entry(**{**fields, "bands": bands})


# Bytes that one program may have on Hopper: what is assumed where there is no device to ask.
HOPPER_SHARED_MEMORY = 232448


@functools.cache
def shared_memory() -> int:
    """Bytes of shared memory that one program may have: 166912 on an A100, 101376 on Ada."""
    if not torch.cuda.is_available():
        return HOPPER_SHARED_MEMORY
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return properties.shared_memory_per_block_optin


@functools.cache
def tuned_entries() -> tuple[Entry, ...]:
    """What was tuned for the current CUDA device; empty if nothing was, or it does not count.

    A file that cannot be read is reported once and ignored: it must not stop a training run.
    """
    if os.environ.get("NSA_FLEX_TUNED") == "0" or not torch.cuda.is_available():
        return ()
    path = tuned_file(torch.cuda.get_device_name())
    try:
        return parse(path.read_text()) if path.exists() else ()
    except (OSError, ValueError) as error:
        import warnings

        warnings.warn(f"{path} was ignored: {error}", stacklevel=2)
        return ()


def lookup(
    entries: tuple[Entry, ...],
    *,
    branch: str,
    dtype: str,
    train: bool,
    group_size: int,
    head_dim: int,
    value_head_dim: int,
    num_queries: int,
) -> tuple[str, ...]:
    """Backends, fastest first, of the nearest shape that was tuned; () if none is near.

    Pure Python on sizes, so that a compiler can trace it: with a symbolic `num_queries` every
    band that is passed becomes a guard, and a graph of its own. dtype is one of the half ones.
    """
    best: tuple[tuple[int, tuple[str, ...]], ...] = ()
    least = 0.0
    for entry in entries:
        if entry.branch != branch or entry.train != train:
            continue
        distance = 1.0 if entry.dtype == dtype else OTHER_DTYPE
        near = True
        for tuned, asked in (
            (entry.group_size, group_size),
            (entry.head_dim, head_dim),
            (entry.value_head_dim, value_head_dim),
        ):
            factor = tuned / asked if tuned > asked else asked / tuned
            near = near and factor <= NEAR
            distance *= factor
        if near and (least == 0.0 or distance < least):
            least, best = distance, entry.bands
    for up_to, backends in best:
        if up_to == 0 or num_queries <= up_to:
            return backends
    return ()
