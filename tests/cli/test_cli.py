"""The `nsa-flex` command: help, exit codes, JSON."""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import nsa_flex
from nsa_flex.cli.app import app
from nsa_flex.cli.info import PACKAGES, collect

COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), prog_name="nsa-flex")
    return result.exit_code, result.output


def test_version() -> None:
    assert invoke("--version") == (0, f"nsa-flex {nsa_flex.__version__}\n")


def test_help_lists_every_command_and_the_exit_codes() -> None:
    code, text = invoke("--help")
    assert code == 0
    assert COMMANDS
    assert all(name in text for name in COMMANDS)
    assert "Exit codes: 0" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str) -> None:
    code, text = invoke(command, "--help")
    assert code == 0
    assert f"Example: nsa-flex {command}" in text


@pytest.mark.parametrize("arguments", [["nonsense"], ["info", "--nonsense"], []])
def test_wrong_usage_exits_with_2(arguments: list[str]) -> None:
    assert invoke(*arguments)[0] == 2


def test_info_as_json_is_what_collect_returns() -> None:
    code, text = invoke("info", "--json")
    assert code == 0
    assert json.loads(text) == collect()


def test_info_names_versions_and_devices() -> None:
    facts = collect()
    assert set(facts["packages"]) == set(PACKAGES)
    assert facts["packages"]["torch"] == torch.__version__
    assert len(facts["cuda"]["devices"]) == torch.cuda.device_count()


@pytest.mark.parametrize(("there", "provider"), [(True, "flash-attn"), (False, "torch")])
def test_info_names_what_fa2_runs_on(
    there: bool, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nsa_flex.cli.info.HAS_FLASH_ATTN", there)
    assert collect()["fa2"] == provider
    assert re.search(rf"fa2 runs on +│ {provider} ", invoke("info")[1])


def test_info_as_table_shows_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr("nsa_flex.cli.info.PACKAGES", ("torch", "no-such-package"))
    code, text = invoke("info")
    assert code == 0
    assert "no-such-package │ not installed" in text
    assert "torch.compile will fail" in text
