"""`nsa-flex audit` and the pytest fixture, as a user meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from test_cli import invoke
from typer.testing import CliRunner

from nsa_flex.cli.app import app

FACTORIES = """
    import torch

    def clean():
        return torch.sin, [(torch.ones(2, n),) for n in (8, 9)]

    def scaled(x):
        return x * x.max().item()

    def talking():
        print("a model, made")
        return clean()

    def faulty():
        return scaled, torch.ones(2, 8)

    def wrong():
        return 3

    def empty():
        return torch.sin, []

    def failing():
        raise RuntimeError("no weights here")

    def with_decode():
        return torch.cos, torch.ones(2, 8), [lambda: (torch.ones(2, 1),)]
"""
QUICK = ("--no-measure", "--device", "cpu")


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a module of factories in the current folder."""
    name = f"factories_{os.getpid()}_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(FACTORIES))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_clean_target(factories: str) -> None:
    code, text = invoke("audit", f"{factories}:clean", *QUICK)
    assert code == 0, text
    assert f"{factories}:clean: clean" in text


def test_findings_exit_with_1_and_are_in_json_and_html(factories: str, tmp_path: Path) -> None:
    page = tmp_path / "audit.html"
    code, text = invoke("audit", f"{factories}:faulty", *QUICK, "--html", str(page))
    assert code == 1
    assert "host-sync" in text
    assert f"{factories}.py:8 in scaled" in text
    assert "Tensor.item()" in page.read_text()


def test_json(factories: str) -> None:
    result = CliRunner().invoke(app, ["audit", f"{factories}:faulty", *QUICK, "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert {finding["kind"] for finding in report["findings"]} >= {"host-sync", "graph-break"}


def test_what_a_factory_prints_is_no_part_of_the_json(factories: str) -> None:
    result = CliRunner().invoke(app, ["audit", f"{factories}:talking", *QUICK, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["ok"]
    assert "a model, made" in result.stderr


def test_baseline_fails_on_new_findings_only(factories: str, tmp_path: Path) -> None:
    file = str(tmp_path / "baseline.json")
    target = f"{factories}:faulty"
    assert invoke("audit", target, *QUICK, "--write-baseline", file)[0] == 0
    code, text = invoke("audit", target, *QUICK, "--baseline", file)
    assert code == 0
    assert "Known, from the baseline" in text
    Path(file).write_text('{"version": 2, "findings": []}')
    assert invoke("audit", target, *QUICK, "--baseline", file)[0] == 1


def test_progress_is_lines_where_there_is_no_terminal(factories: str) -> None:
    result = CliRunner().invoke(app, ["audit", f"{factories}:clean", *QUICK, "--json"])
    lines = result.stderr.splitlines()
    assert any(re.fullmatch(r" *\d+\.\d s  .*clean: inference: .*", line) for line in lines), lines


def test_decode_batches_of_a_factory(factories: str) -> None:
    code, text = invoke("audit", f"{factories}:with_decode", *QUICK)
    assert code == 0
    assert "decode" in text


def test_more_graphs_than_allowed(factories: str) -> None:
    code, text = invoke("audit", f"{factories}:clean", *QUICK, "--max-graphs", "1")
    assert code == 1
    assert "2 graphs, at most 1 expected" in text
    assert (
        invoke("audit", f"{factories}:clean", *QUICK, "--max-graphs", "1", "--dynamic", "true")[0]
        == 0
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("no-such-family",), "no causal language model of type 'no-such-family'"),
        (("no_such_module:f",), "No module named 'no_such_module'"),
        (("FACTORIES:wrong",), "must return (model_or_fn, inputs)"),
        (("FACTORIES:missing",), "has no attribute 'missing'"),
        (("FACTORIES:empty",), "returned no inputs"),
        (("FACTORIES:failing",), "could not be called: RuntimeError: no weights here"),
        (("FACTORIES:clean", "--patch"), "call nsa_flex.patch in the factory"),
        (("nsa_attention", "--patch"), "it runs NSA as it is"),
        (("FACTORIES:clean", "--lengths", "5"), "the inputs of FACTORIES:clean say that"),
        (("FACTORIES:clean", "--device", "meta"), "the inputs of FACTORIES:clean are on cpu"),
        (("llama", "--lengths", "0,x"), "expected positive numbers"),
        (("llama", "--dynamic", "maybe"), "'maybe' is none of none, true, false"),
        (("llama", "--baseline", "missing.json"), "missing.json"),
        (("llama", "--device", "warp"), "'warp' is no device"),
        ((), "Missing argument"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: tuple[str, ...], text: str, factories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    named = [argument.replace("FACTORIES", factories) for argument in arguments]
    code, output = invoke("audit", *named)
    assert code == 2
    assert text.replace("FACTORIES", factories) in " ".join(output.replace("│", " ").split())


def test_family_of_transformers() -> None:
    pytest.importorskip("transformers")
    sizes = ("--lengths", "24,40", "--batch-sizes", "2", "--no-train")
    code, text = invoke("audit", "llama", *QUICK, *sizes)
    assert code == 0, text
    assert "llama: clean" in text


USES_THE_FIXTURE = """
    import torch

    def test_clean(assert_compiles_clean):
        report = assert_compiles_clean(torch.sin, [(torch.ones(n),) for n in (8, 9)])
        assert report.graphs == {"inference": 2}

    def scaled(x):
        return x * x.max().item()

    def test_faulty(assert_compiles_clean):
        assert_compiles_clean(scaled, torch.ones(8))

    def test_options(assert_compiles_clean):
        assert_compiles_clean(torch.sin, [(torch.ones(n),) for n in (8, 9)], max_graphs=1)
"""


def test_fixture_fails_with_the_report(tmp_path: Path) -> None:
    file = tmp_path / "test_users_model.py"
    file.write_text(textwrap.dedent(USES_THE_FIXTURE))
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin = ("-p", "nsa_flex.auditing.pytest_plugin")
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, *plugin, file]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "1 passed" in done.stdout
    assert "2 failed" in done.stdout
    assert "host-sync (inference): Tensor.item()" in done.stdout
    assert "2 graphs, at most 1 expected" in done.stdout


def test_plugin_is_registered() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (module,) = re.findall(r'\[project\.entry-points\.pytest11\]\nnsa_flex = "(.+)"', text)
    __import__(module)


def test_make_test_audits_nsa_flex_itself() -> None:
    text = (Path(__file__).parents[2] / "Makefile").read_text()
    assert re.search(r"^test: .*\baudit\b", text, re.M)
    assert re.search(r"^audit: .*\n\t\S*nsa-flex audit self .*--no-train", text, re.M)
