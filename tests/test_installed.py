"""Which optional packages count as installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from nsa_flex.installed import installed


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_package_is_found(site: Path) -> None:
    (site / "some_kernels").mkdir()
    (site / "some_kernels" / "__init__.py").touch()
    assert installed("some_kernels")


def test_a_folder_that_other_packages_share_is_no_package(site: Path) -> None:
    """flash-attn-4 installs `flash_attn/cute`, and none of flash-attn's own functions."""
    (site / "some_kernels" / "cute").mkdir(parents=True)
    (site / "some_kernels" / "cute" / "__init__.py").touch()
    assert not installed("some_kernels")
    assert installed("some_kernels.cute")


def test_what_a_finder_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def find_spec(self, name: str, *_others: object) -> None:
            raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    assert not installed("some_kernels")
