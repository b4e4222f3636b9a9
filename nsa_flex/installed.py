"""Which packages there are and in which versions, without importing them."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch.torch_version import TorchVersion

# The oldest and the newest release of each that the tests of `make compat` pass with.
TESTED = {"torch": ("2.11", "2.14"), "triton": ("3.6", "3.9"), "transformers": ("5.17", "5.24")}


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


def version_of(distribution: str) -> str | None:
    """Of what is installed; None if it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def at_least(distribution: str, version: str) -> bool:
    """Whether `distribution` is installed in that version or a later one."""
    try:
        return TorchVersion(metadata.version(distribution)) >= version
    except metadata.PackageNotFoundError:
        return False


@functools.cache
def warn_if_untested(package: str) -> None:
    """One warning if `package` is installed in a release outside of `TESTED`.

    Patch releases (the third number) are those of a tested one. Without metadata, as of nightly
    builds under another name, there is nothing to compare and no warning.
    """
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return
    oldest, newest = TESTED[package]
    is_older = _release(found) < _release(oldest)
    if is_older or _release(found) > _release(newest):
        warnings.warn(
            f"{package} {found} is {'older' if is_older else 'newer'} than the versions that "
            f"nsa_flex is tested with, {oldest} to {newest}: suspect it first if something fails",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once module `name` has been imported: now if it has been, else after it is."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(MetaPathFinder):
    """Finds one module as the other finders do, and has its loader call the action at the end."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.action)
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self.loader = loader
        self.action = action

    def __getattr__(self, name: str) -> Any:
        """All else (source, resources) is the real loader's."""
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.action()


HAS_TRITON = installed("triton")
# Earlier ones may return log-sum-exps as (B, Hq, S), which `fa2` would read in the wrong order.
HAS_FLASH_ATTN = installed("flash_attn") and at_least("flash-attn", "2.8")
