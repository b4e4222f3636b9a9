"""The benchmark of a call's time on the host runs, and its rows say what they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa_flex.bench.cases import host_time


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.json"
    options = ["--heads", "4/2", "--tokens", "128", "--documents", "1", "--device", device]
    command = ["host_time", *options, "--repeats", "9", "--no-compiled", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    backwards = []
    backward = torch.Tensor.backward

    def noted(self: torch.Tensor, *args: Any) -> None:
        backwards.append(self)
        backward(self, *args)

    monkeypatch.setattr(torch.Tensor, "backward", noted)
    host_time.main()
    assert len(backwards) >= 2 * 9  # those that are timed, of both rows
    rows = json.loads(out.read_text())
    assert [row["what"] for row in rows] == ["nsa_attention", "dense"]
    for row in rows:
        assert min(row["forward_ms"], row["forward_backward_ms"]) > 0
