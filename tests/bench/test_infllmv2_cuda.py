"""The benchmark beside OpenBMB's kernels has a row of each way, and their distance."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nsa_flex.bench.cases import infllmv2_cuda


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = infllmv2_cuda.ours
    ways = {"infllmv2_cuda_impl": lambda *leaves: 1.5 * ours(*leaves), "nsa_flex": ours}
    monkeypatch.setattr(infllmv2_cuda, "WAYS", ways)
    out = tmp_path / "rows.json"
    options = ["--heads", "2/1", "--tokens", "64", "--milliseconds", "1", "--device", "cpu"]
    infllmv2_cuda.main([*options, "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [row["name"] for row in rows] == list(ways)
    for row in rows:
        assert (row["heads"], row["tokens"]) == ("2/1", 64)
        # 1.5 times a bfloat16 is rounded to one.
        assert row["distance"] == pytest.approx(0.5, abs=2 * torch.finfo(torch.bfloat16).eps)
        assert min(row["forward_ms"], row["forward_backward_ms"]) > 0
