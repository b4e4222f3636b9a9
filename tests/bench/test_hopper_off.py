"""The benchmark without the kernels for Hopper switches them off, and on again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nsa_flex.bench.cases import hopper_off
from nsa_flex.fallback_kernels.common import arch


@pytest.mark.gpu
def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_off, "BUDGET_MS", 20.0)
    out, known = tmp_path / "rows.json", arch.TRITON_VERSIONS
    options = ["--heads", "4/2", "--tokens", "128", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["hopper_off", *options])
    hopper_off.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["hopper"] for row in rows] == [True, False]
    assert all(0 < row["forward_ms"] < row["forward_backward_ms"] for row in rows)
    assert known == arch.TRITON_VERSIONS


def test_off_is_an_unknown_version() -> None:
    device = torch.device("cuda:0")
    arch._warn_of_version.cache_clear()
    with arch.imagining(device, arch.SM90):
        assert arch.version_unsupported_reason(device) is None
        with hopper_off.off(), pytest.warns(UserWarning, match="kernels for Hopper"):
            assert arch.version_unsupported_reason(device) is not None
        assert arch.version_unsupported_reason(device) is None


def test_the_warning_tells_the_committed_rows() -> None:
    path = Path(hopper_off.__file__).parents[1] / "results" / "hopper_off_h100.json"
    rows = json.loads(path.read_text())["rows"]
    of = {row["hopper"]: row for row in rows if (row["heads"], row["tokens"]) == ("64/4", 2048)}
    forward, both = (
        round(100 * (of[False][name] / of[True][name] - 1))
        for name in ("forward_ms", "forward_backward_ms")
    )
    assert re.findall(r"\d+ %", arch.HOPPER_LOSS) == [f"{forward} %", f"{both} %"]
    assert f"a forward takes about {forward} % longer, and {both} % with" in arch.HOPPER_LOSS
