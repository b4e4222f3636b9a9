"""bench.sanitize: what it makes of the tool's output, and its exit status; the tool is played."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nsa_flex.bench.tools import sanitize
from nsa_flex.bench.tools.sanitized_calls import FAMILIES

LAUNCHED = '{"family": "merge", "launches": {"gated_sum_fwd_kernel": 2}}\n'
NOTHING = LAUNCHED + "========= ERROR SUMMARY: 0 errors\n"
READ = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at block_union_kernel+0x120
========= Target application returned an error
========= ERROR SUMMARY: 65 errors
"""
RACE = f"""{LAUNCHED}========= Warning: Race reported between Write access at ranges_fwd_kernel
=========     and Read access at ranges_fwd_kernel [672 hazards]
========= RACECHECK SUMMARY: 3 hazards displayed (0 errors, 3 warnings)
"""


@pytest.mark.parametrize(
    ("tool", "text", "code", "status", "counts"),
    [
        (None, LAUNCHED, 0, "clean", (0, 0)),
        (None, "Traceback", 1, "failed", (0, 0)),
        ("memcheck", NOTHING, 0, "clean", (0, 0)),
        ("memcheck", NOTHING, 1, "failed", (0, 0)),
        ("memcheck", LAUNCHED, 0, "failed", (0, 0)),
        ("memcheck", READ, 1, "found", (65, 0)),
        ("racecheck", RACE, 0, "found", (0, 3)),
        ("racecheck", "no end within 1 s", None, "failed", (0, 0)),
    ],
)
def test_judgement(
    tool: str | None, text: str, code: int | None, status: str, counts: tuple[int, int]
) -> None:
    result = sanitize.judge("merge", tool, text, code, 1.0)
    assert (result.status, (result.errors, result.warnings)) == (status, counts)
    assert bool(result.findings) == (status != "clean")


def test_findings_are_the_heads_of_reports() -> None:
    assert sanitize.judge("core", "memcheck", READ, 1, 1.0).findings == [
        "Invalid __global__ read of size 4 bytes",
        "Target application returned an error",
    ]


def test_a_family_is_as_bad_as_its_worst_call() -> None:
    texts = ((NOTHING, 0), (READ, 1), (NOTHING, 0))
    results = [sanitize.judge("merge", "memcheck", text, code, 1.0) for text, code in texts]
    other = sanitize.judge("merge", "racecheck", RACE, 0, 1.0)
    both = sanitize.summed([*results, other])
    assert [(r.tool, r.status, r.errors) for r in both] == [
        ("memcheck", "found", 65),
        ("racecheck", "found", 0),
    ]
    assert both[0].launches == {"gated_sum_fwd_kernel": 4}
    assert both[0].findings == results[1].findings


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the tool prints goes into this file; the calls run in Triton's interpreter."""
    printed = tmp_path / "printed"
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/commands\ncat {printed}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "describe", lambda device: {"device": "played"})
    return printed


def test_rows_and_exit_status(played: Path, tmp_path: Path) -> None:
    """The calls run before the tool does, and without it."""
    rows = tmp_path / "rows.json"
    played.write_text(NOTHING)
    command = ["merge", "--tools", "memcheck", "--json", str(rows)]
    assert sanitize.main(command) == 0
    (row,) = json.loads(rows.read_text())
    assert (row["case"], row["status"]) == ("sanitizer/memcheck merge", "clean")
    assert row["launches"] == {"gated_sum_fwd_kernel": 2}
    asked, _ = (tmp_path / "commands").read_text().splitlines()  # and for its version
    assert "--tool memcheck --kernel-name kns=_kernel --kernel-name-exclude kns=cudnn" in asked


def test_a_finding_fails(
    played: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played.write_text(RACE)
    monkeypatch.setattr(sanitize, "run", under_the_tool(sanitize.run))
    assert sanitize.main(["merge"]) == 1
    out = capsys.readouterr().out
    assert "Race reported" in out
    assert "racecheck  found" in out


def under_the_tool(run):
    """The calls as they are, not run at all."""

    def played_run(family, call, tool, sanitizer, timeout):
        if tool is None:
            return sanitize.judge(family, tool, LAUNCHED, 0, 0.0)
        return run(family, call, tool, sanitizer, timeout)

    return played_run


def test_without_the_tool_or_a_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: None)
    assert sanitize.main([]) == 2
    assert "no compute-sanitizer here" in capsys.readouterr().err
    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "anything")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_help_and_unknown_families(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        sanitize.main(["--help"])
    out = capsys.readouterr().out
    assert all(family in out for family in FAMILIES)
    with pytest.raises(SystemExit, match="2"):
        sanitize.main(["nothing"])
    assert "no family nothing" in capsys.readouterr().err


def test_kernels_are_read_from_the_sources() -> None:
    kernels = [kernel.name for kernel in sanitize.kernels()]
    assert {
        "fused_sliding_epilogue_kernel",
        "topk_scores_kernel",
        "topk_scores_sm90_kernel",
    } <= set(kernels)
    assert "attend_window" not in kernels
    assert all("_kernel" in name for name in kernels)  # what the filter lets through


def test_every_kernel_has_a_name_of_its_own() -> None:
    """Launches and profiles are told apart by it."""
    kernels = [kernel.name for kernel in sanitize.kernels()]
    assert sorted(set(kernels)) == sorted(kernels)
