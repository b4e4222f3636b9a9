"""Which optional packages count as installed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import nsa_flex.installed
from nsa_flex.installed import at_least, installed


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


@pytest.mark.parametrize(
    ("version", "enough"),
    [("2.8.3.post1", True), ("2.10.0", True), ("2.8", True), ("2.7.4", False), ("1.0.9", False)],
)
def test_versions_are_compared_by_number(version: str, enough: bool, site: Path) -> None:
    folder = site / f"some_kernels-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: some-kernels\nVersion: {version}\n")
    assert at_least("some-kernels", "2.8") is enough


@pytest.mark.parametrize(("version", "used"), [("2.8.3", True), ("2.7.4", False)])
def test_flash_attn_is_used_from_2_8_on(version: str, used: bool, site: Path) -> None:
    (site / "flash_attn").mkdir()
    (site / "flash_attn" / "__init__.py").touch()
    folder = site / f"flash_attn-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: flash_attn\nVersion: {version}\n")
    found = runpy.run_path(nsa_flex.installed.__file__)
    assert found["HAS_FLASH_ATTN"] is used


def test_a_package_without_metadata_has_no_version(site: Path) -> None:
    (site / "some_kernels").mkdir()
    (site / "some_kernels" / "__init__.py").touch()
    assert not at_least("some-kernels", "2.8")


def test_what_a_finder_refuses_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        def find_spec(self, name: str, *_others: object) -> None:
            raise ImportError(name)

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    assert not installed("some_kernels")
