"""Which optional packages count as installed."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import nsa_flex
import nsa_flex.installed
from nsa_flex.installed import TESTED, at_least, installed, warn_if_untested


def has_version(site: Path, name: str, version: str) -> None:
    """A package of that name and version is installed in the folder."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")


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
    has_version(site, "some-kernels", version)
    assert at_least("some-kernels", "2.8") is enough


@pytest.mark.parametrize(("version", "used"), [("2.8.3", True), ("2.7.4", False)])
def test_flash_attn_is_used_from_2_8_on(version: str, used: bool, site: Path) -> None:
    (site / "flash_attn").mkdir()
    (site / "flash_attn" / "__init__.py").touch()
    has_version(site, "flash_attn", version)
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


@pytest.fixture
def some_kernels(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that is tested with 3.6 to 3.10."""
    monkeypatch.setitem(TESTED, "some-kernels", ("3.6", "3.10"))
    warn_if_untested.cache_clear()
    yield site
    warn_if_untested.cache_clear()


@pytest.mark.parametrize("version", ["3.6", "3.6.0", "3.9.2", "3.10.7+cu130", "3.6.0a1"])
def test_tested_versions_bring_no_warning(version: str, some_kernels: Path) -> None:
    has_version(some_kernels, "some-kernels", version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("some-kernels")


@pytest.mark.parametrize(
    ("version", "side"),
    [("3.11.0.dev1", "newer"), ("4.0", "newer"), ("3.5.9", "older"), ("2.12+git1a2b", "older")],
)
def test_an_untested_version_is_named_once(version: str, side: str, some_kernels: Path) -> None:
    has_version(some_kernels, "some-kernels", version)
    text = (
        f"some-kernels {version} is {side} than the versions that nsa_flex is tested with, "
        "3.6 to 3.10: suspect it first if something fails"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$") as told:
        warn_if_untested("some-kernels")
    assert [warning.filename for warning in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("some-kernels")


def test_a_version_that_nobody_tells_brings_no_warning(some_kernels: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_untested("some-kernels")


@pytest.fixture
def newer(site: Path) -> Iterator[Callable[[str], None]]:
    """Makes a package one of version 99.1, of which nothing has been said yet."""

    def install(package: str) -> None:
        has_version(site, package, "99.1")
        warn_if_untested.cache_clear()

    yield install
    warn_if_untested.cache_clear()


def named(package: str) -> str:
    return f"^{package} 99.1 is newer than the versions that nsa_flex is tested with"


def test_patching_names_transformers(newer: Callable[[str], None]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=9, num_attention_heads=2, **sizes)
    newer("transformers")
    with pytest.warns(UserWarning, match=named("transformers")) as told:
        nsa_flex.patch(transformers.LlamaForCausalLM(config))
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nsa_flex.patch(transformers.LlamaForCausalLM(config))


def test_kernels_name_triton(newer: Callable[[str], None]) -> None:
    arch = pytest.importorskip("nsa_flex.fallback_kernels.common.arch")
    newer("triton")
    with pytest.warns(UserWarning, match=named("triton")) as told:
        runpy.run_path(arch.__file__)
    assert len(told) == 1


def test_the_import_names_torch_and_nothing_that_it_does_not_need(tmp_path: Path) -> None:
    for package in TESTED:
        has_version(tmp_path, package, "99.1")
    paths = [str(tmp_path), str(Path(nsa_flex.__file__).parents[1])]
    said = subprocess.run(
        [sys.executable, "-c", "import nsa_flex, transformers"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    assert re.search(named("torch"), said.partition("UserWarning: ")[2])
    assert said.count("99.1") == 1


def test_bounds_say_what_is_tested() -> None:
    """The lower bounds of pyproject.toml are the oldest tested versions, and there is no upper."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    bounds = re.findall(rf'"({"|".join(TESTED)})([<>=!~][^";]*)', text)
    assert sorted(bounds) == sorted((name, f">={TESTED[name][0]}") for name in TESTED)
